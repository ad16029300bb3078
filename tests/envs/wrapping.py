"""Wrappers and creators that tests of EnvOptions name."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Timed(gymnasium.Env):
    """Counts its steps, and observes something of them."""

    def __init__(self, observation_space: spaces.Space) -> None:
        self.observation_space, self.action_space, self.time = observation_space, spaces.Discrete(2), 0

    def _observe(self) -> np.ndarray:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}


class Endless(Timed):
    """Rewards `reward` forever; observes its time, and notes what it was told when it was made."""

    def __init__(
        self, reward: float = 3.0, env_index: int = -1, rank: int = -1, seed: int = -1, mode: str = ""
    ) -> None:
        super().__init__(spaces.Box(-np.inf, np.inf, (6,), np.float32))
        self.reward, self.told = reward, (env_index, rank, seed, mode == "eval", mode == "train")

    def _observe(self) -> np.ndarray:
        return np.array([self.time, *self.told], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._observe(), self.reward * (-1) ** self.time, False, False, {}


class Raises(Endless):
    """Raises in its third step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.time == 2:
            raise ValueError("the simulator diverged")
        return super().step(action)


class Pixels(Timed):
    """An image whose pixels are all the time, ending after `length` steps."""

    def __init__(self, shape: Any = (16, 12, 3), length: int = 4) -> None:
        super().__init__(spaces.Box(0, 255, tuple(shape), np.uint8))
        self.length = length

    def _observe(self) -> np.ndarray:
        return np.full(self.observation_space.shape, 10 * self.time + 1, np.uint8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._observe(), 1.0, self.time >= self.length, False, {}


class Plus(gymnasium.RewardWrapper):
    """Adds 1."""

    def reward(self, reward: Any) -> float:
        return float(reward) + 1


def times_ten(env: gymnasium.Env) -> gymnasium.Env:
    return gymnasium.wrappers.TransformReward(env, lambda reward: 10.0 * float(reward))


class Twice(gymnasium.Wrapper):
    """Two steps of the environment are one."""

    def step(self, action: Any) -> Any:
        *_, terminated, truncated, _ = one = self.env.step(action)
        return one if terminated or truncated else self.env.step(action)


def nothing(env: gymnasium.Env) -> None:
    return None


NUMBER = 3
