"""Timers: the time that is spent in each part of the training loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter

PARTS = ("sampling", "learning", "evaluating", "recording")


class Timers:
    """Seconds per part of the training loop. Time in a nested part does not count for the outer one.

    Owned by a runner and started by construction. GPU work is asynchronous and counted where the loop waits for it.
    """

    def __init__(self, elapsed_s: float = 0.0) -> None:
        """`elapsed_s`: time before a resume."""
        self._start, self._before_s = perf_counter(), elapsed_s
        self._inner: list[float] = []  # seconds in nested parts, one entry per open part
        self.begin(0, 0)

    def __call__(self, part: str) -> AbstractContextManager[None]:
        """Count the time inside the `with` block for `part`."""
        return _TimedBlock(self, part)

    def elapsed_s(self) -> float:
        """Wall time of the run in seconds, everything included."""
        return self._before_s + perf_counter() - self._start

    def fractions(self) -> dict[str, float]:
        """`time/fraction_<part>` since the last `flush`; they sum to less than 1 if no part was active at times."""
        interval = max(perf_counter() - self._interval_start, 1e-9)
        return {f"time/fraction_{part}": seconds / interval for part, seconds in self._seconds.items()}

    def begin(self, env_steps: int, updates: int) -> None:
        """Start the first interval at these counters of a new or resumed run."""
        self._env_steps, self._updates = env_steps, updates
        self._interval_start = perf_counter()
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def flush(self, env_steps: int, updates: int) -> dict[str, float]:
        """The `time/` metrics of the interval that ends at these counters; starts the next interval."""
        training = max(perf_counter() - self._interval_start - self._seconds["evaluating"], 1e-9)
        row = {
            "time/elapsed_s": self.elapsed_s(),
            "time/env_steps_per_s": (env_steps - self._env_steps) / training,
            "time/updates_per_s": (updates - self._updates) / training,
            **self.fractions(),
        }
        self.begin(env_steps, updates)
        return row


class _TimedBlock(AbstractContextManager[None]):
    """Context manager of one timed block. A generator costs nearly twice as much; iterations may last microseconds."""

    __slots__ = ("clock", "name", "start")

    def __init__(self, clock: Timers, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.clock._inner.append(0.0)
        self.start = perf_counter()

    def __exit__(self, *error: object) -> None:
        duration, clock = perf_counter() - self.start, self.clock
        clock._seconds[self.name] = clock._seconds.get(self.name, 0.0) + duration - clock._inner.pop()
        if clock._inner:
            clock._inner[-1] += duration
