"""How long environments take: a worker's program that steps them under random actions and reads the clock."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlframe.core import spaces
from rlframe.core.struct import write
from rlframe.envs.rows import empty_rows
from rlframe.envs.worker import Site
from rlframe.system.worker_main import PROGRESS, Handler

_T = 64  # rows that are written over and over


def time_steps(site: Site) -> Handler:
    """Commands are milliseconds to step for; the answer is the mean seconds of a step of all environments."""
    envs, rng = site.envs, np.random.default_rng(0)
    rows = empty_rows(envs.observation_space, envs.action_space, _T, envs.n)
    actions, steps = rows.actions(), rows.steps()
    for action in actions:
        write(action, spaces.random_action(envs.action_space, rng, envs.n))
    envs.reset(steps[-1])

    def handle(command: int, argument: int) -> Any:
        n, start, deadline = 0, time.perf_counter(), time.perf_counter() + command / 1e3
        while n == 0 or time.perf_counter() < deadline:
            envs.step(actions[n % _T], steps[n % _T])
            n += 1
            site.parent.words[PROGRESS] = n  # a sign of life
        return (time.perf_counter() - start) / n

    return handle
