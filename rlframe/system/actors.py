"""Actors: supervised actors of Ray that another replaces when one dies or takes too long."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from typing import Any

from rlframe.core.errors import ReadableError
from rlframe.system.cluster import imported
from rlframe.system.service import RestartBudget

CALL_S = 600.0  # to make environments, a sampler or a replay

_log = logging.getLogger("rlframe")


class Actors(ABC):
    """Actors that do the same kind of work for this process. Those left end with it, or when it forgets them."""

    def __init__(self, part: str, restarts: RestartBudget, renewal: str) -> None:
        """`part`: the setting that wants them, for messages.    `renewal`: what follows a death, for the log."""
        self.ray, self.restarts = imported(), restarts
        self._part, self._renewal = part, renewal
        self.actors: list[Any] = []
        self.early: list[int] = []  # deaths of each in a row without finished work

    @abstractmethod
    def launch(self, i: int) -> Any:
        """Start actor i and give it, in its first calls, what it needs before it can work."""

    def start(self, n: int) -> None:
        """Start the first n."""
        self.early = [0] * n
        self.actors = [self.launch(i) for i in range(n)]

    def get(self, reference: Any, timeout_s: float = CALL_S) -> Any:
        """The value of a reference; raises the error of the actor's work as it was, and Ray's own."""
        try:
            return self.ray.get(reference, timeout=timeout_s)
        except self.ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, ReadableError) else error) from None

    def replace(self, i: int, error: Exception) -> None:
        """Start another actor; raises WorkersFailed if too many have died."""
        with contextlib.suppress(Exception):
            self.ray.kill(self.actors[i])
        self.early[i] += 1
        what = f"actor {i} of {self._part}: {type(error).__name__}"
        self.restarts.record_death(what, self.early[i])
        _log.warning(f"{what}; {self._renewal} (restart {self.restarts.n})")
        self.actors[i] = self.launch(i)

    @property
    def deaths(self) -> tuple[type[Exception], ...]:
        """The errors of an actor that has died or takes too long."""
        found = self.ray.exceptions
        died = found.RayActorError, found.WorkerCrashedError, found.NodeDiedError
        killed = found.OutOfMemoryError  # by Ray, which is none of its RayActorErrors
        return *died, killed, found.ObjectLostError, found.GetTimeoutError

    def close(self) -> None:
        """End the actors. May be called twice."""
        for actor in self.actors:
            with contextlib.suppress(Exception):
                self.ray.kill(actor)
        self.actors = []
