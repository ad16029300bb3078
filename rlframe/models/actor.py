"""Actor network of DDPG, TD3 and SAC: observation normalisation, encoder and MLP; agents.actor acts with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import chz
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.errors import ConfigError, naming
from rlframe.core.spaces import ACTION_MASK, PRIVILEGED, zeros
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.models import numpy_inference
from rlframe.models.base import OF_ACTORS, CriticConfig, Model, ModelConfig, with_modes
from rlframe.models.encoders import feature_size, make_encoder
from rlframe.models.network import Body, Network, batch_statistics
from rlframe.models.normalize import normalization_of
from rlframe.models.residual import make_body
from rlframe.models.views import View, mask_entries, masked_logits, masked_logits_numpy

MakeActor = Callable[[Space, Space, int, ModelConfig], nn.Module]  # of spaces, n_params and the config


class ActorModel(Model, ABC):
    """Maps observations [n, *obs] to the policy's parameters [n, param_size]; subclasses add `outputs`."""

    def __init__(self, observation_space: Space, action_space: Space, config: ModelConfig) -> None:
        """`action_space`: parameters are logits of Discrete actions, which a mask in the observation may forbid."""
        super().__init__()
        self.masked = bool(masks := mask_entries(observation_space, action_space))
        self.observation_norm = normalization_of(observation_space, config.normalize_observation, masks)
        self.view = View(observation_space, *masks, PRIVILEGED)

    @abstractmethod
    def outputs(self, normalized: Tree) -> Tensor:
        """The network's numbers [n, param_size] for normalised observations, before a mask."""

    def params(self, normalized: Tree) -> Tensor:
        """The policy's parameters [n, param_size] for normalised observations."""
        params = self.outputs(normalized)
        return masked_logits(params, normalized[ACTION_MASK]) if self.masked else params

    def params_as_one(self, normalized: Tree, *others: Tree) -> Tensor:
        """`params` of the first rows; where batches are normalised, by the statistics of all as one batch."""
        if not others or not batch_statistics(self):
            return self.params(normalized)
        rows = map_tree(lambda *x: torch.cat(x), normalized, *others)
        return self.params(rows)[: len(leaves(normalized)[0])]

    def forward(self, observation: Tree) -> Tensor:
        return self.params(self.normalized(observation))


class OwnActor(ActorModel):
    """A user's network, from normalised observations [n, *obs] to the policy's parameters [n, n_params]."""

    def __init__(
        self, make: MakeActor, observation_space: Space, action_space: Space, n_params: int, config: ModelConfig
    ) -> None:
        """Raises ConfigError if what `make` gives is no such network."""
        super().__init__(observation_space, action_space, config)
        with naming("make_actor failed"):
            network = make(self.view.space, action_space, n_params, config)
        if not isinstance(network, nn.Module):
            raise ConfigError(f"make_actor gives {network!r:.60}; return a torch.nn.Module")
        self.network, self.n_params = with_modes(network), n_params
        with torch.no_grad(), naming(f"{type(network).__name__} of make_actor failed in forward"):
            self(map_tree(torch.from_numpy, zeros(observation_space, (2,))))

    def outputs(self, normalized: Tree) -> Tensor:
        found: Tensor = self.network(self.view(normalized))
        n = leaves(normalized)[0].shape[0]  # len() would fix it in exports
        if found.shape != (n, self.n_params):
            raise ConfigError(
                f"make_actor: {type(self.network).__name__} gives {list(found.shape)} for {n} observations; it must be "
                f"[{n}, {self.n_params}], of n_params={self.n_params}"
            )
        return found


class Actor(ActorModel):
    """rlframe's: an encoder for each part of the observation, and layers above."""

    def __init__(
        self,
        observation_space: Space,
        param_size: int,
        config: ModelConfig,
        action_space: Space,
        make_head: Callable[[int], nn.Module] | None = None,
        parts: int = 1,
    ) -> None:
        """Args:
        make_head: from the number of features to the last layers, if exploration needs the features.
        parts: of the parameters, each with layers of its own where the model says so.
        """
        super().__init__(observation_space, action_space, config)
        self.encoder = make_features(self.view.space, config)
        n_features = feature_size(self.encoder)
        self.mlp: Body
        if make_head is None:
            self.mlp = make_body(n_features, param_size, config, parts=parts)
        else:
            sizes = [n_features, *config.hidden]
            self.mlp = Network(sizes, config.activation, config.activation, config.norm, options=config.options())
        self.head = make_head(self.mlp.size) if make_head else nn.Identity()

    def outputs(self, normalized: Tree) -> Tensor:
        return self.head(self.mlp(self.encoder(self.view(normalized))))

    def features(self, observation: Tree) -> Tensor:
        """The input of the MLP [n, F]."""
        return self.encoder(self.view(self.normalized(observation)))

    def with_features(self, observation: Tree) -> tuple[Tensor, Tensor]:
        """As `forward`, with the features [n, F] that the head maps to the parameters in second place."""
        features = self.mlp(self.features(observation))
        params = self.head(features)
        return masked_logits(params, observation[ACTION_MASK]) if self.masked else params, features

    def numpy_forward(self, n: int) -> Callable[[Tree], np.ndarray] | None:
        """`forward` for n NumPy rows, with the current parameters; None if the encoder does not support NumPy."""
        evaluate = self.numpy_with_features(n)
        return (lambda observation: evaluate(observation)[0]) if evaluate else None

    def numpy_with_features(self, n: int) -> Callable[[Tree], tuple[np.ndarray, np.ndarray]] | None:
        """`with_features` in NumPy, as `numpy_forward`."""
        encode = self.numpy_features(n)
        if encode is None:
            return None
        body, head, masked = numpy_inference.body(self.mlp), numpy_inference.head(self.head), self.masked
        if body is None:
            return None

        def forward(observation: Tree) -> tuple[np.ndarray, np.ndarray]:
            features = body(encode(observation))
            params = head(features).reshape(n, -1)
            params = masked_logits_numpy(params, observation[ACTION_MASK]) if masked else params
            return params, features.reshape(n, -1)

        return forward

    def numpy_features(self, n: int) -> Callable[[Tree], np.ndarray] | None:
        """`features` in NumPy, in blocks, as `numpy_forward`."""
        encode = numpy_inference.encoder(self.encoder, n)
        if encode is None:
            return None
        norm = numpy_inference.normalizer(self.observation_norm) if self.observation_norm else None
        view = self.view

        def forward(observation: Tree) -> np.ndarray:
            observation = numpy_inference.in_blocks(observation, n)
            return encode(view(norm(observation) if norm else observation))

        return forward


def make_features(observation_space: Space, config: ModelConfig) -> nn.Module:
    """The encoder of an actor or critic, without hidden layers: vectors are concatenated, images encoded.

    Raises:
        ConfigError: the model has memory or another part that these networks do not support.
    """
    if config.action_embedding:
        raise ConfigError(
            f"model.action_embedding={config.action_embedding} is for Q-values and logits (dqn, r2d1, pqn, ppo, a2c, "
            f"pg, impala, appo, bc, marwil); for critics of actions (DDPG, TD3, SAC, CQL, IQL) set "
            f"model.action_embedding=0"
        )
    unsupported = {
        "model.memory=none": config.memory != "none",
        "model.feed_back=false": config.feed_back,
        "model.shared=auto": config.shared is True,
        "model.distribution=auto (they always squash)": config.distribution not in ("auto", "squashed_gaussian"),
    }
    remedies = [remedy for remedy, wrong in unsupported.items() if wrong]
    if remedies:
        raise ConfigError(
            f"actors and critics of actions (DDPG, TD3, SAC, CQL, IQL) see single observations, and have networks of "
            f"their own; set {' and '.join(remedies)} (with memory: algo=ppo, a2c or r2d1)"
        )
    default = ModelConfig()
    plain = {name: getattr(default, name) for name in OF_ACTORS}
    return make_encoder(observation_space, chz.replace(config, hidden=(), critic=CriticConfig(), **plain))
