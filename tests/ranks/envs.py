"""Environments that fail in one rank only, one of pictures, and one of growing rewards."""

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


class Pictures(gymnasium.Env):
    """Random pictures of 36 x 36 pixels; the reward is the action."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, 36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._picture(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._picture(), float(action), self.np_random.random() < 0.1, False, {}

    def _picture(self) -> np.ndarray:
        return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)


class Growing(gymnasium.Env):
    """Each reward is larger than those before, and so are errors and priorities."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    n = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.random(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.n += 1
        return self.np_random.random(2, np.float32), 0.01 * self.n, self.n % 10 == 0, False, {}
