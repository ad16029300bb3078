"""Gaussian noise, uncorrelated in time (Fujimoto et al. 2018), on actions in [-1, 1]."""

from __future__ import annotations

from typing import Any

import chz
import numpy as np

from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import HIGHEST, ActionNoise, ExploreConfig, ExploreState, last


@chz.chz
class Config(ExploreConfig):
    """For DDPG, TD3 and SAC with Box actions."""

    std: Scheduled = scheduled(
        float("nan"), "standard deviation on actions in [-1, 1]; nan: the algorithm's", high=HIGHEST
    )
    std_last: Scheduled = last("standard deviation", high=HIGHEST)

    def make_noise(self, size: int) -> Gaussian:
        return Gaussian(size, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.std, self.std_last


class Gaussian(ActionNoise):
    """a + std ε,  ε ~ N(0, 1), clipped to [-1, 1]."""

    scale = "std"

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal((*lead, self.size), np.float32)

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        std = self.level_of(level, state, xp)
        return (action + (std[..., None] if self.graded else std) * noise).clip(-1, 1), state
