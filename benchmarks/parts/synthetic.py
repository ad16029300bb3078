"""Work of a known cost: a loop that burns CPU time, and an environment that does so in every step. Without torch."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import gymnasium
import numpy as np

STEP_S = 200e-6  # of a step of `Burning`
SIZE, N_ACTIONS = 16, 4  # of its observations and actions
_VARIABLE = "RLFRAME_BENCHMARK_TURNS_PER_S"
_TRIES, _TOLERANCE = 50, 0.05  # for measuring the number of turns


def burn(n_turns: int) -> None:
    """Compute for this many turns of a plain loop."""
    for _ in range(n_turns):
        pass


def _seconds(n_turns: int) -> float:
    """The fastest of many tries, since other processes may have run during some."""
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        burn(n_turns)
        times.append(time.perf_counter() - start)
    return min(times)


def agree() -> None:
    """Measure the loop's speed once, for all processes started from here; each alone would measure another."""
    os.environ[_VARIABLE] = str(turns(STEP_S) / STEP_S)


@functools.cache
def turns(seconds: float) -> int:
    """How many turns of the loop take that long, by the agreed speed or else as measured in this process.

    Raises:
        RuntimeError: the speed changes too fast to be measured.
    """
    if _VARIABLE in os.environ:
        return round(float(os.environ[_VARIABLE]) * seconds)
    found = 10_000
    for _ in range(10):
        found = round(found * seconds / _seconds(found))
        if abs(_seconds(found) / seconds - 1) < _TOLERANCE:
            return found
    raise RuntimeError(f"no number of turns takes {seconds * 1e6:.0f} us twice; is this machine busy?")


SLOW_S = 0.02  # a step of a `Sleeping`


class Burning(gymnasium.Env):
    """A step takes `STEP_S`; nothing else happens, ever."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)
    action_space = gymnasium.spaces.Discrete(N_ACTIONS)

    def __init__(self) -> None:
        self._n_turns = turns(STEP_S)
        self._observation = np.zeros(SIZE, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return self._observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        burn(self._n_turns)
        return self._observation, 0.0, False, False, {}


class Sleeping(Burning):
    """A step takes `SLOW_S` more, in which the processor is free."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(SLOW_S)
        return super().step(action)


def uneven(env_index: int) -> Burning:
    """One of four sleeps."""
    return Sleeping() if env_index % 4 == 3 else Burning()
