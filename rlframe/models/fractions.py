"""Fractions: how a network is asked for the quantiles of a return at any fractions of its distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.core.struct import as_numpy
from rlframe.kernels.matmul import linear
from rlframe.models import numpy_inference


class Fractions(nn.Module):
    """Features ψ(s) ⊙ φ(τ), φ_j(τ) = relu(Σ_i w_ij cos(π i τ) + b_j), i = 0 ... n_cosines - 1.

    (Dabney, Ostrovski, Silver & Munos 2018, Implicit quantile networks, arXiv 1806.06923, section 3.1)
    """

    frequencies: Tensor
    midpoints: Tensor

    def __init__(self, n_features: int, n_cosines: int, n_midpoints: int) -> None:
        """`n_midpoints`: fractions where none are given, in the middle of equal parts of [0, 1]."""
        super().__init__()
        self.embed = nn.Linear(n_cosines, n_features)
        self.register_buffer("frequencies", math.pi * torch.arange(n_cosines), persistent=False)
        self.register_buffer("midpoints", (torch.arange(n_midpoints) + 0.5) / n_midpoints, persistent=False)

    def forward(self, features: Tensor, *tau: Tensor) -> Tensor:
        """Features [..., N, F] of features [..., F], at the fractions tau [..., N] or at the midpoints."""
        fractions = tau[0] if tau else self.midpoints
        cosines = torch.cos(fractions.unsqueeze(-1) * self.frequencies)
        return features.unsqueeze(-2) * F.relu(linear(cosines, self.embed.weight, self.embed.bias))

    def numpy_forward(self) -> Callable[[np.ndarray], np.ndarray]:
        """`forward` in NumPy, at the midpoints."""
        embed = numpy_inference.affine(self.embed.weight, self.embed.bias)
        cosines = as_numpy(torch.cos(self.midpoints.unsqueeze(-1) * self.frequencies))
        return lambda features: features[..., None, :] * np.maximum(embed(cosines), 0)
