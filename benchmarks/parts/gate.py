"""Turns of a training that never ends: a framework's own loop is timed, and waits while others have theirs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from benchmarks.parts.turns import Contender, Ready


class Closed(BaseException):
    """The last turn is over: the training is to end."""


class Gate:
    """What the loop passes through between its iterations; there it waits, in a read, while others have their turns."""

    def __init__(self, connection: Connection, warm_up: int) -> None:
        """warm_up: env steps before the first turn."""
        self.connection, self.warm_up = connection, warm_up
        self.facts = ""  # for the training to set: what it chose itself
        self._seconds = self._start = 0.0
        self._steps = 0

    def __call__(self, env_steps: int) -> None:
        """The loop has made so many since its start, and whatever is to be learned from them.

        Raises:
            Closed: nobody wants another turn.
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


Train = Callable[[Gate], None]  # trains for ever, passing the gate


def serve(contender: Contender[Train], cores: list[int], connection: Connection) -> None:
    """A framework's process: trains beyond the warm-up, then for a turn whenever asked to."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(contender.n_threads)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what frameworks print is no part of the table
    try:
        contender.make(Gate(connection, contender.warm_up))
    except Closed:
        return
    raise RuntimeError(f"{contender.name} ended its training by itself")
