"""The policy's own sampling, without more: of PPO, A2C, PG, IMPALA, APPO and SAC."""

from __future__ import annotations

from typing import Any

import chz
import numpy as np

from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import ActionNoise, ExploreConfig, ExploreState


@chz.chz
class Config(ExploreConfig):
    """The policy's distribution decides everything."""

    def make_noise(self, size: int) -> Stochastic:
        return Stochastic(size)


class Stochastic(ActionNoise):
    """Nothing is added to the sampled actions."""

    changes = False

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return ()

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        return action, state
