"""Environments whose state can be saved in different ways, or not at all."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, NormalizeReward, RescaleAction, TimeLimit


class Walk(gymnasium.Env):
    """A random walk with np_random; observes its place and the sum of the last three places."""

    def __init__(self, length: int = 7) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.length, self.time, self.place = length, 0, 0.0
        self.before: deque[float] = deque([0.0], maxlen=3)

    def observe(self) -> np.ndarray:
        return np.array([self.place, sum(self.before)], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.place = 0, float(self.np_random.normal())
        self.before.clear()
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.before.append(self.place)
        self.time, self.place = self.time + 1, self.place + (2 * int(action) - 1) * float(self.np_random.normal())
        return self.observe(), self.place, self.time >= self.length, False, {"place": self.place}


class Pictures(Walk):
    """Shows its place as a gray image, so that the agent acts with torch instead of NumPy."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        self.observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def observe(self) -> np.ndarray:
        return np.full((36, 36, 1), int(100 + 20 * self.place) % 256, np.uint8)


class Hidden:
    """An object that cannot be saved as plain data."""

    def __init__(self) -> None:
        self.value, self.rest = 0.0, iter(())


class Level:
    """An object whose state is in its attributes."""

    def __init__(self) -> None:
        self.episodes, self.mean = 0, np.zeros(2)


class Levels(Walk):
    """Rewards by the number of episodes so far, which an object of another class counts, and two of them know."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        self.level = self.same_level = Level()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.level.episodes += 1
        self.level.mean += 0.5
        return super().reset(seed=seed, options=options)

    def observe(self) -> np.ndarray:
        assert self.level is self.same_level
        return super().observe() + np.float32(self.level.episodes + self.level.mean[0])


class Late(Levels):
    """Its object is another class's in the middle of an episode."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.time == 3:
            self.level = self.same_level = Higher(self.level)
        return super().step(action)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.level = self.same_level = Level()
        return super().reset(seed=seed, options=options)


class Higher(Level):
    """Of Late."""

    def __init__(self, level: Level) -> None:
        self.episodes, self.mean = level.episodes + 1, level.mean


SUNNY, RAINY = Level(), Level()
RAINY.episodes = 5


class Shared(Walk):
    """One of two objects that all environments share, by turns."""

    weather = SUNNY

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.weather = SUNNY
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.weather = RAINY if self.time % 2 else SUNNY
        return super().step(action)

    def observe(self) -> np.ndarray:
        assert (SUNNY.episodes, RAINY.episodes) == (0, 5)
        return super().observe() + np.float32(self.weather.episodes)


def normalizing(length: int = 7) -> gymnasium.Env:
    """Gymnasium's running statistics are objects of a wrapper's."""
    return NormalizeReward(NormalizeObservation(Walk(length)))


class Opaque(Walk):
    """Keeps a part of its state in an object of another class."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        self.inner = Hidden()

    def observe(self) -> np.ndarray:
        return super().observe() + np.float32(self.inner.value)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.inner.value = 0.0
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.inner.value += int(action)
        return super().step(action)


class Pushing(Walk):
    """Counts its steps in a list, by a method of the list."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        self.steps: list[int] = []
        self.push = self.steps.append

    def observe(self) -> np.ndarray:
        return super().observe() + len(self.steps)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps.clear()
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.push(1)
        return super().step(action)


def counter() -> Any:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


class Counting(Walk):
    """Counts its observations in a variable of a function around another."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        self.count = counter()

    def observe(self) -> np.ndarray:
        return super().observe() + self.count()


class Slotted(Walk):
    """Keeps a part of its state in a slot."""

    __slots__ = ("n",)

    def observe(self) -> np.ndarray:
        self.n = getattr(self, "n", 0) + 1
        return super().observe() + self.n

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.n = 0
        return super().reset(**kwargs)


class Drawing(Walk):
    """Draws from a set, whose order follows from what was in it before."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        self.free: set[int] = set()

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.free = set(range(0, 7_000, 7))
        return super().reset(**kwargs)

    def observe(self) -> np.ndarray:
        for _ in range(200 if len(self.free) > 300 else 1):
            self.free.discard(found := list(self.free)[int(self.np_random.integers(len(self.free)))])
        return super().observe() + found


class Unrepeatable(Opaque):
    """Its observations depend on more than the episode's seed and actions."""

    n_made = 0

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        Unrepeatable.n_made += 1
        self.number = Unrepeatable.n_made

    def observe(self) -> np.ndarray:
        return super().observe() + np.float32(self.number)


class Telling(Opaque):
    """Has get_state and set_state, which do not include its generator."""

    n_told = 0

    def get_state(self) -> dict[str, Any]:
        Telling.n_told += 1
        return {"time": self.time, "place": self.place, "before": list(self.before), "inner": self.inner.value}

    def set_state(self, state: dict[str, Any]) -> None:
        self.time, self.place, self.inner.value = state["time"], state["place"], state["inner"]
        self.before = deque(state["before"], maxlen=3)


class LifeIsAll(gymnasium.Wrapper):
    """A lost life ends the episode."""

    lives = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        self.lives = info["lives"]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        lost, self.lives = info["lives"] < self.lives, info["lives"]
        return observation, reward, terminated or lost, truncated, info


def atari(game: str = "Breakout", sticky: float = 0.25, max_episode_steps: int = 40) -> gymnasium.Env:
    """A game in wrappers: lives, stacked frames, a time limit."""
    options: dict[str, Any] = {"obs_type": "grayscale", "repeat_action_probability": sticky}
    env: Any = gymnasium.make(f"ALE/{game}-v5", disable_env_checker=True, **options)
    return TimeLimit(FrameStackObservation(LifeIsAll(env), 4), max_episode_steps)


def rescaled() -> gymnasium.Env:
    """Pendulum with a wrapper that keeps functions."""
    return RescaleAction(gymnasium.make("Pendulum-v1", disable_env_checker=True), np.float32(-1), np.float32(1))
