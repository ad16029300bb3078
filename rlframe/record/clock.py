"""Where the time goes: seconds per part of the loop, and the throughput that follows, evaluation excluded."""

from contextlib import AbstractContextManager
from time import perf_counter

PARTS = ("sampling", "learning", "evaluating", "recording")


class Clock:
    """Owned by a runner; runs from its construction on. Parts may nest: an inner part's time is not the outer's.

    On a GPU, work is queued, so its time shows where the loop waits for it.
    """

    def __init__(self, elapsed_s: float = 0.0, excluded: tuple[str, ...] = ("evaluating",)) -> None:
        """`elapsed_s`: what earlier stretches of a resumed run took. `excluded` parts do not count in throughput."""
        self._excluded = excluded
        self._start = self._interval_start = perf_counter()
        self._before_s = elapsed_s
        self._seconds = dict.fromkeys(PARTS, 0.0)  # of this interval
        self._inner: list[float] = []  # seconds of nested parts, one entry an open part
        self._env_steps, self._updates = 0, 0

    def __call__(self, part: str) -> AbstractContextManager[None]:
        """Count the time inside as `part`'s."""
        return _Part(self, part)

    def enter(self) -> None:
        """A part begins."""
        self._inner.append(0.0)

    def leave(self, part: str, duration: float) -> None:
        """The part that began last ends, after `duration` seconds."""
        self._seconds[part] = self._seconds.get(part, 0.0) + duration - self._inner.pop()
        if self._inner:
            self._inner[-1] += duration

    def elapsed_s(self) -> float:
        """Wall time of the run so far, everything included."""
        return self._before_s + perf_counter() - self._start

    def seconds(self) -> dict[str, float]:
        """Seconds per part since the last `flush`."""
        return dict(self._seconds)

    def fractions(self) -> dict[str, float]:
        """`time/fraction_<part>` since the last `flush`; what no part claimed is missing from their sum."""
        interval = max(perf_counter() - self._interval_start, 1e-9)
        return {f"time/fraction_{part}": seconds / interval for part, seconds in self._seconds.items()}

    def begin(self, env_steps: int, updates: int) -> None:
        """Start the first interval here, at the counters of a new or resumed run."""
        self._env_steps, self._updates = env_steps, updates
        self._interval_start = perf_counter()
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def flush(self, env_steps: int, updates: int) -> dict[str, float]:
        """The `time/` metrics of the interval that ends here, at these counters; the next one begins."""
        excluded = sum(self._seconds.get(part, 0.0) for part in self._excluded)
        training = max(perf_counter() - self._interval_start - excluded, 1e-9)
        row = {
            "time/elapsed_s": self.elapsed_s(),
            "time/env_steps_per_s": (env_steps - self._env_steps) / training,
            "time/updates_per_s": (updates - self._updates) / training,
            **self.fractions(),
        }
        self.begin(env_steps, updates)
        return row


class _Part(AbstractContextManager[None]):
    """One stretch of a part; a generator's would cost nearly twice as much, and iterations may last microseconds."""

    __slots__ = ("clock", "name", "start")

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.clock.enter()
        self.start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.clock.leave(self.name, perf_counter() - self.start)
