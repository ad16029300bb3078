"""ActorAgent for DDPG, TD3 and SAC: a policy trained through critics, with random actions or noise to explore."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.agents.base import Agent, NumpyStep
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import check_action_space, check_observation_space, mask_parts
from rlframe.core.struct import Struct, Tree, fill
from rlframe.core.types import AgentInputs, AgentStep, Array
from rlframe.distributions.categorical import gumbel
from rlframe.models import ModelConfig
from rlframe.models.actor import Actor
from rlframe.models.base import with_modes
from rlframe.models.masks import FORBIDDEN
from rlframe.ops.fused import squashed_samples

LOG_STD = (-20.0, 2.0)  # range of the log standard deviation (the code of Haarnoja et al. 2018)


@dataclass(frozen=True, eq=False)
class ActorInfo(Struct):
    """Empty: training from replay evaluates actions again."""


@dataclass(frozen=True, eq=False)
class ActorNoise(Struct):
    """Noise of one row, float32; zeros act greedily."""

    policy: Array  # [..., d] standard normal, or Gumbel for discrete actions
    uniform: Array  # [..., d] in [-1, 1]; [..., 0] for discrete actions, where Gumbel noise alone is uniform
    active: Array  # [..., 1] ones; zero makes a row greedy at any level


@dataclass(frozen=True, eq=False)
class Levels(Struct):
    """How much an agent explores; numbers or scalar arrays."""

    random: Any  # 1: random actions, 0: actions of the policy
    exploration: Any  # standard deviation of the noise added to the actions of a deterministic policy


class ActorPolicy(ABC):
    """Maps the network's parameters and a row's noise to a canonical action."""

    param_size: int

    @abstractmethod
    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> ActorNoise:
        """Noise [*lead, ...] of one environment."""

    @abstractmethod
    def act(self, params: Any, noise: ActorNoise, levels: Levels, xp: Any) -> Any:
        """Actions [n, *act] of params [n, param_size], as arrays of `xp`, the module torch or numpy."""

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """Greedy actions [n, *act]: those of `act` with zero noise."""


class Deterministic(ActorPolicy):
    """a = tanh x, plus normal noise when acting (Lillicrap et al. 2016; uncorrelated as in Fujimoto et al. 2018)."""

    def __init__(self, action_space: Space) -> None:
        self.shape = bounded_box(action_space).shape
        self.param_size = int(np.prod(self.shape))

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> ActorNoise:
        return _box_noise(rng, lead, self.param_size)

    def act(self, params: Any, noise: ActorNoise, levels: Levels, xp: Any) -> Any:
        action = (xp.tanh(params) + levels.exploration * noise.policy).clip(-1, 1)
        return _or_uniform(action, noise, levels).reshape(-1, *self.shape)

    def mode(self, params: Tensor) -> Tensor:
        return self.action(params)

    def action(self, params: Tensor) -> Tensor:
        """Actions a = tanh x [n, *act]."""
        return params.tanh().reshape(-1, *self.shape)


class SquashedGaussian(ActorPolicy):
    """tanh of a normal with a state-dependent standard deviation (Haarnoja et al. 2018)."""

    def __init__(self, action_space: Space) -> None:
        self.shape = bounded_box(action_space).shape
        self.size = int(np.prod(self.shape))
        self.param_size = 2 * self.size

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> ActorNoise:
        return _box_noise(rng, lead, self.size)

    def act(self, params: Any, noise: ActorNoise, levels: Levels, xp: Any) -> Any:
        mean, log_std = params[:, : self.size], params[:, self.size :].clip(*LOG_STD)
        action = xp.tanh(mean + xp.exp(log_std) * noise.policy)
        return _or_uniform(action, noise, levels).reshape(-1, *self.shape)

    def mode(self, params: Tensor) -> Tensor:
        return params[:, : self.size].tanh().reshape(-1, *self.shape)

    def sample_with_next(self, params: Tensor, next_params: Tensor, noise: Tensor) -> Any:
        """Actions [n, *act] and log-probabilities [n] of a batch [n, P]; and those of its next rows, without gradient.

        `noise` [2 n, d] is standard normal.
        """
        action, log_prob, next_action, next_log_prob = squashed_samples(params, next_params, noise, *LOG_STD)
        return (action.view(-1, *self.shape), log_prob), (next_action.view(-1, *self.shape), next_log_prob)


class Choice(ActorPolicy):
    """One of n discrete actions; the parameters are logits (Christodoulou 2019)."""

    def __init__(self, action_space: Space, masked: bool = False) -> None:
        """`masked`: logits may be those of forbidden actions (see models.masks)."""
        if not isinstance(action_space, spaces.Discrete):
            raise ConfigError(f"action space {action_space} must be Discrete for a choice")
        self.param_size, self.masked = int(action_space.n), masked

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> ActorNoise:
        drawn = gumbel(rng, (*lead, self.param_size))
        return ActorNoise(drawn, np.zeros((*lead, 0), np.float32), np.ones((*lead, 1), np.float32))

    def act(self, params: Any, noise: ActorNoise, levels: Levels, xp: Any) -> Any:
        logits = params * (1 - noise.active * levels.random)
        if self.masked:  # random actions are allowed ones too
            logits = xp.where(params <= FORBIDDEN, params, logits)
        return (logits + noise.policy).argmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)


def _box_noise(rng: np.random.Generator, lead: tuple[int, ...], size: int) -> ActorNoise:
    uniform = 2 * rng.random((*lead, size), np.float32) - 1
    return ActorNoise(rng.standard_normal((*lead, size), np.float32), uniform, np.ones((*lead, 1), np.float32))


def _or_uniform(action: Any, noise: ActorNoise, levels: Levels) -> Any:
    share = noise.active * levels.random
    return action * (1 - share) + noise.uniform * share


def bounded_box(action_space: Space) -> spaces.Box:
    """The action space of a policy that ends in tanh.

    Raises:
        ConfigError: it is not a Box, or has no finite bounds.
    """
    if not isinstance(action_space, spaces.Box):
        raise ConfigError(
            f"action space {action_space}: DDPG, TD3 and SAC need one Box (or for SAC one Discrete); for others use "
            f"algo=ppo or a2c, or flatten the actions in a wrapper"
        )
    if not action_space.is_bounded():
        raise ConfigError(
            f"action space {action_space} has no finite bounds, which a tanh policy needs; wrap the environment so "
            f"that its Box is bounded (gymnasium.wrappers.TransformAction), or use algo=ppo"
        )
    return action_space


class ActorAgent(Agent):
    """Acts by `policy` with parameters from `model`. The algorithm sets the levels of exploration."""

    random: Tensor
    exploration: Tensor

    def __init__(
        self,
        model: Actor,
        policy: ActorPolicy,
        observation_space: Space,
        action_space: Space,
        network: ModelConfig,
    ) -> None:
        """`network`: the config of `model`, also used for the critics."""
        super().__init__()
        self.model, self.policy, self.network = with_modes(model), policy, network
        self.observation_space, self.action_space = observation_space, action_space
        self.register_buffer("random", torch.zeros(()))
        self.register_buffer("exploration", torch.zeros(()))

    def set_levels(self, random: float, exploration: float) -> None:
        """Set the share of random actions (0 or 1) and the standard deviation of the noise."""
        fill(self.random, random)
        fill(self.exploration, exploration)

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        levels = Levels(self.random, self.exploration)
        action = self.policy.act(self.model(inputs.observation), noise, levels, torch)
        return AgentStep(action=action, info=ActorInfo(), state=state)

    def numpy_step(self, n: int) -> NumpyStep | None:
        forward, act = self.model.numpy_forward(n), self.policy.act
        if forward is None:
            return None
        levels, info = Levels(self.random, self.exploration).numpy(), ActorInfo()

        def step(inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
            params = forward(inputs.observation)
            return AgentStep(action=act(params, noise, levels, np), info=info, state=state)

        return step

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return self.policy.noise(rng, lead)

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return ()

    def observe(self, observation: Tree) -> None:
        self.model.observe(observation)


def make_actor_agent(
    observation_space: Space, action_space: Space, policy: ActorPolicy, config: ModelConfig, seed: int = 0
) -> ActorAgent:
    """Agent and network for these spaces and policy; `seed`, the run's root seed, decides the initial weights.

    Raises:
        ValueError, ConfigError: an unsupported space, or a model that does not fit it.
    """
    check_observation_space(observation_space)
    check_action_space(action_space)
    of_gaussian = {
        f"log_std={config.log_std:g}": config.log_std,
        f"distribution={config.distribution}": config.distribution != "auto",
        "state_dependent_std=true": config.state_dependent_std,
    }
    for given, is_given in of_gaussian.items():
        if is_given and not isinstance(policy, SquashedGaussian):
            raise ConfigError(f"model.{given} is for Gaussian policies, and this one has none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.MODEL))
        model = Actor(observation_space, policy.param_size, config, bool(mask_parts(observation_space, action_space)))
    if isinstance(policy, SquashedGaussian):
        with torch.no_grad():
            model.mlp.layers.flat[-1][policy.size :] += config.log_std
    agent = ActorAgent(model, policy, observation_space, action_space, config)
    agent.model_config = config
    return agent
