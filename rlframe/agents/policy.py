"""PolicyAgent: a stochastic policy with a state value, for PPO, A2C and the other policy-gradient algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.agents.base import Agent, NumpyStep
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import check_action_space, check_observation_space, mask_parts, without_mask
from rlframe.core.struct import Struct, Tree, as_numpy, leaves
from rlframe.core.types import AgentInputs, AgentStep, Array
from rlframe.distributions import DiagonalGaussian, Distribution, TanhGaussian, make_distribution
from rlframe.exploration import ExploreConfig, ExploreState, check_features, config_of
from rlframe.exploration.gsde import Gsde
from rlframe.models import ActorCritic, ModelConfig, PolicyModel
from rlframe.models.base import with_modes
from rlframe.models.masks import MaskedPolicy
from rlframe.models.mlp import policy_layer
from rlframe.models.parametric import make_policy_model


@dataclass(frozen=True, eq=False)
class PolicyInfo(Struct):
    """Results of acting that training reuses."""

    log_prob: Array  # [B] of the sampled, unclipped action
    value: Array  # [B]


@dataclass(frozen=True, eq=False)
class PolicyState(Struct):
    """State of an environment between its rows, where exploration has some; elsewhere it is the memory."""

    explore: ExploreState
    memory: Tree  # the model's state; () without memory


class PolicyAgent(Agent):
    """Samples from `distribution` with parameters from `model`."""

    def __init__(self, model: PolicyModel, distribution: Distribution, exploration: Gsde | None = None) -> None:
        """`exploration`: what correlates the samples in time; without, each is a draw of its own."""
        super().__init__()
        self.model, self.distribution, self.exploration = with_modes(model), distribution, exploration

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        if self.exploration is not None:
            assert isinstance(self.model, ActorCritic)
            evaluated, act = self.model.with_features(inputs, state.memory), self.distribution.act
            return _correlated(self.exploration, evaluated, act, inputs, state, noise, self.exploration.level, torch)
        params, value, state = self.model(inputs, state)
        action, log_prob = self.distribution.act(params, noise)
        return AgentStep(action=action, info=PolicyInfo(log_prob=log_prob, value=value), state=state)

    def numpy_step(self, n: int) -> NumpyStep | None:
        if self.exploration is not None:
            return self._correlated_numpy_step(n, self.exploration)
        forward, act = self.model.numpy_forward(n), self.distribution.act_numpy
        if forward is None:
            return None

        def step(inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
            params, value, state = forward(inputs, state)
            action, log_prob = act(params, noise)
            return AgentStep(action=action, info=PolicyInfo(log_prob=log_prob, value=value), state=state)

        return step

    def _correlated_numpy_step(self, n: int, exploration: Gsde) -> NumpyStep | None:
        assert isinstance(self.model, ActorCritic)
        evaluate, act = self.model.numpy_with_features(n), self.distribution.act_numpy
        if evaluate is None:
            return None
        level = as_numpy(exploration.level)

        def step(inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
            return _correlated(exploration, evaluate(inputs, state.memory), act, inputs, state, noise, level, np)

        return step

    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Distribution parameters [T, B, P], value [T, B] and the next state, with gradient."""
        return self.model(inputs, state)

    def evaluate(self, inputs: AgentInputs, state: Tree, action: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the actions taken, entropy and value [...], with gradient."""
        params, value, _ = self(inputs, state)
        log_prob, entropy = self.distribution.log_prob_entropy(params, action)
        return log_prob, entropy, value

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return (self.exploration or self.distribution).noise(rng, lead)

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        memory = self.memory(len(env_ids))
        return PolicyState(self.exploration.initial_state(env_ids), memory) if self.exploration else memory

    def memory(self, n: int) -> Tree:
        """The model's state at the start of n episodes; () without memory."""
        return self.model.initial_state(n)

    @property
    def recurrent(self) -> bool:
        return bool(leaves(self.memory(1)))

    def observe(self, observation: Tree) -> None:
        self.model.observe(observation)


def _correlated(
    exploration: Gsde,
    evaluated: tuple[Any, Any, Any, Tree],
    act: Callable[[Any, Tree], tuple[Tree, Any]],
    inputs: AgentInputs,
    state: PolicyState,
    noise: Tree,
    level: Any,
    xp: Any,
) -> AgentStep:
    """A step with the noise of exploration, in torch or NumPy; `evaluated`: see `ActorCritic.with_features`."""
    params, features, value, memory = evaluated
    drawn, explore = exploration.correlate(params, features, inputs, noise, state.explore, level, xp)
    action, log_prob = act(params, drawn)
    return AgentStep(action, PolicyInfo(log_prob=log_prob, value=value), PolicyState(explore, memory))


def make_policy_agent(
    observation_space: Space,
    action_space: Space,
    config: ModelConfig,
    seed: int = 0,
    explore: ExploreConfig | str = "stochastic",
) -> PolicyAgent:
    """Agent and network for these spaces; `seed`, the run's root seed, decides the initial weights.

    Raises:
        ValueError, ConfigError: an unsupported space, or a model that does not fit it.
    """
    check_observation_space(observation_space)
    check_action_space(action_space)
    distribution = make_distribution(action_space, config.distribution)
    masked = bool(mask_parts(observation_space, action_space))
    seen = without_mask(observation_space) if masked else observation_space
    part, size = config_of(explore), distribution.param_size // 2
    check_features(part, config, isinstance(distribution, DiagonalGaussian | TanhGaussian), action_space)

    def make_head(n_features: int) -> nn.Module:
        return part.make_head(policy_layer(n_features, size), stochastic=True, learn_features=False)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.MODEL))
        head = make_head if part.needs_features else None
        model = make_policy_model(seen, action_space, distribution, config, head)
    exploration: Any = part.make_for(model, size, seed) if part.needs_features else None
    agent = PolicyAgent(MaskedPolicy(model) if masked else model, distribution, exploration)
    agent.model_config = config
    return agent
