"""Service: a supervised process that another replaces when it dies; its deadline, and how often that may happen.

Environment workers (`rollout.worker_pool`), the process of a BackgroundSampler and that of an evaluation are services.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

from rlframe.core.errors import ConfigError, ReadableError
from rlframe.system.process import ChildDied, ChildHung

_WINDOW_S = 3600.0
_MAX_EARLY_DEATHS = 5  # deaths in a row of one process before it finished anything
_BACK_OFF_S = 0.1  # before the second early restart in a row; doubled each time

_log = logging.getLogger("rlframe")


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

    def record_death(self, what: str, n_early: int) -> None:
        """Count a death, the `n_early`th in a row before any work; waits before the second of those, and longer later.

        Raises:
            WorkersFailed: too many have died; its message begins with `what`.
        """
        self.n += 1
        now = time.monotonic()
        self._recent.append(now)
        while self._recent[0] < now - _WINDOW_S:
            self._recent.popleft()
        if n_early >= _MAX_EARLY_DEATHS:
            raise WorkersFailed(f"{what}; it died {n_early} times in a row without finishing {self._unit}")
        if (n := len(self._recent)) > self._max_restarts:
            deaths, limit = f"{n} deaths of {self._processes}", f"{self._field}={self._max_restarts}"
            raise WorkersFailed(f"{what}; that makes {deaths} within an hour, more than {limit}")
        if n_early > 1:
            time.sleep(_BACK_OFF_S * 2.0 ** (n_early - 2))


class Service(ABC):
    """A process that works for this one, and that another replaces when it dies or hangs.

    A subclass starts one and makes it ready. `child` is a ChildProcess, or anything else with its methods.
    """

    def __init__(self, name: str, restarts: RestartBudget, remedy: str, place: str = "") -> None:
        """Args:
        restarts: may be shared by several services.    place: what it has, for messages, after its process id.
        remedy: what to do if it was merely slow and was taken for hung.
        """
        self.name, self.restarts, self._remedy, self._place = name, restarts, remedy, place
        self.deaths_in_a_row = 0  # without finished work in between
        self.child: Any = None  # after `start`

    @abstractmethod
    def launch(self) -> Any:
        """Start a process."""

    @abstractmethod
    def make_ready(self) -> None:
        """Give a new process what it needs before it can work, and wait for it. May raise ChildDied."""

    @abstractmethod
    def renew(self) -> str:
        """Prepare for the next process after a death. Returns what it will do, for the log."""

    def died_early(self) -> bool:
        """Whether the process died before it finished anything."""
        return True

    def start(self) -> None:
        """Start the first process; it is not ready yet."""
        self.child = self.launch()

    def replace(self, death: ChildDied) -> None:
        """Start other processes until one is ready. Raises WorkersFailed if too many have died."""
        while True:
            self._end(death)
            self.start()
            try:
                self.make_ready()
            except ChildDied as another:
                death = another
            else:
                return

    def _end(self, death: ChildDied) -> None:
        """Clean up after a process that died."""
        self.deaths_in_a_row = self.deaths_in_a_row + 1 if self.died_early() else 0
        what = f"{self.name} (process {self.child.pid}{self._place}) {death}"
        if isinstance(death, ChildHung):
            what += f"\n{self._remedy}"
        self.child.close(0.0)
        self.restarts.record_death(what, self.deaths_in_a_row)
        _log.warning(f"{what}; {self.renew()} (restart {self.restarts.n})")
