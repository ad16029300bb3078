"""Supervision of worker processes: their deadline, how often they may be restarted, and the error beyond that.

Used by `rollout.worker_pool` for environment workers and by `samplers.background` for the sampler process.
"""

import time
from collections import deque
from dataclasses import dataclass

from rlframe.core.errors import ConfigError, ReadableError

_WINDOW_S = 3600.0
_MAX_EARLY_DEATHS = 5  # deaths in a row of one process before it finished anything
_BACK_OFF_S = 0.1  # before the second early restart in a row; doubled each time


class WorkersFailed(ReadableError):
    """Too many worker restarts."""


@dataclass(frozen=True)
class Supervision:
    """How worker processes are watched and restarted. Raises ConfigError for a value out of range."""

    timeout_s: float = 60.0  # a worker without progress for this long is killed as hung
    max_restarts: int = 100  # of all workers together, within an hour
    start_method: str = "forkserver"  # or spawn
    name: str = "worker"  # prefix of each worker's name in the log
    fresh_seeds: bool = True  # for the environments of a worker that replaces another

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.max_restarts < 0:
            raise ConfigError(
                f"sampler.timeout_s={self.timeout_s} must be above 0, and "
                f"sampler.max_restarts={self.max_restarts} at least 0"
            )


class RestartBudget:
    """Counts restarts. `n` is their number since the start."""

    def __init__(self, max_restarts: int, field: str, processes: str, unit: str) -> None:
        """Args:
        max_restarts: within an hour.    field: the setting of this limit, for the error message.
        processes: their name in the plural.    unit: the smallest piece of work that each should finish.
        """
        self.n = 0
        self._max_restarts, self._field, self._processes, self._unit = max_restarts, field, processes, unit
        self._recent: deque[float] = deque()  # times of the deaths within the window

    def record_death(self, n_early: int) -> str:
        """Count a death, the `n_early`th in a row before any work; returns the reason not to restart, or ""."""
        self.n += 1
        now = time.monotonic()
        self._recent.append(now)
        while self._recent[0] < now - _WINDOW_S:
            self._recent.popleft()
        if n_early >= _MAX_EARLY_DEATHS:
            return f"it died {n_early} times in a row without finishing {self._unit}"
        if len(self._recent) > self._max_restarts:
            n, limit = len(self._recent), f"{self._field}={self._max_restarts}"
            return f"that makes {n} deaths of {self._processes} within an hour, more than {limit}"
        return ""

    def back_off(self, n_early: int) -> None:
        if n_early > 1:
            time.sleep(_BACK_OFF_S * 2.0 ** (n_early - 2))
