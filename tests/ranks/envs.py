"""Environments that fail in one rank only."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rlframe.core.ranks import current_ranks


class FaultyOnOne(gymnasium.Env):
    """Raises in its 40th step in rank 1; does nothing else."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, at: int = 40) -> None:
        self.at, self.n = at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.n += 1
        if self.n == self.at and current_ranks().rank == 1:
            raise RuntimeError("it is broken here")
        return np.zeros(2, np.float32), 0.0, self.n % 10 == 0, False, {}
