"""Temporally-Extended Epsilon-Greedy Exploration. Dabney, Ostrovski, Barreto, 2021. ICLR, arXiv 2006.01782.

A random action, or a draw of Gaussian noise on the actions of a policy, is kept for k steps, k from a truncated zeta
distribution: p(k) in proportion to k^-mu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch

from rlframe.core.config import count, number
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.spaces import ACTION_MASK
from rlframe.core.struct import Struct
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import HIGHEST, ActionNoise, ExploreConfig, ExploreState, QExploration, last
from rlframe.exploration.epsilon import random_actions
from rlframe.models.masks import nth_allowed


@chz.chz
class Config(ExploreConfig):
    """`epsilon` is for the DQN family, `std` for DDPG, TD3 and SAC. Defaults of k are the paper's (section 4)."""

    epsilon: Scheduled = scheduled(math.nan, "rate at which a random action begins; nan: the algorithm's", high=1)
    epsilon_last: Scheduled = last("rate", high=1, default=math.nan)
    std: Scheduled = scheduled(math.nan, "standard deviation on actions in [-1, 1]; nan: the algorithm's", high=HIGHEST)
    std_last: Scheduled = last("standard deviation", high=HIGHEST)
    mu: float = number(2.0, "exponent of the zeta distribution; large: one step")
    longest: int = count(10_000, "most steps that a draw is kept; 1: one step", high=10**6)

    def make_q(self, n_actions: int, masked: bool) -> HeldAction:
        return HeldAction(n_actions, masked, Durations(self.mu, self.longest), self.graded)

    def make_noise(self, size: int) -> HeldNoise:
        return HeldNoise(size, Durations(self.mu, self.longest), self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        of_noise = isinstance(self.epsilon, float) and math.isnan(self.epsilon)
        return (self.std, self.std_last) if of_noise else (self.epsilon, self.epsilon_last)


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


@dataclass(frozen=True, eq=False)
class HeldNormal(Struct):
    """Noise of a row; zeros act greedily, whatever is held."""

    normal: Array  # [B, size] float32
    duration: Array  # [B] int64, at least 1


class HeldNoise(ActionNoise):
    """a + std ε,  ε ~ N(0, 1) kept for k steps, clipped to [-1, 1]."""

    scale = "std"

    def __init__(self, size: int, durations: Durations, graded: bool = False) -> None:
        """`durations`: of a draw, in steps."""
        super().__init__(size, graded)
        self.durations = durations

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> HeldNormal:
        normal = rng.standard_normal((*lead, self.size), np.float32)
        return HeldNormal(normal, self.durations.draw(rng, lead))

    def own_state(self, n: int) -> HoldState:
        return HoldState(torch.zeros(n, self.size), torch.zeros(n, dtype=torch.int64))

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: HeldNormal, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        left = state.own.left * ~inputs.first
        held = xp.where(left[:, None] > 0, state.own.held, noise.normal)
        left = xp.where(left > 0, left, noise.duration) - 1
        std = self.level_of(level, state, xp)
        offset = (std[:, None] if self.graded else std) * held * (noise.duration[:, None] > 0)
        return (action + offset).clip(-1, 1), ExploreState(state.env, HoldState(held, left.clip(0, None)))
