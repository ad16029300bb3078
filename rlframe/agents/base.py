"""Interface of agents: samplers call `step` and fill a NoiseBuffer, algorithms call what their agent adds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Struct, Tree, leaves, map_tree, writer, zeros_like
from rlframe.core.types import AgentInputs, AgentStep
from rlframe.data.cutting import Behaviour, as_acted
from rlframe.distributions import Distribution
from rlframe.models.base import Model


@dataclass(frozen=True, eq=False)
class AgentState(Struct):
    """State of an environment between its rows, of an agent that has both parts."""

    explore: Tree  # the exploration's state; () without one
    memory: Tree  # the model's state; () without memory


NumpyStep = Callable[[AgentInputs, Tree, Tree], AgentStep]
# From inputs [T, 1, ...] of an episode to parameters [T, ...], and the distribution that they are of.
Target = tuple[Callable[[AgentInputs], Tensor], Distribution]


class Agent(nn.Module, ABC):
    """Maps inputs, state and noise to actions. Parameters and the level of exploration are those of the module.

    A copy in another process has them as of its last `refresh`.
    """

    @abstractmethod
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        """Act for [B] rows, without gradient. Zero noise acts greedily."""

    def numpy_step(self, n: int) -> NumpyStep | None:
        """`step` for n NumPy rows on the CPU, with the current parameters; None if torch is faster."""
        return None

    @abstractmethod
    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        """Exploration noise of one environment, float32 NumPy [*lead, ...]."""

    @abstractmethod
    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        """State [B] of the environments with these global indices at their start; () without memory."""

    def parts_of(self, state: Tree) -> AgentState:
        """What of a state is the exploration's, and what the model's: all of one that is no AgentState."""
        return state if isinstance(state, AgentState) else AgentState((), state)

    def joined(self, parts: AgentState) -> Tree:
        """The state with these parts."""
        return parts.memory

    def greedy(self, inputs: AgentInputs, memory: Tree) -> tuple[Tree, Tree]:
        """Canonical actions [B, ...], those of `step` with zero noise, and the model's next state; to be exported.

        Raises:
            ConfigError: this agent does not say.
        """
        raise ConfigError(f"{type(self).__name__} has no method greedy, which says how it acts when it is exported")

    def behaviour(self, env: int = 0, ahead: bool = False) -> Behaviour:
        """What says of batches in NumPy how probable their actions were, acted by the agent as it explores now.

        Log-probabilities [T, B]; NaN or None if they are not known.

        Args:
            env: index over all ranks of a batch's first column.
            ahead: the batches come from a sampler that runs ahead, where it may have explored otherwise.
        """
        return as_acted

    def target(self, explore: bool) -> Target:
        """How its actions are distributed, at its exploration of now, for estimates of its worth.

        Args:
            explore: with its noise; else greedily.
        Raises:
            ConfigError: their probabilities are not known.
        """
        raise ConfigError(f"{type(self).__name__} must be a PolicyAgent, QAgent or ActorAgent to be estimated")

    model_config: Any = None  # a ModelConfig, to be recorded

    def holds(self, agent: Agent) -> bool:
        """Whether it is this agent, or has it among its policies."""
        return any(part is agent for part in self.modules())

    def no_noise(self, lead: tuple[int, ...]) -> Tree:
        """Noise [*lead, ...] of zeros, with which it acts greedily, in NumPy."""
        return zeros_like(self.noise(np.random.default_rng(0), ()), lead)

    def agents(self) -> dict[str, Agent]:
        """Of several policies, the agent of each by its name; of one policy, none."""
        return {}

    def observe(self, observation: Tree) -> None:
        """Update running statistics from observations [..., *obs]; called by the learner once per batch."""

    @contextmanager
    def exploring_at(self, epsilon: float) -> Iterator[None]:
        """Inside the `with` block, noise takes random actions at the rate `epsilon`; nan: at the agent's own.

        Raises:
            ConfigError: the agent does not explore by such a rate.
        """
        if not math.isnan(epsilon):
            raise ConfigError(
                f"epsilon={epsilon:g} is for agents that act at random at that rate (the DQN family with "
                f"explore=epsilon, noise_hold or noisy), and this {type(self).__name__} does not; leave epsilon out, "
                f"explore=true acts with the noise of training"
            )
        yield

    @property
    def recurrent(self) -> bool:
        """Whether the model has memory to carry from row to row."""
        return bool(leaves(self.initial_state([0])))

    @property
    def uses_previous(self) -> bool:
        """Whether a network of it reads the previous action, the reward or `first`: it has `uses_previous = True`."""
        return any(getattr(part, "uses_previous", False) for part in self.modules() if part is not self)


class ModelAgent(Agent):
    """An agent with one network, which may have memory."""

    model: Model

    def memory(self, n: int) -> Tree:
        """The model's state at the start of n episodes; () without memory."""
        return self.model.initial_state(n)

    @property
    def recurrent(self) -> bool:
        return bool(leaves(self.memory(1)))

    def observe(self, observation: Tree) -> None:
        self.model.observe(observation)


class NoiseBuffer:
    """A batch of noise [T, B, ...] in fixed memory; each column is drawn from its environment's generator."""

    def __init__(self, agent: Agent, T: int, B: int, rngs: Sequence[np.random.Generator]) -> None:
        """`rngs`: one generator per environment.    B: columns, at least len(rngs); the rest stay zero."""
        self.agent, self.T, self.rngs = agent, T, rngs
        self.arrays = agent.no_noise((T, B))
        self._write = [writer(map_tree(lambda x, env=env: x[:, env], self.arrays)) for env in range(len(rngs))]

    def draw(self) -> None:
        """Fill with the next T draws of every environment."""
        for write, rng in zip(self._write, self.rngs, strict=True):
            write(self.agent.noise(rng, (self.T,)))
