"""ActorAgent: a policy that improves on action values, for DDPG, TD3 and SAC; first random, then with noise."""

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
from rlframe.core.spaces import check_action_space, check_observation_space
from rlframe.core.struct import Struct, Tree, fill
from rlframe.core.types import AgentInputs, AgentStep, Array
from rlframe.distributions.categorical import gumbel
from rlframe.models import ModelConfig
from rlframe.models.actor import Actor
from rlframe.ops.fused import squashed_sample

LOG_STD = (-20.0, 2.0)  # its range (Haarnoja et al. 2018, in their code)


@dataclass(frozen=True, eq=False)
class ActorInfo(Struct):
    """Nothing: what is learned from replay is computed again."""


@dataclass(frozen=True, eq=False)
class ActorNoise(Struct):
    """What one row draws, float32; all zero: greedy."""

    policy: Array  # [..., d] standard normal, or Gumbel for discrete actions
    uniform: Array  # [..., d] in [-1, 1]; [..., 0] for discrete actions, whose Gumbel noise alone is uniform
    active: Array  # [..., 1] one; zero keeps a row greedy whatever the levels


@dataclass(frozen=True, eq=False)
class Levels(Struct):
    """How much an agent explores; numbers, or arrays without dimensions."""

    random: Any  # 1: random actions, 0: the policy's
    exploration: Any  # standard deviation of the noise that is added to a deterministic policy's actions


class ActorPolicy(ABC):
    """How the network's parameters and a row's noise become a canonical action."""

    param_size: int

    @abstractmethod
    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> ActorNoise:
        """Noise [*lead, ...] of one environment."""

    @abstractmethod
    def act(self, params: Any, noise: ActorNoise, levels: Levels, xp: Any) -> Any:
        """Actions [n, *act] of params [n, param_size], all of `xp`: torch or numpy, which name all it needs alike."""

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """The greedy actions [n, *act]: those of `act` without noise and levels, in fewer steps."""


class Deterministic(ActorPolicy):
    """tanh, and normal noise when acting (Lillicrap et al. 2016 with Fujimoto et al. 2018's uncorrelated noise)."""

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
        """The actions [n, *act] themselves: a = tanh x."""
        return params.tanh().reshape(-1, *self.shape)


class SquashedGaussian(ActorPolicy):
    """tanh of a normal whose standard deviation depends on the observation (Haarnoja et al. 2018)."""

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

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [rows, *act] and their log-probability [rows]; noise [rows, d] is standard normal."""
        action, log_prob = squashed_sample(params, noise, *LOG_STD)
        return action.reshape(-1, *self.shape), log_prob


class Choice(ActorPolicy):
    """One of n actions, the parameters being their logits (Christodoulou 2019)."""

    def __init__(self, action_space: Space) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise ConfigError(f"action space {action_space}: a choice is made in a Discrete space")
        self.param_size = int(action_space.n)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> ActorNoise:
        drawn = gumbel(rng, (*lead, self.param_size))
        return ActorNoise(drawn, np.zeros((*lead, 0), np.float32), np.ones((*lead, 1), np.float32))

    def act(self, params: Any, noise: ActorNoise, levels: Levels, xp: Any) -> Any:
        return (params * (1 - noise.active * levels.random) + noise.policy).argmax(-1)

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
        ConfigError: it is another, or one without finite bounds.
    """
    if not isinstance(action_space, spaces.Box):
        raise ConfigError(
            f"action space {action_space}: DDPG, TD3 and SAC act in one Box (SAC also in one Discrete); for others use "
            f"algo=ppo or a2c, or flatten the actions in a wrapper"
        )
    if not action_space.is_bounded():
        raise ConfigError(
            f"action space {action_space} has no finite bounds, which a tanh policy needs; wrap the environment so "
            f"that its Box is bounded (gymnasium.wrappers.TransformAction), or use algo=ppo"
        )
    return action_space


class ActorAgent(Agent):
    """Acts by `policy` with the parameters that `model` gives. The algorithm sets the levels of exploration."""

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
        """`network` is what `model` was made by, for critics to be made alike."""
        super().__init__()
        self.model, self.policy, self.network = model, policy, network
        self.observation_space, self.action_space = observation_space, action_space
        self.register_buffer("random", torch.zeros(()))
        self.register_buffer("exploration", torch.zeros(()))

    def set_levels(self, random: float, exploration: float) -> None:
        """From the next refresh on, act at random (1.0) or not (0.0), and with such noise."""
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
        if self.model.norm:
            self.model.norm.update(observation)


def make_actor_agent(
    observation_space: Space, action_space: Space, policy: ActorPolicy, config: ModelConfig, seed: int = 0
) -> ActorAgent:
    """The agent and network that spaces and policy call for; the run's root seed decides the first weights.

    Raises:
        ValueError, ConfigError: an unsupported space, or a model that does not fit it.
    """
    check_observation_space(observation_space)
    check_action_space(action_space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.MODEL))
        model = Actor(observation_space, policy.param_size, config)
    if isinstance(policy, SquashedGaussian):
        with torch.no_grad():
            model.mlp.layers.flat[-1][policy.size :] += config.log_std
    return ActorAgent(model, policy, observation_space, action_space, config)
