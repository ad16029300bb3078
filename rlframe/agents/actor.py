"""ActorAgent for DDPG, TD3 and SAC: a policy trained through critics, with random actions or noise to explore."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.agents.base import AgentState, ModelAgent, NumpyStep, Target
from rlframe.core.arguments import checked
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import check_action_space, check_observation_space
from rlframe.core.struct import Struct, Tree, as_numpy, fill, map_tree
from rlframe.core.types import AgentInputs, AgentStep, Array
from rlframe.distributions import Categorical, Distribution, TanhGaussian
from rlframe.distributions.categorical import gumbel
from rlframe.exploration import ActionNoise, ExploreConfig, check_features, config_of
from rlframe.exploration.base import unknown_probabilities
from rlframe.exploration.parameter_noise import ParameterNoiseConfig
from rlframe.models import ModelConfig
from rlframe.models.actor import Actor, ActorModel, MakeActor, OwnActor
from rlframe.models.base import LEAST_LOG_STD, with_modes
from rlframe.models.initial import redrawn
from rlframe.models.network import initial_weights
from rlframe.models.views import FORBIDDEN

_PLAIN = ModelConfig()
MOST_LOG_STD = 2.0  # largest log standard deviation (the code of Haarnoja et al. 2018)


@dataclass(frozen=True, eq=False)
class ActorInfo(Struct):
    """Results of acting; training from replay evaluates actions again."""

    log_prob: Tree  # [B] of behaviour, NaN where noise was added to a sample; () of a deterministic policy


@dataclass(frozen=True, eq=False)
class ActorNoise(Struct):
    """Noise of one row, float32; zeros act greedily."""

    policy: Tree  # [..., d] standard normal, or Gumbel for discrete actions; () for a deterministic policy
    uniform: Array  # [..., d] in [-1, 1]; [..., 0] for discrete actions, where Gumbel noise alone is uniform
    active: Array  # [..., 1] ones; zero makes a row greedy while actions are random
    explore: Tree  # of the exploration


class ActorPolicy(ABC):
    """Maps the network's parameters and a row's noise to a canonical action."""

    param_size: int
    shape: tuple[int, ...] = ()  # of a Box action
    size: int  # numbers of a Box action; 0: Discrete actions
    distribution: Distribution  # of sampled actions; if it is deterministic, one with its actions as modes

    @abstractmethod
    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        """Noise [*lead, ...] of one environment, with which the policy samples."""

    @abstractmethod
    def sample(self, params: Any, noise: Tree, random: Any, xp: Any) -> Any:
        """Actions [n, *act], or [n, size] of a Box, of params [n, param_size]; of arrays of `xp`, torch or numpy.

        `random` [n, 1]: 1 where an action will be random; only `Choice` draws it here.
        """

    @abstractmethod
    def log_prob(self, params: Any, action: Any, random: Any, xp: Any) -> Any:
        """Log-probability [n] of what `sample` gave, uniform where `random` [n, 1] is 1; () if deterministic."""

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """Greedy actions [n, *act]: those of zero noise."""

    def target(self, params: Tensor) -> Tensor:
        """The parameters [n, P] of `distribution`: here the same."""
        return params


class Deterministic(ActorPolicy):
    """a = tanh x (Lillicrap et al. 2016)."""

    def __init__(self, action_space: Space) -> None:
        self.shape = bounded_box(action_space).shape
        self.param_size = self.size = int(np.prod(self.shape))
        self.distribution = TanhGaussian(self.shape)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return ()  # noise of the exploration may be added to the action

    def sample(self, params: Any, noise: Tree, random: Any, xp: Any) -> Any:
        action = xp.tanh(params)
        return action if isinstance(noise, tuple) else (action + noise).clip(-1, 1)

    def log_prob(self, params: Any, action: Any, random: Any, xp: Any) -> Any:
        return ()

    def mode(self, params: Tensor) -> Tensor:
        return self.action(params)

    def target(self, params: Tensor) -> Tensor:
        return F.pad(params, (0, self.size))

    def action(self, params: Tensor) -> Tensor:
        """Actions a = tanh x [..., *act] of x [..., d]."""
        return params.tanh().reshape(*params.shape[:-1], *self.shape)


class SquashedGaussian(ActorPolicy):
    """tanh of a normal with a state-dependent standard deviation (Haarnoja et al. 2018)."""

    distribution: TanhGaussian

    def __init__(self, action_space: Space, model: ModelConfig = _PLAIN) -> None:
        """`model`: bounds the log standard deviation."""
        self.shape = bounded_box(action_space).shape
        log_std = model.least_log_std, MOST_LOG_STD
        self.distribution = TanhGaussian(self.shape, log_std, model.log_std_bound == "tanh")
        self.size, self.param_size = self.distribution.size, self.distribution.param_size

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return self.distribution.noise(rng, lead)

    def sample(self, params: Any, noise: Tree, random: Any, xp: Any) -> Any:
        return self.distribution.sample_flat(params, noise, xp)

    def log_prob(self, params: Any, action: Any, random: Any, xp: Any) -> Any:
        sampled, uniform = self.distribution.log_prob_flat(params, action, xp), -self.size * math.log(2)
        return xp.where(random[:, 0] != 0, xp.full_like(sampled, uniform), sampled)

    def mode(self, params: Tensor) -> Tensor:
        return self.distribution.mode(params)


class Choice(ActorPolicy):
    """One of n discrete actions; the parameters are logits (Christodoulou 2019)."""

    def __init__(self, action_space: Space, masked: bool = False) -> None:
        """`masked`: logits may be those of forbidden actions (see models.views)."""
        if not isinstance(action_space, spaces.Discrete):
            raise ConfigError(f"action space {action_space} must be Discrete for a choice")
        self.param_size, self.size, self.masked = int(action_space.n), 0, masked
        self.distribution = Categorical(self.param_size)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return gumbel(rng, (*lead, self.param_size))

    def sample(self, params: Any, noise: Tree, random: Any, xp: Any) -> Any:
        return (self._logits(params, random, xp) + noise).argmax(-1)

    def log_prob(self, params: Any, action: Any, random: Any, xp: Any) -> Any:
        logits = self._logits(params, random, xp)
        size = xp.exp(logits - xp.amax(logits, -1)[:, None]).sum(-1)
        rows = np.arange(len(action)) if xp is np else torch.arange(len(action), device=action.device)
        return logits[rows, action] - xp.amax(logits, -1) - xp.log(size)

    def _logits(self, params: Any, random: Any, xp: Any) -> Any:
        logits = params * (1 - random)
        return xp.where(params <= FORBIDDEN, params, logits) if self.masked else logits  # random ones are allowed too

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)


def bounded_box(action_space: Space) -> spaces.Box:
    """The action space of a policy that ends in tanh.

    Raises:
        ConfigError: it is not a Box, or has no finite bounds.
    """
    if not isinstance(action_space, spaces.Box):
        raise ConfigError(
            f"action space {action_space}: DDPG, TD3, TD3+BC, MADDPG, SAC and CQL need one Box (or for SAC and CQL one "
            f"Discrete); for others use algo=ppo or a2c (for data bc or marwil, for several agents "
            f"qmix), an argument of the environment that makes actions a Box, or flatten them in a wrapper"
        )
    if not action_space.is_bounded():
        raise ConfigError(
            f"action space {action_space} has no finite bounds, which a tanh policy needs; wrap the environment so "
            f"that its Box is bounded (gymnasium.wrappers.TransformAction), or use algo=ppo"
        )
    return action_space


class ActorAgent(ModelAgent):
    """Acts by `policy` with parameters from `model`, changed by `exploration`; at first at random."""

    model: ActorModel
    exploration: ActionNoise
    random: Tensor  # 1: random actions, 0: actions of the policy

    def __init__(
        self,
        model: ActorModel,
        policy: ActorPolicy,
        exploration: ActionNoise,
        observation_space: Space,
        action_space: Space,
    ) -> None:
        super().__init__()
        self.model, self.policy, self.exploration = with_modes(model), policy, exploration
        self.observation_space, self.action_space = observation_space, action_space
        self.register_buffer("random", torch.zeros(()))
        self._samples_if_random = not (policy.size or exploration.samples)  # a choice that is greedy otherwise

    def set_random(self, random: bool) -> None:
        """Whether actions are uniformly random from now on."""
        fill(self.random, float(random))

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        network, level = self.exploration.network(self.model), self.exploration.level
        return self._act(network, level, self.random, torch, inputs, state, noise)

    def numpy_step(self, n: int) -> NumpyStep | None:
        network, level = self.exploration.network(self.model, n), as_numpy(self.exploration.level)
        return partial(self._act, network, level, as_numpy(self.random), np) if network else None

    def _act(
        self, network: Any, level: Array, all_random: Array, xp: Any, inputs: AgentInputs, state: Tree, noise: Tree
    ) -> AgentStep:
        """A step with what the exploration asks for of the network, of arrays of `xp`, torch or numpy."""
        policy, exploration, random = self.policy, self.exploration, noise.active * all_random
        params, drawn, state = exploration.evaluate(network, inputs, noise.policy, noise.explore, state, level, xp)
        drawn = drawn * random if self._samples_if_random else drawn
        action = policy.sample(params, drawn, random, xp)
        if exploration.changes:
            action, state = exploration.perturb(action, inputs, noise.explore, state, level, xp)
        if policy.size:
            action = action * (1 - random) + noise.uniform * random
        log_prob = policy.log_prob(params, action, random, xp)
        if not exploration.log_prob_known:
            log_prob = map_tree(lambda x: x * math.nan, log_prob)
        return AgentStep(action.reshape(-1, *policy.shape), ActorInfo(log_prob), state)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        policy, exploration = self.policy, self.exploration
        uniform = 2 * rng.random((*lead, policy.size), np.float32) - 1
        sampled = policy.noise(rng, lead)
        if policy.size and not exploration.samples:
            sampled = map_tree(np.zeros_like, sampled)
        return ActorNoise(sampled, uniform, np.ones((*lead, 1), np.float32), exploration.noise(rng, lead))

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return self.exploration.initial_state(env_ids)

    def parts_of(self, state: Tree) -> AgentState:
        return AgentState(state, ())

    def joined(self, parts: AgentState) -> Tree:
        return parts.explore

    def greedy(self, inputs: AgentInputs, memory: Tree) -> tuple[Tree, Tree]:
        return self.policy.mode(self.model(inputs.observation)), ()

    def target(self, explore: bool) -> Target:
        if explore and not self.exploration.log_prob_known:
            raise unknown_probabilities("with noise on its actions or parameters, or without any,")

        def params(inputs: AgentInputs) -> Tensor:
            return self.policy.target(self.model(map_tree(lambda x: x[:, 0], inputs.observation)))

        return params, self.policy.distribution


def _rlframes_actor(
    observation_space: Space, action_space: Space, policy: ActorPolicy, config: ModelConfig, part: ExploreConfig
) -> Actor:
    """Raises ConfigError if the exploration does not fit its layers."""
    stochastic = isinstance(policy, SquashedGaussian)
    if config.blocks and part.kind() in ("gsde", "parameter_noise"):
        raise ConfigError(f"model.blocks={config.blocks} does not fit algo.explore={part.kind()}; use other noise")
    if part.needs_features and config.log_std_bound == "tanh":
        raise ConfigError(f"model.log_std_bound=tanh does not fit algo.explore={part.kind()}; use clip")

    def make_head(n_features: int) -> nn.Module:
        return part.make_head(nn.Linear(n_features, policy.size), stochastic, learn_features=True)

    head = make_head if part.needs_features else None
    parts = 2 if stochastic else 1  # mean and deviation
    model = redrawn(Actor(observation_space, policy.param_size, config, action_space, head, parts), config.init)
    if stochastic and not part.needs_features and (bias := model.mlp.last.bias) is not None:
        with torch.no_grad():
            bias.view(-1)[policy.size :] += config.log_std
    return model


def _check_gaussian(config: ModelConfig, stochastic: bool) -> None:
    """Raise ConfigError if a setting is about the deviation of a policy that has none."""
    of_gaussian = {
        f"log_std={config.log_std:g}": config.log_std,
        f"distribution={config.distribution}": config.distribution != "auto",
        "state_dependent_std=true": config.state_dependent_std,
        f"least_log_std={config.least_log_std:g}": config.least_log_std != LEAST_LOG_STD,
        "log_std_bound=tanh": config.log_std_bound == "tanh",
    }
    for given, is_given in of_gaussian.items():
        if is_given and not stochastic:
            raise ConfigError(f"model.{given} is for Gaussian policies, and this one has none")


def _check_own(part: ExploreConfig, config: ModelConfig, deterministic: bool) -> None:
    """Raise ConfigError if a setting is about the layers of rlframe's actor, and there is another."""
    if part.needs_features or isinstance(part, ParameterNoiseConfig):
        raise ConfigError(
            f"algo.explore={part.kind()} is for rlframe's actor, and make_actor gives another; use "
            f"{'gaussian' if deterministic else 'stochastic'}"
        )
    if config.log_std:
        raise ConfigError(
            f"model.log_std={config.log_std:g} is for rlframe's actor, and make_actor gives another; leave it out"
        )


@checked
def make_actor_agent(
    observation_space: Space,
    action_space: Space,
    policy: ActorPolicy,
    config: ModelConfig,
    explore: ExploreConfig | str,
    seed: int = 0,
    make_network: MakeActor | None = None,
) -> ActorAgent:
    """Agent and network for these spaces and policy; `seed`, the run's root seed, decides the initial weights.

    `make_network`: of a network of the user's, see `ActorCriticConfig.make_actor`; None: it is rlframe's.

    Raises:
        ValueError, ConfigError: an unsupported space, or a model or exploration that does not fit it.
    """
    check_observation_space(observation_space)
    check_action_space(action_space)
    part, given = config_of(explore), (observation_space, action_space, policy, config)
    _check_gaussian(config, isinstance(policy, SquashedGaussian))
    check_features(part, config, bool(policy.size), action_space)
    with initial_weights(seed_int(seed, Role.MODEL)):
        if make_network is None:
            model: ActorModel = _rlframes_actor(*given, part)
        else:
            _check_own(part, config, isinstance(policy, Deterministic))
            model = OwnActor(make_network, observation_space, action_space, policy.param_size, config)
    exploration = part.make_for(model, policy.size, seed)
    exploration.kind = part.kind()
    if exploration.changes and not policy.size:
        raise ConfigError(f"algo.explore={part.kind()} is for Box actions, not {action_space}; use stochastic")
    agent = ActorAgent(model, policy, exploration, observation_space, action_space)
    agent.model_config = config
    return agent
