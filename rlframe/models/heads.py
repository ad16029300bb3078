"""Heads: from features to the parameters of an action distribution, and to a value."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlframe.distributions import DiagonalGaussian, Distribution, Joint, TanhGaussian
from rlframe.models.encoders import orthogonal

_POLICY_GAIN = 0.01  # nearly uniform first policies (Andrychowicz et al. 2021, section 3.2)


class GaussianHead(nn.Module):
    """Mean from the features, log standard deviation a parameter of its own; [..., 2d]."""

    def __init__(self, features: int, size: int, log_std: float) -> None:
        super().__init__()
        self.mean = orthogonal(nn.Linear(features, size), _POLICY_GAIN)
        self.log_std = nn.Parameter(torch.full((size,), log_std))

    def forward(self, features: Tensor) -> Tensor:
        return self.complete(self.mean(features))

    def complete(self, mean: Tensor) -> Tensor:
        """The parameters that have this mean."""
        return torch.cat([mean, self.log_std.expand_as(mean)], -1)


class JointHead(nn.Module):
    """The parts' parameters side by side."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([head(features) for head in self.heads], -1)


def policy_head(distribution: Distribution, features: int, log_std: float) -> nn.Module:
    """The head that gives `distribution` its parameters."""
    match distribution:
        case Joint():
            return JointHead([policy_head(part, features, log_std) for part in distribution.parts])
        case DiagonalGaussian() | TanhGaussian():
            return GaussianHead(features, distribution.param_size // 2, log_std)
    return orthogonal(nn.Linear(features, distribution.param_size), _POLICY_GAIN)


def value_head(features: int) -> nn.Module:
    """One number per row, [..., 1]."""
    return orthogonal(nn.Linear(features, 1), 1.0)
