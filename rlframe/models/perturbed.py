"""Networks with noise in the parameters of their linear layers, for exploration by parameter noise.

Plappert et al. 2018, Parameter Space Noise for Exploration (https://arxiv.org/abs/1706.01905).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor, nn

from rlframe.kernels.device import to_device
from rlframe.kernels.matmul import linear
from rlframe.kernels.mlp import ACTIVATIONS, Layers
from rlframe.kernels.numpy_mlp import ACTIVATIONS as NUMPY_ACTIVATIONS
from rlframe.models.numpy_inference import affine, normalization


class Perturbation(nn.Module):
    """Standard normal noise ξ for each parameter θ of some layers; a row of scale s is evaluated with θ + s ξ.

    It is kept apart from the parameters, so that these stay clean and may be learned while it lasts. Normalisation has
    no noise.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.activations = layers.activations
        for i, parameter in enumerate(layers.flat):
            self.register_buffer(f"noise_{i}", torch.zeros_like(parameter.detach()))

    def resample(self, rng: np.random.Generator) -> None:
        """Draw new ξ."""
        for noise in self.buffers():
            drawn = torch.from_numpy(rng.standard_normal(tuple(noise.shape), np.float32))
            noise.copy_(to_device(drawn, noise.device))

    def forward(self, layers: Layers, x: Tensor, scale: Tensor) -> Tensor:
        """Outputs [n, out] of the layers for rows x [n, in] with the scales [n, 1]; scale 0 is the clean network."""
        noises = list(self.buffers())
        parts = zip_longest(layers.parameters, noises[::2], noises[1::2], self.activations, layers.norms)
        for (weight, bias), of_weight, of_bias, name, norm in parts:
            x = linear(x, weight, bias) + scale * linear(x, of_weight, of_bias)
            x = ACTIVATIONS[name].plain(norm(x) if norm else x)
        return x

    def numpy_forward(self, layers: Layers) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """`forward` in NumPy, for rows and scales in blocks, on views of all parameters."""
        noises = list(self.buffers())
        norms = [normalization(norm) for norm in layers.norms]
        parts = [
            (affine(*pair), affine(of_weight, of_bias), norm, NUMPY_ACTIVATIONS[name].forward)
            for pair, of_weight, of_bias, norm, name in zip_longest(
                layers.parameters, noises[::2], noises[1::2], norms, self.activations
            )
        ]

        def forward(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
            for clean, noise, norm, activation in parts:
                x = clean(x) + scale * noise(x)
                x, _ = activation(norm(x) if norm else x)
            return x

        return forward


def adapted(scale: Tensor, distance: Tensor, target: float | Tensor, factor: float = 1.01) -> Tensor:
    """The scale of the noise for the next batch: larger while the distance it causes is at most the target.

    (section 3, adaptive noise scaling: α = 1.01)
    """
    return torch.where(distance <= target, scale * factor, scale / factor)
