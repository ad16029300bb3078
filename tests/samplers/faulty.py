"""Environments with real faults, for the tests of worker processes: which, when, where and how often is told."""

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


class Odd(Exception):
    """Cannot be unpickled: its constructor asks for more than its message."""

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


def be_slow() -> None:
    time.sleep(1.3)


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
    raise Odd(1, 2)


def be_cancelled() -> None:
    raise asyncio.CancelledError("the simulator's task")  # which is no Exception


def lose_connection() -> None:
    raise ConnectionResetError("the simulator's server is gone")


@dataclass(frozen=True)
class Fault:
    """One of the functions above, or the name of a misfit, in the `at`th call of an environment's method `when`."""

    what: Callable[[], None] | str
    when: str = "step"  # or reset, or constructor
    at: int = 1
    seed: int = -1  # of the environment it happens in, other than its constructor; -1: any
    path: str = ""  # marks what has happened: only `times` times in all; without it always
    times: int = 1

    def is_due(self, when: str, call: int, seed: int) -> bool:
        """Whether it happens in this call; marks that it did, and the time."""
        if (when, call) != (self.when, self.at) or self.seed not in (-1, seed):
            return False
        return not self.path or count(self.path) < self.times


def count(path: str) -> int:
    """How often this has been called with `path`, by all processes; leaves a file `path.<n>` with the time."""
    number = 0
    while True:
        try:
            with open(f"{path}.{number}", "x") as file:
                file.write(str(time.time()))
            return number
        except FileExistsError:
            number += 1


def counted_at(path: str) -> float:
    """When `count` was first called, by the wall clock."""
    return float(Path(f"{path}.0").read_text())


def misfits(observation: np.ndarray, reward: float) -> dict[str, tuple[Any, Any]]:
    """What an environment may return that its spaces forbid, by name."""
    nan = np.full_like(observation, np.nan)
    return {
        "nan": (nan, reward),
        "nan_reward": (observation, float("nan")),
        "shape": (observation[:2], reward),
        "dtype": (observation.astype(np.float64), reward),
    }


class Coded(gymnasium.Env):
    """Observed is where the observation comes from: [seed, episode, step, action before]; the reward is the step.

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
        """Fail as told; the name of a misfit that `step` is to return."""
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
        misfit = self._perhaps_fail("step")
        self.time += 1
        over, ends = self.time >= length_of(self.length, self.episode), self.episode % 2 == 0
        observation, reward = self._observation(action), float(self.time)
        if misfit:
            observation, reward = misfits(observation, reward)[misfit]
        return observation, reward, over and ends, over and not ends, {"episode": self.episode}


def length_of(length: int, episode: int) -> int:
    """Steps of an episode of Coded."""
    return length + episode % 3


class Small(gymnasium.Env):
    """Episodes of 5 steps in which nothing happens."""

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
        """What it reports at each step."""
        return {}


class Modules(Small):
    """Reports whether its process has torch loaded, and the size of the process."""

    def info(self) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"torch": "torch" in sys.modules, "rss_mb": pages * resource.getpagesize() / 1e6}


class Threaded(Small):
    """Has a thread and a lock, through which each step goes."""

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
    """Does something when it is closed."""

    def __init__(self, what: Callable[[], None]) -> None:
        super().__init__()
        self.what = what

    def close(self) -> None:
        self.what()


class Talkative(Small):
    """Writes much to its standard output, and reports numbers by the thousand."""

    def step(self, action: int) -> Any:
        print("x" * 20_000)
        return super().step(action)

    def info(self) -> dict[str, Any]:
        return {f"{number} of many": float(number) for number in range(20_000)} if self.time == 5 else {}


class Different(Small):
    """Has a space of its own in the second of all processes; `path` counts them."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if count(path) == 1:
            self.action_space = spaces.Discrete(7)
