"""Samples of a stochastic policy whose noise is kept for some steps (FlashSAC, Kim et al. 2026, arXiv 2604.04539)."""

from __future__ import annotations

from typing import Any

import chz

from rlframe.core.config import count, number
from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.actions import HeldNoise
from rlframe.exploration.base import Evaluated, ExploreConfig, ExploreState
from rlframe.exploration.q import Durations


@chz.chz
class SampleHoldConfig(ExploreConfig):
    """The policy's own sampling, whose noise is kept for k steps, k from a truncated zeta distribution. Of SAC.

    p(k) is in proportion to k^-mu; the defaults are FlashSAC's. Losses see the policy's distribution, as without it.
    """

    mu: float = number(2.0, "exponent of the zeta distribution; large: one step")
    longest: int = count(16, "most steps that a draw is kept; 1: one step", high=10**6)

    def make_noise(self, size: int) -> HeldSample:
        if not size:
            raise ConfigError("algo.explore=sample_hold is for Box actions; use stochastic")
        return HeldSample(size, Durations(self.mu, self.longest))


class HeldSample(HeldNoise):
    """a = tanh(μ + σ ε),  ε ~ N(0, 1) kept for k steps, at most to the end of an episode."""

    changes = samples = False
    scale = ""  # σ is the policy's

    def evaluate(
        self, network: Any, inputs: AgentInputs, sampled: Tree, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> Evaluated:
        return network(inputs.observation), *self.held(inputs, noise, state, xp)
