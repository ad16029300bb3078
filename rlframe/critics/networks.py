"""Networks of critics: k of one shape, for the values of a Box action, or of all actions of a Discrete space."""

from __future__ import annotations

import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.struct import Tree
from rlframe.models.actor import make_features
from rlframe.models.base import ModelConfig
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
        return self.network(self._inputs(observation, action))

    def _inputs(self, observation: Tree, action: Tensor) -> Tensor:
        flat = self.action(action)
        inputs = [torch.cat([encoder(observation), flat], -1) for encoder in self.encoders]
        return torch.stack(inputs) if len(inputs) > 1 else inputs[0].expand(self.network.k, -1, -1)

    def with_target(
        self, target: ActionNetworks, observation: Tree, action: Tensor, next_observation: Tree, next_action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values of (s, a), with gradient, and the target's of (s', a'), without, in one product."""
        inputs = self._inputs(observation, action)
        with torch.no_grad():
            next_inputs = target._inputs(next_observation, next_action)
        return self.network.with_target(target.network, torch.cat([inputs, next_inputs]))

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
