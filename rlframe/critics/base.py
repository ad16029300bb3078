"""Critic: networks for the values of actions, what their numbers mean, and the targets that they learn from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree, map_tree
from rlframe.critics.values import Value
from rlframe.models.actor import make_features
from rlframe.models.base import ModelConfig, averaged, with_modes
from rlframe.models.encoders import Vector, feature_size, has_images
from rlframe.models.network import Network
from rlframe.models.views import View, mask_entries


class ActionNetworks(nn.Module):
    """`k` networks with separate weights and, for images, separate encoders; the action joins after the encoder.

    Observations are [rows, *obs], normalised by the actor; actions are [rows, *act], canonical.
    """

    def __init__(
        self, observation_space: Space, action_space: Space, n_atoms: int, config: ModelConfig, k: int
    ) -> None:
        super().__init__()
        config = config.of_critic()
        self.action = Vector(action_space)
        # An encoder that only concatenates vectors has nothing to learn, so one serves all networks.
        separate = has_images(observation_space) or config.encoder not in ("auto", "mlp")
        encoders = [make_features(observation_space, config) for _ in range(k if separate else 1)]
        self.encoders = nn.ModuleList(encoders)
        sizes = [feature_size(encoders[0]) + self.action.size, *config.hidden, n_atoms]
        self.network = Network(sizes, config.activation, norm=config.norm, k=k)

    def forward(self, observation: Tree, action: Tensor) -> Tensor:
        """Values of (s, a) [k, rows, n_atoms]."""
        flat = self.action(action)
        inputs = [torch.cat([encoder(observation), flat], -1) for encoder in self.encoders]
        return self.network(torch.stack(inputs) if len(inputs) > 1 else inputs[0].expand(self.network.k, -1, -1))

    def first(self, observation: Tree, action: Tensor) -> Tensor:
        """Values [rows, n_atoms] of the first network, whose layers are constant; the others are not evaluated."""
        return self.network.first(torch.cat([self.encoders[0](observation), self.action(action)], -1))


class ChoiceNetworks(nn.Module):
    """`k` networks with separate weights, each for the values of all actions of a Discrete space, even forbidden."""

    def __init__(
        self, observation_space: Space, action_space: Space, n_atoms: int, config: ModelConfig, k: int
    ) -> None:
        super().__init__()
        config, self.n_atoms = config.of_critic(), n_atoms
        self.view = View(observation_space, *mask_entries(observation_space, action_space))
        encoders = [make_features(self.view.space, config) for _ in range(k)]
        n_out = int(action_space.n) * n_atoms  # type: ignore[attr-defined]
        self.networks = nn.ModuleList(
            nn.Sequential(
                encoder,
                Network([feature_size(encoder), *config.hidden, n_out], config.activation, norm=config.norm),
            )
            for encoder in encoders
        )

    def forward(self, observation: Tree) -> Tensor:
        """Values of (s, .) [k, rows, A, n_atoms]."""
        observation = self.view(observation)
        values = torch.stack([network(observation) for network in self.networks])
        return values.unflatten(-1, (-1, self.n_atoms))


class Critic(nn.Module):
    """k networks and their targets: copies of them that follow slowly, or the networks themselves.

    Any module can be `networks`, with forward(observation, action) to [k, rows, n_atoms], or forward(observation) to
    [k, rows, A, n_atoms] for the values of all Discrete actions; an expected value may leave the last dimension out.
    """

    def __init__(self, networks: nn.Module, value: Value, has_target: bool = True) -> None:
        """`has_target`: targets come from copies; else from `networks`, in one evaluation of s and s' together."""
        super().__init__()
        self.networks, self.value, self.has_target = with_modes(networks), value, has_target
        self.target = copy.deepcopy(networks).requires_grad_(False) if has_target else nn.Identity()

    @property
    def learned(self) -> list[nn.Parameter]:
        """The parameters of `networks`."""
        return list(self.networks.parameters())

    def target_and_online(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and statistics of the target, and of the networks that it moves to; empty without a target."""
        return (averaged(self.target), averaged(self.networks)) if self.has_target else ([], [])

    def forward(self, observation: Tree, *action: Tensor) -> Tensor:
        """Values of (s, a) [k, rows, n_atoms], or without an action of all actions [k, rows, A, n_atoms]."""
        return self._values(self.networks(observation, *action), *action)

    def q(self, observation: Tree, *action: Tensor) -> Tensor:
        """Q-values [k, rows], or of all actions [k, rows, A]."""
        return self.value.q(self(observation, *action))

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

    def with_target(
        self, observation: Tree, action: Tensor, next_observation: Tree, next_action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values of (s, a) [k, rows, n_atoms], and those of (s', a') [rows, n_atoms] by the target, without gradient.

        The latter are of the critic with the least Q(s', a')   (clipped double Q-learning, Fujimoto et al. 2018).
        """
        following = next_observation, next_action
        if not self.has_target:  # normalisation sees both as one batch (Bhatt et al. 2024, section 3)
            both = map_tree(lambda x, y: torch.cat([x, y]), observation, next_observation)
            values = self(both, torch.cat([action, next_action]))
            n = len(action)
            return values[:, :n], self.value.least(values[:, n:].detach())
        with torch.no_grad():
            next_values = self._values(self.target(*following), next_action)
        return self(observation, action), self.value.least(next_values)

    def loss(self, values: Tensor, target: Tensor, return_: Tensor, batch: Any, clip: Any) -> Tensor:
        """Σ_i mean w ℓ(Z_i, G + γ^k Z') [], ℓ = ½ δ² of an expected value; see Value.

        Args:
            values [k, n, n_atoms] and target [n, n_atoms]: of `with_target`.    return_: G [n].
            batch: Transitions.    clip: largest magnitude of a target, a number or a tensor [].
        """
        return self.value.mean_loss(values, target, return_, batch.bootstrap, batch.weight, clip)

    def _values(self, values: Tensor, *action: Tensor) -> Tensor:
        return values if values.dim() == (3 if action else 4) else values.unsqueeze(-1)


def make_critic(
    observation_space: Space, action_space: Space, value: Value, config: ModelConfig, k: int, seed: int
) -> Critic:
    """A critic of k networks with initial weights from `seed`, the run's root seed."""
    make = ChoiceNetworks if isinstance(action_space, spaces.Discrete) else ActionNetworks
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.CRITIC))
        return Critic(make(observation_space, action_space, value.n_atoms, config, k), value)
