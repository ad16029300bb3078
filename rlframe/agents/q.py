"""QAgent for the DQN family: acts by the highest Q-value, and at random with probability epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.agents.base import Agent, NumpyStep
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.core.schedule import Curve
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import ACTION_MASK, check_observation_space, mask_parts, without_mask
from rlframe.core.struct import Struct, Tree, as_numpy, fill, leaves
from rlframe.core.types import AgentInputs, AgentStep, Array
from rlframe.models import ModelConfig
from rlframe.models.base import with_modes
from rlframe.models.masks import MaskedQ, allowed, best_allowed, nth_allowed
from rlframe.models.parametric import make_q_model
from rlframe.models.q_network import QModel, QValue

_NEVER = 1e-12  # smallest epsilon; rounds to 0 in float32
_MANY = 1 << 31  # so large that the remainder of a uniform integer below it is uniform too


@dataclass(frozen=True, eq=False)
class QInfo(Struct):
    """Results of acting."""

    q: Array  # [B, A]


@dataclass(frozen=True, eq=False)
class QNoise(Struct):
    """Exploration noise of one row; zeros act greedily."""

    uniform: Array  # [B] float32 in [0, 1)
    action: Array  # [B] int64, taken if uniform > 1 - epsilon; with masks, modulo the number of allowed actions
    noisy: Array  # [B] float32, scale of the noise of noisy layers


@dataclass(frozen=True, eq=False)
class QState(Struct):
    """State of an environment between its rows."""

    env: Array  # [B] float32, global index of the environment
    memory: Tree  # the model's state; () without memory


class QAgent(Agent):
    """Epsilon-greedy in the Q-values of `model`; epsilon is the same for all environments or graded over them."""

    epsilon: Tensor
    last_env: Tensor

    def __init__(self, model: QModel, kind: QValue, observation_space: Space, action_space: spaces.Discrete) -> None:
        super().__init__()
        self.model, self.kind = with_modes(model), kind
        self.observation_space, self.action_space = observation_space, action_space
        self.masked = bool(mask_parts(observation_space, action_space))
        self.n_drawn = _MANY if self.masked else int(action_space.n)  # random actions count from 0 to below this
        self.register_buffer("epsilon", torch.zeros(2))  # of the first and of the last environment
        self.register_buffer("last_env", torch.ones(()))  # index of the last environment of all ranks

    def set_epsilon(self, first: float, last: float, n_envs: int) -> None:
        """Set epsilons spaced logarithmically from `first`, for environment 0, to `last` (Horgan et al. 2018).

        ε_i = first^(1 - i/(N-1)) last^(i/(N-1)), where N = n_envs counts the environments of all ranks.
        """
        fill(self.epsilon, (first, last))
        fill(self.last_env, max(n_envs - 1, 1))

    @contextmanager
    def exploring_at(self, epsilon: float) -> Iterator[None]:
        before = self.epsilon.clone()
        if not math.isnan(epsilon):
            fill(self.epsilon, epsilon)
        try:
            yield
        finally:
            self.epsilon.copy_(before)

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        values, memory = self.model(inputs, state.memory, noise.noisy.unsqueeze(-1))
        q = self.kind.q(values)
        log_first, log_last = self.epsilon.clamp(_NEVER).log()
        epsilon = (log_first + (log_last - log_first) * (state.env / self.last_env)).exp()
        drawn = nth_allowed(inputs.observation[ACTION_MASK], noise.action) if self.masked else noise.action
        action = torch.where(noise.uniform > 1 - epsilon, drawn, self.best(q, inputs))
        return AgentStep(action=action, info=QInfo(q=q), state=QState(state.env, memory))

    def numpy_step(self, n: int) -> NumpyStep | None:
        forward, q_of = self.model.numpy_forward(n), self.kind.q_numpy
        if forward is None:
            return None
        level, last_env, masked = as_numpy(self.epsilon), as_numpy(self.last_env), self.masked

        def step(inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
            values, memory = forward(inputs, state.memory, noise.noisy)
            q = q_of(values)
            epsilon, last = level.tolist()
            if epsilon != last:
                first, last = math.log(max(epsilon, _NEVER)), math.log(max(last, _NEVER))
                epsilon = np.exp(first + (last - first) * (state.env / last_env))
            known, drawn = q, noise.action
            if masked:
                mask = inputs.observation[ACTION_MASK]
                known, drawn = np.where(allowed(mask), q, -np.inf), nth_allowed(mask, drawn)
            action = np.where(noise.uniform > 1 - epsilon, drawn, known.argmax(-1))
            return AgentStep(action=action, info=QInfo(q=q), state=QState(state.env, memory))

        return step

    def best(self, q: Tensor, inputs: AgentInputs) -> Tensor:
        """The action [...] of the highest Q-value [..., A] among those that the inputs' mask allows."""
        return best_allowed(q, inputs.observation) if self.masked else q.argmax(-1)

    def forward(self, inputs: AgentInputs, memory: Tree) -> tuple[Tensor, Tree]:
        """The head's numbers [..., A, n_atoms] and the next memory, with gradient and the noise of noisy layers."""
        return self.model(inputs, memory)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        uniform = rng.random(lead, dtype=np.float32)
        action = (rng.random(lead) * self.n_drawn).astype(np.int64)  # half the time of rng.integers
        return QNoise(uniform, action, np.ones(lead, np.float32))

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        device = self.epsilon.device
        return QState(torch.tensor(list(env_ids), dtype=torch.float32, device=device), self.memory(len(env_ids)))

    def memory(self, n: int) -> Tree:
        """The model's state at the start of n episodes; () without memory."""
        return self.model.initial_state(n)

    @property
    def recurrent(self) -> bool:
        return bool(leaves(self.memory(1)))

    def observe(self, observation: Tree) -> None:
        self.model.observe(observation)


class EpsilonSchedule:
    """Sets an agent's epsilon: that of the first environment and that of the last one, by env_steps."""

    def __init__(self, first: Curve, last: Curve, n_envs: int) -> None:
        """`n_envs`: environments of this rank; epsilons are graded over those of all ranks."""
        self.first, self.last, self.n_envs = first, last, n_envs * current_ranks().n_samplers

    def apply(self, agent: QAgent, env_steps: int) -> None:
        """Set the epsilon for `env_steps`."""
        agent.set_epsilon(self.first(env_steps), self.last(env_steps), self.n_envs)


def make_q_agent(
    observation_space: Space,
    action_space: Space,
    config: ModelConfig,
    kind: QValue,
    seed: int = 0,
    dueling: bool = False,
    noisy: bool = False,
) -> QAgent:
    """Agent and network for these spaces; `seed`, the run's root seed, decides the initial weights.

    Raises:
        ConfigError: the actions are not Discrete, or `config` is for policies.
        ValueError: an unsupported observation space.
    """
    check_observation_space(observation_space)
    if config.shared or config.log_std:
        given = "shared=true" if config.shared else f"log_std={config.log_std:g}"
        raise ConfigError(f"model.{given} is for policies; the DQN family has none, so leave it out")
    if not isinstance(action_space, spaces.Discrete):
        raise ConfigError(f"the DQN family needs Discrete actions, got {action_space}; use sac, td3 or ppo")
    masked = bool(mask_parts(observation_space, action_space))
    seen = without_mask(observation_space) if masked else observation_space
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.MODEL))
        model = make_q_model(seen, action_space, kind.n_atoms, config, dueling, noisy)
    agent = QAgent(MaskedQ(model) if masked else model, kind, observation_space, action_space)
    agent.model_config = config
    return agent
