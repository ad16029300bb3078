"""Networks for generalised state-dependent exploration, whose noise is a linear function of the policy's features.

Raffin, Kober, Stulp 2022, Smooth Exploration for Robotic Reinforcement Learning (https://arxiv.org/abs/2005.05719).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rlframe.kernels.mlp import layers_of

VARIANCE = 1e-6  # added to variances, so that their roots have a gradient at features of zero


class StateDependentHead(nn.Module):
    """Mean and log standard deviation [..., 2d] of a policy, from features φ [..., F].

    A noise matrix E [F, d] of standard normals adds φ (σ ⊙ E) to the mean. Over all E this noise is normal with the
    standard deviation √(φ² σ²), which is what losses see. log σ [F, d] is learned.
    """

    def __init__(self, mean: nn.Linear, log_std: float, learn_features: bool) -> None:
        """`log_std`: initial log σ.    learn_features: the gradient of the standard deviation also reaches φ."""
        super().__init__()
        self.mean, self.learn_features = mean, learn_features
        self.log_std = nn.Parameter(torch.full((mean.in_features, mean.out_features), log_std))

    def forward(self, features: Tensor) -> Tensor:
        seen = features if self.learn_features else features.detach()
        variance = seen.square() @ (2 * self.log_std).exp()
        return torch.cat([self.mean(features), 0.5 * (variance + VARIANCE).log()], -1)


class FeatureMlp(nn.Module):
    """Hidden layers and a head, as an Mlp whose features, the head's input, are needed when acting."""

    def __init__(
        self,
        in_size: int,
        hidden: Sequence[int],
        activation: str,
        make_head: Callable[[int], nn.Module],
        layer_norm: bool = False,
    ) -> None:
        """`make_head`: from the number of features to the head."""
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise([in_size, *hidden]))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in hidden if layer_norm)
        self.layers = layers_of(self.linears, (activation,) * len(hidden), self.norms)
        self.size = hidden[-1] if hidden else in_size
        self.head = make_head(self.size)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))

    def with_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output, and features [..., size]."""
        features = self.layers(x)
        return self.head(features), features

    def first_with_rest(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See Mlp."""
        with torch.no_grad():
            rest = self(x[n:])
        return self(x[:n]), rest
