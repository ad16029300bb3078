"""Layers of image encoders: convolutions of unscaled pixels, normalised channels, convolutions of bounded gain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.kernels.device import in_bf16
from rlframe.models.network import LAYER_EPSILON


class FirstConv2d(nn.Conv2d):
    """A convolution of x * scale, for unscaled pixels: it scales the weights, which are fewer."""

    def __init__(
        self, channels: int, out: int, kernel: int, stride: int = 1, padding: int = 0, scale: float = 1.0
    ) -> None:
        super().__init__(channels, out, kernel, stride, padding)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or (x.is_cuda and in_bf16()):
            # The weight gradient of a layer with few channels takes a fifth of the time in this layout: Mnih et al.'s
            # network, forward and backward of 32 frame stacks, 13.7 -> 7.7 ms on one core of an AMD EPYC. A GPU
            # multiplies bfloat16 in it alone: an update of atari/btr_pong, targets too, 21.8 -> 20.1 ms on an H100.
            x = x.contiguous(memory_format=torch.channels_last)
        x = x.bfloat16() if in_bf16() else x.float()  # bfloat16 represents 0 to 255 exactly
        return F.conv2d(x, self.weight * self.scale, self.bias, self.stride, self.padding)


class ChannelNorm(nn.Module):
    """Normalisation of the channels of each pixel of [N, channels, height, width] (Ba et al. 2016), in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.movedim(1, -1).float()  # of bfloat16, gradients would be wrong by 2 to 4 % instead of 1
        return F.layer_norm(pixels, pixels.shape[-1:], self.weight, self.bias, LAYER_EPSILON).movedim(-1, 1)


class SpectralConv2d(nn.Conv2d):
    """A convolution by W / σ, σ the largest singular value of W as a matrix [out, in * k * k].

    (Miyato, Kataoka, Koyama & Yoshida 2018, arXiv 1802.05957.) σ = u^T W v with v = W^T u / |W^T u| and
    u <- W v / |W v|: each forward pass makes one iteration from the buffer u, and where its parameters learn it stays.
    So acting, targets and evaluation, which change nothing, use the σ that learning would use.
    """

    left: Tensor  # u [out], of length 1

    def __init__(self, channels: int, out: int, kernel: int, padding: int) -> None:
        super().__init__(channels, out, kernel, padding=padding)
        self.register_buffer("left", F.normalize(torch.randn(out), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight / self._sigma(), self.bias)

    def _sigma(self) -> Tensor:
        """σ [], with u and v constant: its gradient is that of the singular value."""
        with torch.autocast(self.weight.device.type, enabled=False):
            matrix = self.weight.flatten(1)
            with torch.no_grad():
                right = F.normalize(self.left @ matrix, dim=0)
                left = F.normalize(matrix @ right, dim=0)
            if torch.is_grad_enabled() and self.weight.requires_grad:
                self.left.copy_(left)
            return left @ (matrix @ right)


class AdaptiveMaxPool2d(nn.Module):
    """Maxima of n x n equal parts, which overlap where n does not divide a side, as torch's module of this name.

    That one cannot be exported to ONNX, and is not deterministic on a GPU (torch.use_deterministic_algorithms).
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        for dim in (-2, -1):
            side = x.shape[dim]
            bounds = [(i * side // self.n, -(-(i + 1) * side // self.n)) for i in range(self.n)]
            x = torch.stack([x.narrow(dim, low, high - low).amax(dim) for low, high in bounds], dim)
        return x


def spectral_vectors(network: nn.Module) -> list[Tensor]:
    """The buffers of power iteration, of which learning makes others."""
    return [module.left for module in network.modules() if isinstance(module, SpectralConv2d)]
