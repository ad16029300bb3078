"""Meeting: threads of one process that run one at a time, and whose work is done at once where all have come to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Together = Callable[[Sequence[Any]], Sequence[Any]]  # from what each thread brings, None of those that left, to results


class NotTogether(Exception):
    """The other threads have come to other work, or this is the only one left: do it alone."""


@dataclass
class _Work:
    key: Any
    brought: Any
    together: Together


class Meeting:
    """`n` threads with a seat each, 0 to n - 1. One runs, until it comes to a `meet` or leaves; then the next does.

    So what they share, such as torch's generator and settings, needs no locks, and each run is reproducible.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._turns = [threading.Semaphore(0) for _ in range(n)]
        self._work: list[_Work | None] = [None] * n  # of those that wait in `meet`
        self._results: list[Any] = [None] * n
        self._living = set(range(n))
        self._turns[0].release()

    def begin(self, seat: int) -> None:
        """Wait for the first turn; the thread's first call."""
        self._turns[seat].acquire()

    def leave(self, seat: int) -> None:
        """End; the thread's last call. The others meet without it from now on."""
        self._living.discard(seat)
        self._pass_on(seat)

    def meet(self, seat: int, key: Any, brought: Any, together: Together) -> Any:
        """Wait until each thread is here; `together` then makes the result of each from what all have brought.

        Raises:
            NotTogether: the threads came with different keys.    Otherwise what `together` raises, in all of them.
        """
        self._work[seat] = _Work(key, brought, together)
        self._pass_on(seat)
        self._turns[seat].acquire()
        result, self._results[seat] = self._results[seat], None
        if isinstance(result, Exception):
            raise result
        return result

    def _pass_on(self, seat: int) -> None:
        """Give the turn to the next thread that does not wait; if all wait, do their work first."""
        if not self._living:
            return
        if all(self._work[each] for each in self._living):
            self._do_work()
        after = sorted(self._living, key=lambda each: (each - seat - 1) % self.n)
        self._turns[next(each for each in after if not self._work[each])].release()

    def _do_work(self) -> None:
        works = self._work
        self._work = [None] * self.n
        living = [(seat, work) for seat, work in enumerate(works) if work is not None]
        keys = [work.key for _, work in living]
        try:
            if any(key != keys[0] for key in keys):
                raise NotTogether
            results = living[0][1].together([work and work.brought for work in works])
        except Exception as error:
            results = [error] * self.n
        for seat, _ in living:
            self._results[seat] = results[seat]
