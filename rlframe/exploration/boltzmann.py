"""Boltzmann exploration: actions in proportion to exp(Q / temperature) (Sutton & Barto 2018, section 2.8)."""

from __future__ import annotations

from typing import Any

import chz
import numpy as np

from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, Array
from rlframe.distributions.categorical import gumbel
from rlframe.exploration.base import HIGHEST, ExploreConfig, ExploreState, QExploration, last


@chz.chz
class Config(ExploreConfig):
    """For the DQN family."""

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
