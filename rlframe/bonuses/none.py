"""No bonus: algorithms learn from the environment's rewards alone."""

from __future__ import annotations

import chz
from gymnasium import Space

from rlframe.algos import Algorithm
from rlframe.bonuses.base import BonusConfig


@chz.chz
class Config(BonusConfig):
    """The default."""

    def add_to(
        self, algo: Algorithm, observation_space: Space, action_space: Space, n_steps: int, seed: int = 0
    ) -> Algorithm:
        return algo
