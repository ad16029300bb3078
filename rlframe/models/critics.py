"""Critics of DDPG, TD3 and SAC: n independent networks for Q(s, a), or for all actions Q(s, .) of a Discrete space.

These algorithms accept any module as critics, with forward(observation, action) to [n, rows], or forward(observation)
to [n, rows, actions]. `with_target` and `first` have a faster path for `Critics`.
"""

from __future__ import annotations

import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import mask_parts, without_mask
from rlframe.core.struct import Tree
from rlframe.kernels.mlp import is_plain
from rlframe.models.actor import make_features
from rlframe.models.base import ModelConfig
from rlframe.models.encoders import Vector, feature_size, has_images
from rlframe.models.masks import split_mask
from rlframe.models.mlp import Mlp, Mlps


class Critics(nn.Module):
    """`n` networks with separate weights and, for images, separate encoders; the action joins after the encoder.

    Observations are [rows, *obs], normalised by the actor; actions are [rows, *act], canonical.
    """

    def __init__(self, observation_space: Space, action_space: Space, config: ModelConfig, n: int) -> None:
        super().__init__()
        self.action = Vector(action_space)
        # An encoder that only concatenates vectors has nothing to learn, so one serves all networks.
        separate = has_images(observation_space) or config.encoder not in ("auto", "mlp")
        encoders = [make_features(observation_space, config) for _ in range(n if separate else 1)]
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
        """See the function `with_target`; both networks are evaluated in one product."""
        inputs = self._inputs(observation, action)
        with torch.no_grad():
            next_inputs = target._inputs(next_observation, next_action)
        q, next_q = self.mlps.with_target(target.mlps, torch.cat([inputs, next_inputs]))
        return q.squeeze(-1), next_q.squeeze(-1)

    def first(self, observation: Tree, action: Tensor) -> Tensor:
        """See the function `first`; the other networks are not evaluated, this one's layers are constant."""
        return self.mlps.first(torch.cat([self.encoders[0](observation), self.action(action)], -1)).squeeze(-1)


class DiscreteCritics(nn.Module):
    """`n` networks with separate weights, each for the values of all actions of a Discrete space, even forbidden."""

    def __init__(
        self, observation_space: Space, n_actions: int, config: ModelConfig, n: int, masked: bool = False
    ) -> None:
        """`masked`: observations have an action mask, which is not looked at."""
        super().__init__()
        self.masked = masked
        observation_space = without_mask(observation_space) if masked else observation_space
        encoders = [make_features(observation_space, config) for _ in range(n)]
        self.networks = nn.ModuleList(
            nn.Sequential(encoder, Mlp(feature_size(encoder), config.hidden, n_actions, config.activation))
            for encoder in encoders
        )

    def forward(self, observation: Tree) -> Tensor:
        """Q(s, .) [n, rows, n_actions]."""
        observation = split_mask(observation)[0] if self.masked else observation
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
    """Q_1(s, a) [rows]."""
    return critics.first(observation, action) if isinstance(critics, Critics) else critics(observation, action)[0]


def make_critics(observation_space: Space, action_space: Space, config: ModelConfig, n: int, seed: int) -> Critics:
    """Critics with initial weights from `seed`, the run's root seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.CRITIC))
        return Critics(observation_space, action_space, config, n)


def make_discrete_critics(
    observation_space: Space, action_space: Space, config: ModelConfig, n: int, seed: int
) -> DiscreteCritics:
    """As `make_critics`, for all actions of a Discrete space."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.CRITIC))
        n_actions = int(action_space.n)  # type: ignore[attr-defined]
        return DiscreteCritics(
            observation_space, n_actions, config, n, bool(mask_parts(observation_space, action_space))
        )
