"""Turns of an endless training: a framework's own loop is timed in its turns, and waits while others have theirs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from benchmarks.parts.turns import Contender, Ready


class Closed(BaseException):
    """Raised after the last turn, to end the training."""


class Gate:
    """The loop calls this between its iterations, and waits here, in a read, while others have their turns."""

    def __init__(self, connection: Connection, warm_up: int) -> None:
        """warm_up: env steps before the first turn."""
        self.connection, self.warm_up = connection, warm_up
        self.facts = ""  # set by the training: what it chose itself
        self._seconds = self._start = 0.0
        self._steps = 0

    def __call__(self, env_steps: int) -> None:
        """Report the env steps made since the start, whose updates are done.

        Raises:
            Closed: there is no other turn.
        """
        if not self._seconds:
            if env_steps >= self.warm_up:
                self._wait(env_steps, Ready(torch.get_num_threads(), self.facts))
            return
        passed = time.perf_counter() - self._start
        if passed >= self._seconds and env_steps > self._steps:
            self._wait(env_steps, (env_steps - self._steps) / passed)

    def _wait(self, env_steps: int, answer: Ready | float) -> None:
        self.connection.send(answer)
        self._seconds = self.connection.recv()
        if not self._seconds:
            raise Closed
        self._start, self._steps = time.perf_counter(), env_steps


Train = Callable[[Gate], None]  # trains without end, calling the gate


def serve(contender: Contender[Train], cores: list[int], connection: Connection) -> None:
    """A framework's process: train past the warm-up, then for one turn on each request."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(contender.n_threads)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # keep what frameworks print out of the table
    try:
        contender.make(Gate(connection, contender.warm_up))
    except Closed:
        return
    raise RuntimeError(f"{contender.name} ended its training by itself")
