"""Heads: the last layers of policies, from features to the parameters of an action distribution, and of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlframe.distributions import Distribution
from rlframe.models.network import orthogonal

_POLICY_GAIN = 0.01  # nearly uniform initial policies (Andrychowicz et al. 2021, section 3.2)
VARIANCE = 1e-6  # added to variances, so that their roots have a gradient at features of zero


class GaussianHead(nn.Module):
    """[..., 2d]: the mean from the features, the log standard deviation as a parameter."""

    def __init__(self, features: int, size: int, log_std: float) -> None:
        super().__init__()
        self.mean = policy_layer(features, size)
        self.log_std = nn.Parameter(torch.full((size,), float(log_std)))

    def forward(self, features: Tensor) -> Tensor:
        mean = self.mean(features)
        return torch.cat([mean, self.log_std.expand_as(mean)], -1)


class JointHead(nn.Module):
    """Concatenated parameters of the parts of a joint distribution."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([head(features) for head in self.heads], -1)


def policy_layer(features: int, size: int) -> nn.Linear:
    """The last layer of a policy that is nearly uniform at first."""
    layer = nn.Linear(features, size)
    orthogonal(layer, _POLICY_GAIN)
    return layer


def policy_head(
    distribution: Distribution, features: int, log_std: float, state_dependent_std: bool = False
) -> nn.Module:
    """Head for the parameters of `distribution`."""
    if distribution.joined:
        return JointHead([policy_head(part, features, log_std, state_dependent_std) for part in distribution.joined])
    if distribution.has_log_std and not state_dependent_std:
        return GaussianHead(features, distribution.param_size // 2, log_std)
    layer = policy_layer(features, distribution.param_size)
    add_log_std(layer, distribution, log_std)
    return layer


@torch.no_grad()
def add_log_std(head: Any, distribution: Distribution, log_std: float) -> None:
    """Start the log σ that are outputs of a head of `policy_head` from there."""
    for part, own in zip(head.heads if distribution.joined else (), distribution.joined, strict=True):
        add_log_std(part, own, log_std)
    if distribution.has_log_std:
        head.bias[distribution.param_size // 2 :] += log_std


def value_head(features: int) -> nn.Module:
    """Head for the state value [..., 1]."""
    return orthogonal(nn.Linear(features, 1), 1.0)


class StateDependentHead(nn.Module):
    """Mean and log standard deviation [..., 2d] of a policy, from features φ [..., F], for exploration by gSDE.

    A noise matrix E [F, d] of standard normals adds φ (σ ⊙ E) to the mean. Over all E this noise is normal with the
    standard deviation √(φ² σ²), which is what losses see. log σ [F, d] is learned.
    (Raffin, Kober & Stulp 2022, https://arxiv.org/abs/2005.05719)
    """

    def __init__(self, mean: nn.Linear, log_std: float, learn_features: bool) -> None:
        """`log_std`: initial log σ.    learn_features: the gradient of the standard deviation also reaches φ."""
        super().__init__()
        self.mean, self.learn_features = mean, learn_features
        self.log_std = nn.Parameter(torch.full((mean.in_features, mean.out_features), float(log_std)))

    def forward(self, features: Tensor) -> Tensor:
        seen = features if self.learn_features else features.detach()
        variance = seen.square() @ (2 * self.log_std).exp()
        return torch.cat([self.mean(features), 0.5 * (variance + VARIANCE).log()], -1)
