"""The cost of a worker that only steps: seconds until it is ready, and its memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import psutil

from benchmarks.parts.turns import Line, line
from rlframe.envs import EnvConfig
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.stepper import worker_steppers
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.system.process import START_METHODS
from rlframe.system.service import Supervision
from rlframe.system.shared import share_zeros

ENV = "CartPole-v1"
READY_S, RESIDENT_MB = 1.0, 60.0  # at most
_BARE = f"""
import sys, numpy, gymnasium
env = gymnasium.make({ENV!r})
env.reset(seed=0)
env.step(0)
print("ready", flush=True)
sys.stdin.read()
"""


def megabytes(pid: int) -> tuple[float, float]:
    """Resident memory of a process, and the part of it that is not shared."""
    found = psutil.Process(pid).memory_full_info()
    return found.rss / 1e6, found.uss / 1e6


def bare_environment() -> tuple[float, float]:
    """The memory of a process with NumPy, Gymnasium and an environment that has stepped."""
    with subprocess.Popen([sys.executable, "-c", _BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = megabytes(process.pid)
        process.communicate()
    return found


def one_worker(method: str) -> tuple[float, float, float]:
    """Seconds until a worker is ready to step, and its memory after a batch."""
    start = time.perf_counter()
    with closing(WorkerPool(EnvConfig(ENV), 1, [0], 1, (), Supervision(start_method=method))) as workers:
        rows = share_zeros(empty_rows(workers.observation_space, workers.action_space, 128, 1), "rows")
        (stepper,) = worker_steppers(workers, rows, 1)
        ready = time.perf_counter() - start
        stepper.reset()
        for t in range(128):
            stepper.start_step(t)
            stepper.finish_step(t)
        return ready, *megabytes(workers.workers[0].child.pid)


def _facts(n_rounds: int, measure: Callable[[], tuple[float, ...]]) -> list[list[float]]:
    return [list(column) for column in zip(*(measure() for _ in range(n_rounds)), strict=True)]


def facts(group: str, n_rounds: int) -> list[Line]:
    """The facts of the second worker, for each start method; only the first one starts the fork server."""
    resident, private = _facts(n_rounds, bare_environment)
    found = [
        line(group, "bare environment: resident", resident, "MB"),
        line(group, "bare environment: private", private, "MB"),
    ]
    bare, bare_private = found[0].median, found[1].median
    for method in START_METHODS:
        one_worker(method)
        ready, resident, private = _facts(n_rounds, partial(one_worker, method))
        found += [
            line(group, f"{method}: ready after", ready, "s", READY_S),
            line(group, f"{method}: resident, beyond the bare", [x - bare for x in resident], "MB", RESIDENT_MB),
            line(group, f"{method}: private, beyond the bare", [x - bare_private for x in private], "MB"),
        ]
    return found
