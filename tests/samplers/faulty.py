"""Environments that fail for real, for the tests of worker processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_SEEDS = 2**20  # Coded observes a seed's remainder over this, which float32 holds exactly


class Unpicklable(Exception):
    """Cannot be unpickled: its constructor needs two arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_in_python() -> None:
    while True:
        time.sleep(0.05)


def hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(1000)  # which holds the interpreter


def start_program() -> None:
    subprocess.Popen(["sleep", "1000"])  # which nobody ends


SLOW_S = 4.0


def be_slow() -> None:
    time.sleep(SLOW_S)


def leave_at_once() -> None:
    os._exit(3)


def leave() -> None:
    sys.exit(4)


def abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def diverge() -> None:
    raise ValueError("the simulator diverged")


def fail_oddly() -> None:
    raise Unpicklable(1, 2)


def be_cancelled() -> None:
    raise asyncio.CancelledError("the simulator's task")  # which is no Exception


def lose_connection() -> None:
    raise ConnectionResetError("the simulator's server is gone")


@dataclass(frozen=True)
class Fault:
    """Fail in the `at`th call of method `when`: call a function above, or return the invalid value of this name."""

    what: Callable[[], None] | str
    when: str = "step"  # or reset, or constructor
    at: int = 1
    seed: int = -1  # of the environment it happens in, other than its constructor; -1: any
    path: str = ""  # marks what has happened: only `times` times in all; without it always
    times: int = 1

    def is_due(self, when: str, call: int, seed: int) -> bool:
        """Whether to fail in this call; if so, records it in `path`."""
        if (when, call) != (self.when, self.at) or self.seed not in (-1, seed):
            return False
        return not self.path or count(self.path) < self.times


def count(path: str) -> int:
    """The number of earlier calls with `path` by any process; writes the time into `path.<n>`."""
    number = 0
    while True:
        try:
            with open(f"{path}.{number}", "x") as file:
                file.write(str(time.time()))
            return number
        except FileExistsError:
            number += 1


def counted_at(path: str) -> float:
    """The wall-clock time of the first call of `count`."""
    return float(Path(f"{path}.0").read_text())


def invalid_values(observation: np.ndarray, reward: float) -> dict[str, tuple[Any, Any]]:
    """Invalid observations and rewards by name."""
    nan = np.full_like(observation, np.nan)
    return {
        "nan": (nan, reward),
        "nan_reward": (observation, float("nan")),
        "shape": (observation[:2], reward),
        "dtype": (observation.astype(np.complex64), reward),
    }


class Coded(gymnasium.Env):
    """Observes [seed, episode, step, last action], so that every row shows its origin; the reward is the step.

    Episode k ends at step `length_of(length, k)`, in turn by termination and by truncation.
    """

    def __init__(self, length: int = 4, faults: tuple[Fault, ...] = (), pace_s: float = 0.0) -> None:
        self.observation_space = spaces.Box(-1.0, 2.0**31, (4,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.length, self.faults, self.pace_s = length, faults, pace_s
        self.seed, self.episode, self.time = -1, -1, -1
        self.calls = {"step": 0, "reset": 0, "constructor": 0}
        self._perhaps_fail("constructor")

    def _perhaps_fail(self, when: str) -> str:
        """Fail if a fault is due; returns the name of an invalid value for `step`."""
        self.calls[when] += 1
        for fault in self.faults:
            if fault.is_due(when, self.calls[when], self.seed):
                if isinstance(fault.what, str):
                    return fault.what
                fault.what()
        return ""

    def _observation(self, action: int) -> np.ndarray:
        return np.array([self.seed % _SEEDS / _SEEDS, self.episode, self.time, action], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed = self.seed if self.seed >= 0 or seed is None else seed  # that of its first episode
        self._perhaps_fail("reset")
        self.episode, self.time = self.episode + 1, 0
        return self._observation(-1), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.time >= 0, "reset comes first"
        if self.pace_s:
            time.sleep(self.pace_s)
        invalid = self._perhaps_fail("step")
        self.time += 1
        over, ends = self.time >= length_of(self.length, self.episode), self.episode % 2 == 0
        observation, reward = self._observation(action), float(self.time)
        if invalid:
            observation, reward = invalid_values(observation, reward)[invalid]
        return observation, reward, over and ends, over and not ends, {"episode": self.episode}


class HangsAfter(Coded):
    """Once a file exists, no more of it are made."""

    def __init__(self, path: str = "", faults: tuple[Fault, ...] = ()) -> None:
        if os.path.exists(path):
            hang_in_python()
        super().__init__(faults=faults)


def length_of(length: int, episode: int) -> int:
    """The number of steps of an episode of Coded."""
    return length + episode % 3


class Small(gymnasium.Env):
    """Episodes of 5 steps with reward 1."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(6), spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return 0, {}

    def step(self, action: int) -> Any:
        self.time += 1
        return self.time, 1.0, self.time == 5, False, self.info()

    def info(self) -> dict[str, Any]:
        """The `info` of each step."""
        return {}


class Modules(Small):
    """Reports whether its process has imported torch, and its resident memory."""

    def info(self) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"torch": "torch" in sys.modules, "rss_mb": pages * resource.getpagesize() / 1e6}


class Threaded(Small):
    """Steps in a thread of its own, with locks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.asked.acquire()
            self.answered.release()

    def step(self, action: int) -> Any:
        self.asked.release()
        self.answered.acquire()
        return super().step(action)


class Closing(Small):
    """Calls a function when it is closed."""

    def __init__(self, what: Callable[[], None]) -> None:
        super().__init__()
        self.what = what

    def close(self) -> None:
        self.what()


class Talkative(Small):
    """Prints a lot, and reports 20,000 numbers per episode."""

    def step(self, action: int) -> Any:
        print("x" * 20_000)
        return super().step(action)

    def info(self) -> dict[str, Any]:
        return {f"{number} of many": float(number) for number in range(20_000)} if self.time == 5 else {}


class Different(Small):
    """Has another action space in the second process; `path` counts the processes."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if count(path) == 1:
            self.action_space = spaces.Discrete(7)
