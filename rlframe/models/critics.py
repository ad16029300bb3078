"""Critics: independent action values Q(s, a) of one shape, and those of all actions Q(s, .) of a Discrete space.

An algorithm takes any module as its critics: forward(observation, action) to [n, rows], or forward(observation) to
[n, rows, actions]. `with_target` and `first` evaluate these ones faster, and any other as it is.
"""

from __future__ import annotations

import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.kernels.mlp import frozen, is_plain
from rlframe.models.actor import feature_size, make_features
from rlframe.models.base import ModelConfig
from rlframe.models.encoders import Vector, has_images
from rlframe.models.mlp import Mlp, Mlps


class Critics(nn.Module):
    """`n` networks with weights of their own; with images each has its own encoder, after which the action joins.

    Observations are [rows, *obs], as the actor normalises them; actions are [rows, *act], canonical.
    """

    def __init__(self, observation_space: Space, action_space: Space, config: ModelConfig, n: int) -> None:
        super().__init__()
        self.action = Vector(action_space)
        # An encoder that only concatenates vectors has nothing to learn, so one serves all networks.
        apart = has_images(observation_space) or config.encoder not in ("auto", "mlp")
        encoders = [make_features(observation_space, config) for _ in range(n if apart else 1)]
        self.encoders = nn.ModuleList(encoders)
        self.mlps = Mlps(n, feature_size(encoders[0]) + self.action.size, config.hidden, 1, config.activation)

    def forward(self, observation: Tree, action: Tensor) -> Tensor:
        """Q(s, a) [n, rows]."""
        return self.mlps(self._inputs(observation, action)).squeeze(-1)

    def _inputs(self, observation: Tree, action: Tensor) -> Tensor:
        flat = self.action(action)
        inputs = [torch.cat([encoder(observation), flat], -1) for encoder in self.encoders]
        return torch.stack(inputs) if len(inputs) > 1 else inputs[0].expand(len(self.mlps), -1, -1)

    def with_target(
        self, target: Critics, observation: Tree, action: Tensor, next_observation: Tree, next_action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See the function of this name; all products of both are made at once."""
        inputs = self._inputs(observation, action)
        with torch.no_grad():
            next_inputs = target._inputs(next_observation, next_action)
        q, next_q = self.mlps.with_target(target.mlps, torch.cat([inputs, next_inputs]))
        return q.squeeze(-1), next_q.squeeze(-1)

    def first(self, observation: Tree, action: Tensor) -> Tensor:
        """See the function of this name; the others are not evaluated."""
        return self.mlps.first(torch.cat([self.encoders[0](observation), self.action(action)], -1)).squeeze(-1)


class DiscreteCritics(nn.Module):
    """`n` networks with weights of their own, each for the values of all actions of a Discrete space."""

    def __init__(self, observation_space: Space, n_actions: int, config: ModelConfig, n: int) -> None:
        super().__init__()
        encoders = [make_features(observation_space, config) for _ in range(n)]
        self.networks = nn.ModuleList(
            nn.Sequential(encoder, Mlp(feature_size(encoder), config.hidden, n_actions, config.activation))
            for encoder in encoders
        )

    def forward(self, observation: Tree) -> Tensor:
        """Q(s, .) [n, rows, n_actions]."""
        return torch.stack([network(observation) for network in self.networks])


def with_target(
    critics: nn.Module,
    target: nn.Module,
    observation: Tree,
    action: Tensor,
    next_observation: Tree,
    next_action: Tensor,
) -> tuple[Tensor, Tensor]:
    """Q(s, a) [n, rows], with gradient, and the target critics' Q'(s', a') [n, rows], without."""
    if isinstance(critics, Critics) and isinstance(target, Critics) and not is_plain():
        return critics.with_target(target, observation, action, next_observation, next_action)
    with torch.no_grad():
        next_q = target(next_observation, next_action)
    return critics(observation, action), next_q


def first(critics: nn.Module, observation: Tree, action: Tensor) -> Tensor:
    """Q_1(s, a) [rows], the critics' parameters constant."""
    with frozen(critics):
        return critics.first(observation, action) if isinstance(critics, Critics) else critics(observation, action)[0]


def least(critics: nn.Module, observation: Tree, action: Tensor) -> Tensor:
    """min_i Q_i(s, a) [rows], the critics' parameters constant."""
    with frozen(critics):
        return critics(observation, action).min(0).values


def make_critics(observation_space: Space, action_space: Space, config: ModelConfig, n: int, seed: int) -> Critics:
    """Critics whose first weights `seed`, the run's root seed, decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.CRITIC))
        return Critics(observation_space, action_space, config, n)


def make_discrete_critics(
    observation_space: Space, action_space: Space, config: ModelConfig, n: int, seed: int
) -> DiscreteCritics:
    """The same for all actions of a Discrete space."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.CRITIC))
        return DiscreteCritics(observation_space, int(action_space.n), config, n)  # type: ignore[attr-defined]
