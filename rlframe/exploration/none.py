"""No exploration: greedy actions, or those that random first steps take."""

from __future__ import annotations

from typing import Any

import chz
import numpy as np

from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import ExploreConfig, ExploreState, QExploration
from rlframe.exploration.stochastic import Stochastic


@chz.chz
class Config(ExploreConfig):
    """For the DQN family, DDPG, TD3 and SAC."""

    def make_q(self, n_actions: int, masked: bool) -> Greedy:
        return Greedy(n_actions, masked)

    def make_noise(self, size: int) -> NoNoise:
        return NoNoise(size)


class Greedy(QExploration):
    """The best action."""

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return ()

    def choose(
        self, q: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        return q.argmax(-1), state


class NoNoise(Stochastic):
    """The policy's mode."""

    samples = False
