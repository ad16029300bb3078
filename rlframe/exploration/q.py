"""Exploration by Q-values: epsilon-greedy, Boltzmann, noisy networks, held actions, none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch

from rlframe.core.field_effects import in_state
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.spaces import ACTION_MASK, nth_allowed
from rlframe.core.struct import Struct, Tree
from rlframe.core.types import AgentInputs, Array
from rlframe.distributions.categorical import gumbel
from rlframe.exploration.base import HIGHEST, ExploreConfig, ExploreState, QExploration, last

_TINY = 1e-30  # of a temperature
_MANY = 1 << 31  # so large that the remainder of a uniform integer below it is uniform too


@chz.chz
class EpsilonConfig(ExploreConfig):
    """Epsilon-greedy: a random action at a rate that is one for all, or spaced over environments (Horgan et al. 2018).

    For the DQN family.
    """

    IN_STATE = in_state("epsilon_last")

    epsilon: Scheduled = scheduled(float("nan"), "rate of random actions; nan: the algorithm's", high=1)
    epsilon_last: Scheduled = last("rate", high=1, default=float("nan"))

    def make_q(self, n_actions: int, masked: bool) -> Epsilon:
        return Epsilon(n_actions, masked, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.epsilon, self.epsilon_last


@dataclass(frozen=True, eq=False)
class EpsilonNoise(Struct):
    """Noise of a row; zeros act greedily."""

    uniform: Array  # [B] float32 in [0, 1)
    action: Array  # [B] int64, taken if uniform > 1 - epsilon; with masks, modulo the number of allowed actions


class Epsilon(QExploration):
    """With probability epsilon a random action, one that the mask allows."""

    scale = "epsilon"

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> EpsilonNoise:
        return EpsilonNoise(rng.random(lead, dtype=np.float32), random_actions(self, rng, lead))

    def choose(
        self, q: Array, inputs: AgentInputs, noise: EpsilonNoise, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        drawn = nth_allowed(inputs.observation[ACTION_MASK], noise.action) if self.masked else noise.action
        explores = noise.uniform > 1 - self.level_of(level, state, xp)
        return xp.where(explores, drawn, q.argmax(-1)), state

    def log_probabilities(self, q: Array, level: Array, xp: Any) -> Array | None:
        if self.kind == "noisy":  # weights were drawn too
            return None
        allowed, level = q > -math.inf, level[..., None]
        return _log(level * allowed / allowed.sum(-1).clip(1)[..., None] + (1 - level) * _is_best(q, xp), xp)


def _is_best(q: Array, xp: Any) -> Array:
    """[..., A] bool."""
    actions = np.arange(q.shape[-1])
    return q.argmax(-1)[..., None] == (actions if xp is np else torch.from_numpy(actions).to(q.device))


def _log(probability: Array, xp: Any) -> Array:
    with np.errstate(divide="ignore"):  # -inf of what cannot be
        return xp.log(1.0 * probability)


def random_actions(of: QExploration, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
    """Uniform actions [*lead] int64; with masks, numbers for `nth_allowed`."""
    return (rng.random(lead) * (_MANY if of.masked else of.n_actions)).astype(np.int64)  # half the time of integers()


@chz.chz
class BoltzmannConfig(ExploreConfig):
    """Boltzmann: actions in proportion to exp(Q / temperature) (Sutton & Barto 2018, section 2.8).

    For the DQN family.
    """

    IN_STATE = in_state("temperature_last")

    temperature: Scheduled = scheduled(1.0, "in units of Q-values; 0: greedy; 1e30: uniform", high=HIGHEST)
    temperature_last: Scheduled = last("temperature", high=HIGHEST)

    def make_q(self, n_actions: int, masked: bool) -> Boltzmann:
        return Boltzmann(n_actions, masked, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.temperature, self.temperature_last


class Boltzmann(QExploration):
    """argmax of Q + T g with Gumbel noise g, which is a sample of softmax(Q / T) (Gumbel 1954)."""

    scale = "temperature"

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
        return gumbel(rng, (*lead, self.n_actions))

    def choose(
        self, q: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        temperature = self.level_of(level, state, xp)
        return (q + (temperature[:, None] if self.graded else temperature) * noise).argmax(-1), state

    def log_probabilities(self, q: Array, level: Array, xp: Any) -> Array:
        level = level[..., None]
        above = (q - xp.amax(q, -1)[..., None]) / level.clip(_TINY)
        return xp.where(level > 0, above - xp.log(xp.exp(above).sum(-1))[..., None], _log(_is_best(q, xp), xp))


@chz.chz
class NoisyConfig(EpsilonConfig):
    """Noisy networks (Fortunato et al. 2018): the head's weights carry learned noise; random actions if asked for.

    For the DQN family; both networks draw new noise at every update.
    """

    epsilon: Scheduled = scheduled(0.0, "rate of random actions besides", high=1)
    epsilon_last: Scheduled = last("rate", high=1)

    @property
    def noisy_layers(self) -> bool:
        return True


class Greedy(QExploration):
    """The best action."""

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return ()

    def choose(
        self, q: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        return q.argmax(-1), state

    def log_probabilities(self, q: Array, level: Array, xp: Any) -> Array:
        return _log(_is_best(q, xp), xp)


class Durations:
    """Whole numbers k from 1 to `longest` with p(k) in proportion to k^-mu."""

    def __init__(self, mu: float, longest: int) -> None:
        weights = np.arange(1, longest + 1, dtype=np.float64) ** -mu
        self.cumulative = np.cumsum(weights / weights.sum())

    def draw(self, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
        """[*lead] int64."""
        return 1 + np.searchsorted(self.cumulative[:-1], rng.random(lead), side="right")


@dataclass(frozen=True, eq=False)
class HoldState(Struct):
    """What an environment keeps doing."""

    held: Array  # [B] int64 an action, or [B, size] float32 noise
    left: Array  # [B] int64 steps to come


@dataclass(frozen=True, eq=False)
class HeldActionNoise(Struct):
    """Noise of a row; zeros act greedily, whatever is held."""

    uniform: Array  # [B] float32 in [0, 1)
    action: Array  # [B] int64, as in EpsilonNoise
    duration: Array  # [B] int64, at least 1


class HeldAction(QExploration):
    """With probability epsilon, while none is held, a random action that is then held; a forbidden one is let go."""

    scale = "epsilon"

    def __init__(self, n_actions: int, masked: bool, durations: Durations, graded: bool = False) -> None:
        """`durations`: of a hold, in steps."""
        super().__init__(n_actions, masked, graded)
        self.durations = durations

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> HeldActionNoise:
        uniform, action = rng.random(lead, dtype=np.float32), random_actions(self, rng, lead)
        return HeldActionNoise(uniform, action, self.durations.draw(rng, lead))

    def own_state(self, n: int) -> HoldState:
        return HoldState(torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64))

    def choose(
        self, q: Array, inputs: AgentInputs, noise: HeldActionNoise, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        held, left = state.own.held, state.own.left * ~inputs.first
        holds, drawn = left > 0, noise.action
        if self.masked:
            places = xp.ones_like(q).cumsum(-1) - 1
            holds = holds & ((places == held[:, None]) & (q > -math.inf)).any(-1)
            drawn = nth_allowed(inputs.observation[ACTION_MASK], drawn)
        begins = ~holds & (noise.uniform > 1 - self.level_of(level, state, xp))
        held = xp.where(begins, drawn, held)
        left = xp.where(begins, noise.duration, left * holds) - 1
        acts = (begins | holds) & (noise.duration > 0)
        return xp.where(acts, held, q.argmax(-1)), ExploreState(state.env, HoldState(held, left.clip(0, None)))
