"""Critic: networks for the values of actions, what their numbers mean, and the targets that they learn from."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.critics.values import Value
from rlframe.models.actor import make_features
from rlframe.models.base import ModelConfig, averaged, with_modes
from rlframe.models.encoders import Vector, feature_size, has_images
from rlframe.models.initial import redrawn
from rlframe.models.network import Network, Units, batch_statistics, in_batch_statistics, initial_weights
from rlframe.models.residual import make_body
from rlframe.models.views import View, mask_entries
from rlframe.ops.q_learning import truncated


class ActionNetworks(nn.Module):
    """`k` networks with separate weights and, for images, separate encoders; the action joins after the encoder.

    Observations are [rows, *obs], normalised by the actor; actions are [rows, *act], canonical.
    """

    def __init__(
        self, observation_space: Space, action_space: Space, n_atoms: int, config: ModelConfig, k: int
    ) -> None:
        super().__init__()
        dropout, config = config.critic.dropout, config.of_critic()
        self.action = Vector(action_space)
        # An encoder that only concatenates vectors has nothing to learn, so one serves all networks.
        separate = has_images(observation_space) or config.encoder not in ("auto", "mlp")
        encoders = [make_features(observation_space, config) for _ in range(k if separate else 1)]
        self.encoders = nn.ModuleList(encoders)
        self.network = make_body(feature_size(encoders[0]) + self.action.size, n_atoms, config, k, dropout)

    def forward(self, observation: Tree, action: Tensor) -> Tensor:
        """Values of (s, a) [k, rows, n_atoms]."""
        flat = self.action(action)
        inputs = [torch.cat([encoder(observation), flat], -1) for encoder in self.encoders]
        return self.network(torch.stack(inputs) if len(inputs) > 1 else inputs[0].expand(self.network.k, -1, -1))

    def first(self, observation: Tree, action: Tensor) -> Tensor:
        """Values [rows, n_atoms] of the first network; if it is of plain layers they are constant and alone."""
        if not isinstance(self.network, Network):
            return self(observation, action)[0]
        return self.network.first(torch.cat([self.encoders[0](observation), self.action(action)], -1))


class ChoiceNetworks(nn.Module):
    """`k` networks with separate weights, each for the values of all actions of a Discrete space, even forbidden."""

    def __init__(
        self, observation_space: Space, action_space: Space, n_atoms: int, config: ModelConfig, k: int
    ) -> None:
        super().__init__()
        dropout, config, self.n_atoms = config.critic.dropout, config.of_critic(), n_atoms
        self.view = View(observation_space, *mask_entries(observation_space, action_space))
        encoders = [make_features(self.view.space, config) for _ in range(k)]
        n_out = int(action_space.n) * n_atoms  # type: ignore[attr-defined]
        self.networks = nn.ModuleList(
            nn.Sequential(encoder, make_body(feature_size(encoder), n_out, config, dropout=dropout))
            for encoder in encoders
        )

    def forward(self, observation: Tree) -> Tensor:
        """Values of (s, .) [k, rows, A, n_atoms]."""
        observation = self.view(observation)
        values = torch.stack([network(observation) for network in self.networks])
        return values.unflatten(-1, (-1, self.n_atoms))


@dataclass(frozen=True)
class Ensemble:
    """How many critics there are, and how their values become one: that of the target, and that of the policy."""

    k: int = 2
    has_target: bool = True  # targets come from copies that follow slowly; else from the critics themselves
    n_chosen: int = 0  # critics, drawn at random for each update, whose values are the target; 0: all
    target_from: str = "least"  # of the critic with the least Q; or truncated, the pool of their quantiles, without
    n_dropped: int = 2  # of the largest for each critic
    policy_from: str = "least"  # what of their values the policy ascends: least or mean


class Critic(nn.Module):
    """k networks and their targets: copies of them that follow slowly, or the networks themselves.

    Any module can be `networks`, with forward(observation, action) to [k, rows, n_atoms], or forward(observation) to
    [k, rows, A, n_atoms] for the values of all Discrete actions; an expected value may leave the last dimension out.

    Where batches are normalised, or there is no target, (s, a) and (s', a') are evaluated as one batch, by the
    networks and by their targets, so that both have the same statistics (CrossQ, Bhatt et al. 2024, section 3; XQC).
    """

    def __init__(self, networks: nn.Module, value: Value, ensemble: Ensemble) -> None:
        super().__init__()
        self.networks, self.value, self.ensemble = with_modes(networks), value, ensemble
        self.has_target = has_target = ensemble.has_target
        self.target = copy.deepcopy(networks).requires_grad_(False) if has_target else nn.Identity()
        self.is_joint = bool(batch_statistics(networks)) or not has_target
        self.chosen: Tensor  # whose values the target is of, in this update; none: all
        self.register_buffer("chosen", torch.zeros(ensemble.n_chosen, dtype=torch.int64), persistent=False)

    @property
    def learned(self) -> list[nn.Parameter]:
        """The parameters of `networks`."""
        return list(self.networks.parameters())

    @property
    def units(self) -> Units:
        """What is brought back to unit length after each step of `networks`."""
        return Units.of(self.networks)

    def target_and_online(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and statistics of the target, and of the networks that it moves to; empty without a target."""
        return (averaged(self.target), averaged(self.networks)) if self.has_target else ([], [])

    def forward(self, observation: Tree, *action: Tensor) -> Tensor:
        """Values of (s, a) [k, rows, n_atoms], or without an action of all actions [k, rows, A, n_atoms]."""
        return self._values(self.networks(observation, *action), *action)

    def q(self, observation: Tree, *action: Tensor) -> Tensor:
        """Q-values [k, rows], or of all actions [k, rows, A]."""
        return self.value.q(self(observation, *action))

    def policy_q(self, observation: Tree, *action: Tensor) -> Tensor:
        """What the policy ascends, the least or the mean of the critics' Q-values [rows], or [rows, A]."""
        q = self.q(observation, *action)
        return q.mean(0) if self.ensemble.policy_from == "mean" else q.min(0).values

    def target_q(self, observation: Tree, *action: Tensor) -> Tensor:
        """The target's Q-values [k, rows], or of all actions [k, rows, A], without gradient."""
        with torch.no_grad():
            networks = self.target if self.has_target else self.networks
            return self.value.q(self._values(networks(observation, *action), *action))

    def first_q(self, observation: Tree, action: Tensor) -> Tensor:
        """Q_1 [rows], with the gradient of the action alone."""
        if isinstance(self.networks, ActionNetworks):
            return self.value.q(self.networks.first(observation, action))
        return self.q(observation, action)[0]

    def choose(self, generator: torch.Generator) -> None:
        """Draw the critics that the next target is of, without replacement, unless they are all."""
        if n := len(self.chosen):
            drawn = torch.randperm(self.ensemble.k, generator=generator, device=generator.device)
            self.chosen.copy_(drawn[:n])

    def with_target(
        self, observation: Tree, action: Tensor, next_observation: Tree, next_action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values of (s, a) [k, rows, n_atoms], and those of (s', a') [rows, N] by the target, without gradient.

        The latter are of the critic with the least Q(s', a') of those chosen (clipped double Q-learning, Fujimoto et
        al. 2018; REDQ, Chen et al. 2021), or the pool of their quantiles without the largest (TQC).
        """
        values, next_values = self.with_next((observation, action), (next_observation, next_action))
        if self.ensemble.target_from == "truncated":
            return values, truncated(next_values, self.ensemble.n_dropped)
        return values, self.value.least(next_values)

    def with_next(self, now: tuple[Tree, ...], following: tuple[Tree, ...]) -> tuple[Tensor, Tensor]:
        """Values [k, rows, ..., n_atoms] of (s, a) or (s,), and of (s', a') or (s',) by the target, without gradient.

        The latter are [n_chosen, ...], of the critics chosen.
        """
        if not self.is_joint:
            with torch.no_grad():
                next_values = self._values(self.target(*following), *following[1:])
            return self(*now), self._of_chosen(next_values)
        n = len(leaves(now)[0])
        both = map_tree(lambda x, y: torch.cat([x, y]), now, following)
        values = self(*both)
        if not self.has_target:
            return values[:, :n], self._of_chosen(values[:, n:].detach())
        learns = torch.is_grad_enabled()  # else networks normalise by their running statistics, as `self` has just done
        with torch.no_grad(), in_batch_statistics(self.target) if learns else nullcontext():
            next_values = self._values(self.target(*both), *both[1:])
        return values[:, :n], self._of_chosen(next_values[:, n:])

    def _of_chosen(self, next_values: Tensor) -> Tensor:
        return next_values[self.chosen] if len(self.chosen) else next_values

    def loss(self, values: Tensor, target: Tensor, return_: Tensor, batch: Any, clip: Any) -> Tensor:
        """Σ_i mean w ℓ(Z_i, G + γ^k Z') [], ℓ = ½ δ² of an expected value; see Value.

        Args:
            values [k, n, n_atoms] and target [n, N]: of `with_target`.    return_: G [n].
            batch: Transitions.    clip: largest magnitude of a target, a number or a tensor [].
        """
        loss, _ = self.value.loss(values, target, return_, batch.bootstrap, clip)
        return (batch.weight * loss).mean(-1).sum()

    def _values(self, values: Tensor, *action: Tensor) -> Tensor:
        if len(values) != self.ensemble.k:
            raise ConfigError(
                f"algo.n_critics={self.ensemble.k}, but {type(self.networks).__name__} gives values of {len(values)} "
                f"critics; make as many"
            )
        values = values if values.dim() == (3 if action else 4) else values.unsqueeze(-1)
        if values.shape[-1] != self.value.n_atoms:
            raise ConfigError(
                f"{type(self.networks).__name__} gives {values.shape[-1]} numbers for each action, but algo.value, a "
                f"{type(self.value).__name__}, is of {self.value.n_atoms} (algo.n_atoms)"
            )
        return values


def make_critic(
    observation_space: Space,
    action_space: Space,
    value: Value,
    config: ModelConfig,
    ensemble: Ensemble | int,
    seed: int,
) -> Critic:
    """A critic of `ensemble`, or of so many networks, with initial weights from `seed`, the run's root seed."""
    ensemble = Ensemble(ensemble) if isinstance(ensemble, int) else ensemble
    make = ChoiceNetworks if isinstance(action_space, spaces.Discrete) else ActionNetworks
    with initial_weights(seed_int(seed, Role.CRITIC)):
        networks = make(observation_space, action_space, value.n_atoms, config, ensemble.k)
        named = config.critic.norm not in ("auto", "none")
        if named and not any(part in name for name in networks.state_dict() for part in ("norms.", "begin.")):
            raise ConfigError(
                f"model.critic.norm={config.critic.norm}: critics have no hidden layer to normalise; give them some "
                f"(model.critic.hidden), or use none"
            )
        return Critic(redrawn(networks, config.init), value, ensemble)
