"""Waking another process and waiting for it: the hot spot of stepping in workers (see benchmarks/handover.py)."""

from __future__ import annotations

import os
from multiprocessing.context import BaseContext
from time import perf_counter
from typing import Any

_TRIES = 10  # with a yield of the core in between, before sleeping
_SLOW_YIELD_S = 1e-3  # a yield that takes as long has given the core to somebody who keeps it
_REST = 1000  # waits without tries after that


class Signal:
    """A semaphore whose waiter yields its core a few times before it sleeps; picklable into a child that is started.

    On an idle core ten yields take 6 us, and spare the 25 to 30 that sleeping and waking cost on a virtual machine:
    what a step of two workers takes beyond their work falls from 73 us to 15, and the CPU time burnt falls too. Where
    others compute on the core, each yield would cost a slice of their time: so after a slow one it sleeps at once, for
    the next thousand waits.
    """

    def __init__(self, context: BaseContext) -> None:
        self._semaphore: Any = context.Semaphore(0)
        self._resting = 0

    def post(self) -> None:
        """Let one wait end, now or later. What was written before is seen after it."""
        self._semaphore.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it was posted within the time (None: for ever)."""
        take = self._semaphore.acquire
        if self._resting:
            self._resting -= 1
            return take(True, timeout_s)
        for _ in range(_TRIES):
            if take(False):
                return True
            start = perf_counter()
            os.sched_yield()
            if perf_counter() - start > _SLOW_YIELD_S:
                self._resting = _REST
                break
        return take(True, timeout_s)
