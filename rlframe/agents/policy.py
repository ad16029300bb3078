"""PolicyAgent: a stochastic policy with a state value, for PPO, A2C and the other policy-gradient algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.agents.base import AgentState, ModelAgent, NumpyStep, Target
from rlframe.core.arguments import checked
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import check_action_space, check_observation_space
from rlframe.core.struct import Struct, Tree, as_numpy, map_tree
from rlframe.core.types import AgentInputs, AgentStep, Array
from rlframe.data.cutting import Behaviour, as_acted, unknown
from rlframe.distributions import Distribution, make_distribution
from rlframe.exploration import POLICY_KINDS, ExploreConfig, check_features, config_of
from rlframe.exploration.base import unknown_probabilities
from rlframe.exploration.gsde import Gsde
from rlframe.models import ActorCritic, ModelConfig, PolicyModel
from rlframe.models.base import with_modes
from rlframe.models.heads import add_log_std, policy_layer
from rlframe.models.initial import redrawn
from rlframe.models.network import initial_weights


@dataclass(frozen=True, eq=False)
class PolicyInfo(Struct):
    """Results of acting that training reuses."""

    log_prob: Array  # [B] of the sampled, unclipped action
    value: Array  # [B]


class PolicyAgent(ModelAgent):
    """Samples from `distribution` with parameters from `model`."""

    model: PolicyModel
    observation_space: Space  # both set by `make_policy_agent`; algorithms that learn from replay read them
    action_space: Space

    def __init__(self, model: PolicyModel, distribution: Distribution, samples: bool = True) -> None:
        """`samples`: False acts with the mode; info.log_prob is still that of the distribution."""
        super().__init__()
        self.model, self.distribution, self.samples = with_modes(model), distribution, samples

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        return _sampled(self.model, self.distribution.act, inputs, state, noise)

    def numpy_step(self, n: int) -> NumpyStep | None:
        forward = self.model.numpy_forward(n)
        return partial(_sampled, forward, self.distribution.act_numpy) if forward else None

    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Distribution parameters [T, B, P], value [T, B] and the next state, with gradient."""
        return self.model(inputs, state)

    def evaluate(self, inputs: AgentInputs, state: Tree, action: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the actions taken, entropy and value [...], with gradient."""
        params, value, _ = self(inputs, state)
        log_prob, entropy = self.distribution.log_prob_entropy(params, action)
        return log_prob, entropy, value

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        drawn = self.distribution.noise(rng, lead)
        return drawn if self.samples else map_tree(np.zeros_like, drawn)

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return self.memory(len(env_ids))

    def greedy(self, inputs: AgentInputs, memory: Tree) -> tuple[Tree, Tree]:
        n, device = inputs.first.shape[0], inputs.first.device
        drawn = self.distribution.noise(np.random.default_rng(0), ())
        zeros = map_tree(lambda x: torch.zeros(n, *np.shape(x), device=device), drawn)
        params, _, memory = self.model(inputs, memory)
        return self.distribution.sample(params, zeros), memory

    def behaviour(self, env: int = 0, ahead: bool = False) -> Behaviour:
        return as_acted if self.samples else unknown

    def target(self, explore: bool) -> Target:
        if explore and not self.samples:
            raise unknown_probabilities("with explore=none")
        return lambda inputs: self.model(inputs, self.memory(1))[0], self.distribution


Act = Callable[[Any, Tree], tuple[Tree, Any]]  # from parameters and noise to actions and their log-probabilities


def _sampled(network: Callable[..., Any], act: Act, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
    """A step by a network and what samples from its parameters, in torch or NumPy."""
    params, value, state = network(inputs, state)
    action, log_prob = act(params, noise)
    return AgentStep(action=action, info=PolicyInfo(log_prob=log_prob, value=value), state=state)


class GsdePolicyAgent(PolicyAgent):
    """A PolicyAgent whose samples `exploration` correlates in time, by the features of the policy."""

    model: ActorCritic

    def __init__(self, model: ActorCritic, distribution: Distribution, exploration: Gsde) -> None:
        super().__init__(model, distribution)
        self.exploration = exploration

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        network, level = self.model.with_features, self.exploration.level
        return self._correlated(network, self.distribution.act, level, torch, inputs, state, noise)

    def numpy_step(self, n: int) -> NumpyStep | None:
        network, level = self.model.numpy_with_features(n), as_numpy(self.exploration.level)
        return partial(self._correlated, network, self.distribution.act_numpy, level, np) if network else None

    def _correlated(
        self, network: Any, act: Act, level: Any, xp: Any, inputs: AgentInputs, state: AgentState, noise: Tree
    ) -> AgentStep:
        """A step in torch or NumPy; `network`: see `ActorCritic.with_features`."""
        params, features, value, memory = network(inputs, state.memory)
        drawn, explore = self.exploration.correlate(params, features, inputs, noise, state.explore, level, xp)
        action, log_prob = act(params, drawn)
        return AgentStep(action, PolicyInfo(log_prob=log_prob, value=value), AgentState(explore, memory))

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return self.exploration.noise(rng, lead)

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return AgentState(self.exploration.initial_state(env_ids), self.memory(len(env_ids)))

    def joined(self, parts: AgentState) -> Tree:
        return parts

    def behaviour(self, env: int = 0, ahead: bool = False) -> Behaviour:
        return unknown

    def target(self, explore: bool) -> Target:
        if explore:
            raise unknown_probabilities("with explore=gsde, whose noise is correlated in time,")
        return super().target(explore)


@checked
def make_policy_agent(
    observation_space: Space,
    action_space: Space,
    config: ModelConfig,
    seed: int = 0,
    explore: ExploreConfig | str = "stochastic",
) -> PolicyAgent:
    """Agent and network for these spaces; `seed`, the run's root seed, decides the initial weights.

    Raises:
        ValueError, ConfigError: an unsupported space, or a model or exploration that does not fit it.
    """
    part = config_of(explore)
    if part.kind() not in POLICY_KINDS:
        raise ConfigError(f"algo.explore={part.kind()} does not fit a policy agent; use {' or '.join(POLICY_KINDS)}")
    check_observation_space(observation_space)
    check_action_space(action_space)
    distribution, correlates = make_distribution(action_space, config.distribution), part.needs_features
    size = distribution.param_size // 2
    check_features(part, config, distribution.has_log_std, action_space)

    def make_head(n_features: int) -> nn.Module:
        return part.make_head(policy_layer(n_features, size), stochastic=True, learn_features=False)

    with initial_weights(seed_int(seed, Role.MODEL)):
        head = make_head if correlates else None
        model = redrawn(ActorCritic(observation_space, action_space, distribution, config, head), config.init)
        if config.state_dependent_std and config.init != "auto" and not correlates:  # biases are drawn again, too
            add_log_std(model.policy_head, distribution, config.log_std)
    if correlates:
        exploration: Any = part.make_for(model, size, seed)
        agent: PolicyAgent = GsdePolicyAgent(model, distribution, exploration)
    else:
        agent = PolicyAgent(model, distribution, part.make_noise(size).samples)
    agent.model_config = config
    agent.observation_space, agent.action_space = observation_space, action_space
    return agent
