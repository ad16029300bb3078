"""The actor's network: observation normalisation, encoder, and a perceptron to what the policy needs."""

from __future__ import annotations

from collections.abc import Callable

import chz
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree
from rlframe.models import numpy_inference
from rlframe.models.base import ModelConfig
from rlframe.models.encoders import make_encoder
from rlframe.models.mlp import Mlp
from rlframe.models.normalize import ObservationNorm

NumpyActor = Callable[[Tree], np.ndarray]  # n observations to parameters [n, P]


class Actor(nn.Module):
    """Maps observations [n, *obs] to the policy's parameters [n, param_size]."""

    uses_previous = False

    def __init__(self, observation_space: Space, param_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = ObservationNorm(observation_space) if config.normalize_observation else None
        self.encoder = make_features(observation_space, config)
        self.mlp = Mlp(feature_size(self.encoder), config.hidden, param_size, config.activation)

    def normalized(self, observation: Tree) -> Tree:
        """What `params` takes, and critics too: all networks share the normaliser."""
        return self.norm(observation) if self.norm else observation

    def params(self, normalized: Tree) -> Tensor:
        """The policy's parameters [n, param_size] of observations that are normalised already."""
        return self.mlp(self.encoder(normalized))

    def params_with_next(self, normalized: Tree, next_normalized: Tree) -> tuple[Tensor, Tensor]:
        """The parameters [n, P] of a batch, with gradient, and of its next observations, without; in one product."""
        features = self.encoder(normalized)
        with torch.no_grad():
            next_features = self.encoder(next_normalized)
        return self.mlp.first_with_rest(torch.cat([features, next_features]), len(features))

    def forward(self, observation: Tree) -> Tensor:
        return self.params(self.normalized(observation))

    def numpy_forward(self, n: int) -> NumpyActor | None:
        """`forward` for n NumPy rows, with the parameters of the moment; None where the encoder is not for that."""
        encode = numpy_inference.encoder(self.encoder, n)
        if encode is None:
            return None
        norm = numpy_inference.normalizer(self.norm) if self.norm else None
        body = numpy_inference.mlp(self.mlp.layers)

        def forward(observation: Tree) -> np.ndarray:
            observation = numpy_inference.in_blocks(observation, n)
            return body(encode(norm(observation) if norm else observation)).reshape(n, -1)

        return forward


def make_features(observation_space: Space, config: ModelConfig) -> nn.Module:
    """What the perceptrons of actor and critics see: images encoded, vectors as they are, side by side.

    Raises:
        ConfigError: the model has memory or another part that these networks have not.
    """
    unserved = {
        "model.memory=none": config.memory != "none",
        "model.feed_back=false": config.feed_back,
        "model.shared=false": config.shared,
    }
    remedies = [remedy for remedy, asked in unserved.items() if asked]
    if remedies:
        raise ConfigError(
            f"DDPG, TD3 and SAC have an actor and critics apart, which see single observations; set "
            f"{' and '.join(remedies)} (with memory: algo=ppo, a2c or r2d1)"
        )
    return make_encoder(observation_space, chz.replace(config, hidden=()))


def feature_size(encoder: nn.Module) -> int:
    """How many features an encoder gives."""
    return int(encoder.size)  # type: ignore[arg-type]  # every encoder states it
