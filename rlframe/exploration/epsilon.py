"""Epsilon-greedy: a random action at a rate that is one for all, or spaced over environments (Horgan et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import chz
import numpy as np

from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.spaces import ACTION_MASK
from rlframe.core.struct import Struct
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import ExploreConfig, ExploreState, QExploration, last
from rlframe.models.masks import nth_allowed

_MANY = 1 << 31  # so large that the remainder of a uniform integer below it is uniform too


@chz.chz
class Config(ExploreConfig):
    """For the DQN family."""

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


def random_actions(of: QExploration, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
    """Uniform actions [*lead] int64; with masks, numbers for `nth_allowed`."""
    return (rng.random(lead) * (_MANY if of.masked else of.n_actions)).astype(np.int64)  # half the time of integers()
