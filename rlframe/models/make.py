"""make_policy_model, make_q_model: the network for a configuration, with embeddings of actions if it asks for them."""

from __future__ import annotations

from collections.abc import Callable

from gymnasium import Space, spaces
from torch import nn

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import AVAILABLE_ACTIONS, action_features, without
from rlframe.distributions import Categorical, Distribution
from rlframe.models.actor_critic import ActorCritic
from rlframe.models.base import ModelConfig, PolicyModel
from rlframe.models.network import Network
from rlframe.models.parametric import ParametricPolicy, ParametricQ
from rlframe.models.q_network import QModel, QNetwork


def make_policy_model(
    observation_space: Space,
    action_space: Space,
    distribution: Distribution,
    config: ModelConfig,
    make_head: Callable[[int], nn.Module] | None = None,
) -> PolicyModel:
    """The network of a policy, with action embeddings if `config` says so; `make_head`: see ActorCritic.

    Raises:
        ConfigError, ValueError: `config` does not fit the spaces.
    """
    if not config.action_embedding:
        return ActorCritic(observation_space, action_space, distribution, config, make_head)
    d = _action_features(observation_space, action_space, config)
    state_space = without(observation_space, AVAILABLE_ACTIONS)
    state = ActorCritic(state_space, action_space, Categorical(config.action_embedding), config)
    return ParametricPolicy(state, _embedding(d, config))


def make_q_model(
    observation_space: Space,
    action_space: spaces.Discrete,
    n_atoms: int,
    config: ModelConfig,
    dueling: bool = False,
    noisy: bool = False,
) -> QModel:
    """As `make_policy_model`, a Q-network."""
    if not config.action_embedding:
        return QNetwork(observation_space, action_space, n_atoms, config, dueling, noisy)
    if dueling:
        raise ConfigError("algo.dueling=true has a mean over fixed actions; with model.action_embedding use false")
    d = _action_features(observation_space, action_space, config)
    state_space = without(observation_space, AVAILABLE_ACTIONS)
    state = QNetwork(state_space, spaces.Discrete(config.action_embedding), n_atoms, config, noisy=noisy)
    return ParametricQ(state, _embedding(d, config))


def _action_features(observation_space: Space, action_space: Space, config: ModelConfig) -> int:
    if config.feed_back:
        raise ConfigError("model.feed_back=true feeds an action's number, not its features; use action_embedding=0")
    return action_features(observation_space, action_space)


def _embedding(d: int, config: ModelConfig) -> Network:
    """w(a) [..., E] of actions [..., d], with one hidden layer of the same width."""
    return Network([d, config.action_embedding, config.action_embedding], config.activation, norm=config.norm)
