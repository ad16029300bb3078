"""Ornstein-Uhlenbeck noise, correlated in time (Lillicrap et al. 2016, section 3), on actions in [-1, 1]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch
from torch import Tensor

from rlframe.core.config import fraction
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Struct
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import HIGHEST, ActionNoise, ExploreConfig, ExploreState, last


@chz.chz
class Config(ExploreConfig):
    """Defaults are the paper's (section 7). For DDPG, TD3 and SAC with Box actions."""

    sigma: Scheduled = scheduled(0.2, "standard deviation of a step of the noise", high=HIGHEST)
    sigma_last: Scheduled = last("standard deviation", high=HIGHEST)
    theta: float = fraction(0.15, "part of the noise that is forgotten a step; 1: uncorrelated")

    def make_noise(self, size: int) -> OrnsteinUhlenbeck:
        return OrnsteinUhlenbeck(size, self.theta, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.sigma, self.sigma_last


@dataclass(frozen=True, eq=False)
class WalkNoise(Struct):
    """Noise of a row; zeros act greedily."""

    step: Array  # [B, size] float32, standard normal
    active: Array  # [B, 1] float32, ones


class OrnsteinUhlenbeck(ActionNoise):
    """a + σ x,  x <- (1 - θ) x + ε,  ε ~ N(0, 1), clipped to [-1, 1]; x is 0 at the start of an episode."""

    scale = "sigma"

    def __init__(self, size: int, theta: float, graded: bool = False) -> None:
        """`theta`: part of x that is forgotten a step."""
        super().__init__(size, graded)
        self.theta = theta

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> WalkNoise:
        return WalkNoise(rng.standard_normal((*lead, self.size), np.float32), np.ones((*lead, 1), np.float32))

    def own_state(self, n: int) -> Tensor:
        return torch.zeros(n, self.size)

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: WalkNoise, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        x = (1 - self.theta) * (state.own * ~inputs.first[:, None]) + noise.step
        sigma = self.level_of(level, state, xp)
        offset = (sigma[:, None] if self.graded else sigma) * x * noise.active
        return (action + offset).clip(-1, 1), ExploreState(state.env, x)
