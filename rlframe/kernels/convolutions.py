"""Convolutions of images with a relu after each, in bfloat16 on a CPU, whose gradient is written out.

The first one's kernel is a multiple of its stride, so it is one of stride 1 over blocks of stride x stride pixels, all
of a block's numbers being its channels. Bytes come into blocks four at a time, and a weight's gradient takes less time
where there are more channels: PPO on Pong, two threads of an AMD EPYC, trains 1.07 times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlframe.kernels.device import in_bf16
from rlframe.kernels.matmul import on_cpu
from rlframe.kernels.mlp import relu_, relu_backward

_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as many bytes at once


class Convolution(NamedTuple):
    """Without padding; the kernel of the first one is a multiple of its stride."""

    weight: Tensor  # [out, in, kernel, kernel]
    bias: Tensor  # [out]
    stride: int


def supports(x: Tensor) -> bool:
    """Whether these pixels are for `convolve`: where learning is in bfloat16, and no gradient of theirs is wanted."""
    return in_bf16() and not torch.compiler.is_compiling() and on_cpu(x) and not x.requires_grad


def convolve(x: Tensor, scale: float, layers: Sequence[Convolution]) -> Tensor:
    """Pixels [n, c, h, w] times `scale` to bfloat16 [n, out, h', w'], channels last; with autograd. NaN stays NaN."""
    strides = [layer.stride for layer in layers]
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    found: Tensor = _Convolve.apply(x, scale, strides, *parameters)
    return found


class _Convolve(torch.autograd.Function):
    """All layers as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, strides: list[int], *parameters: Tensor) -> Tensor:
        first, kernels = parameters[0] * scale, parameters[2::2]
        x = _pixels_in_blocks(x, strides[0]).bfloat16()
        weights, seen = [_kernel_over_blocks(first, strides[0]), *kernels], []
        ctx.scale, ctx.strides, ctx.kernel = scale, [1, *strides[1:]], first.shape
        for i, bias in enumerate(parameters[1::2]):
            weights[i] = weights[i].to(torch.bfloat16, memory_format=torch.channels_last)
            seen.append(x)
            x = relu_(F.conv2d(x, weights[i], bias.bfloat16(), ctx.strides[i]))
        ctx.save_for_backward(*weights, *seen, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        n = len(ctx.strides)
        weights, seen = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        found: list[Tensor] = []
        g = g.clone(memory_format=torch.channels_last)
        for i in reversed(range(n)):
            g = relu_backward(g, seen[i + 1])
            g, of_weight, of_bias = _gradients(g, seen[i], weights[i], ctx.strides[i], with_x=i > 0)
            found = [of_weight.float(), of_bias.float(), *found]
        found[0] = _kernel_of_pixels(found[0], ctx.kernel) * ctx.scale
        return None, None, None, *found


def _gradients(g: Tensor, x: Tensor, weight: Tensor, stride: int, with_x: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of a convolution: dL/dx, or nothing, dL/d weight and dL/d bias."""
    nothing, once, wanted = [0, 0], [1, 1], [with_x, True, True]
    return torch.ops.aten.convolution_backward(
        g, x, weight, [len(weight)], [stride, stride], nothing, once, False, nothing, 1, wanted
    )


def _pixels_in_blocks(x: Tensor, s: int) -> Tensor:
    """[n, c, h, w] as [n, c s s, h / s, w / s], channels last. Pixels beyond the last block are seen by no kernel."""
    n, c, h, w = x.shape
    rows, columns = h // s, w // s
    x = x[:, :, : rows * s, : columns * s]
    if x.dtype == torch.uint8 and s in _WIDE:
        wide = x.contiguous().view(_WIDE[s]).view(n, c, rows, s, columns)
        in_rows = wide.transpose(1, 2).reshape(n * rows, c * s, columns)
        blocks = in_rows.mT.contiguous().view(torch.uint8)  # in two steps: half of the time
    else:
        blocks = x.reshape(n, c, rows, s, columns, s).permute(0, 2, 4, 1, 3, 5)
    return blocks.reshape(n, rows, columns, c * s * s).permute(0, 3, 1, 2)


def _kernel_over_blocks(weight: Tensor, s: int) -> Tensor:
    """[o, c, k, k] as [o, c s s, k / s, k / s]."""
    o, c, k, _ = weight.shape
    return weight.view(o, c, k // s, s, k // s, s).permute(0, 1, 3, 5, 2, 4).reshape(o, c * s * s, k // s, k // s)


def _kernel_of_pixels(weight: Tensor, shape: torch.Size) -> Tensor:
    """The inverse, to [o, c, k, k]."""
    o, c, k, _ = shape
    q = weight.shape[-1]
    return weight.reshape(o, c, k // q, k // q, q, q).permute(0, 1, 4, 2, 5, 3).reshape(shape)
