"""AdaptiveThreads: as many torch threads as there are free CPUs, because threads that wait for a CPU hold up all."""

from __future__ import annotations

import logging
import time

import torch

from rlframe.core.errors import pluralize
from rlframe.system.free_cpus import FreeCpus

_LOOK_S = 2.0  # between looks at the machine
_MARGIN = 0.25  # of a CPU that may be missing

_log = logging.getLogger("rlframe")


def keep_threads() -> None:
    """Leave torch's number of threads as it is."""


class AdaptiveThreads:
    """Sets torch's number of threads while a run learns; results may then differ in the last bits of a float.

    Every operation of several threads ends when the last of them is done. If other processes keep one from running,
    all wait: two runs with two threads each on two CPUs make an eighth of what they make with one each.
    """

    def __init__(self, most: int) -> None:
        """`most`: threads on a machine that does nothing else, at least 2."""
        self.most, self._free = most, FreeCpus()
        self._next_s = time.monotonic() + _LOOK_S
        self._wanted = most  # by the last look; followed if the next one agrees

    def __call__(self) -> None:
        """Look at the machine if it is time, and change the number of threads. Call it between batches."""
        if time.monotonic() < self._next_s:
            return
        free = self._free.look()
        self._next_s = time.monotonic() + _LOOK_S
        n, before = threads_for(free, self.most), self._wanted
        self._wanted = n
        if n == before and n != torch.get_num_threads():
            torch.set_num_threads(n)
            _log.info(
                f"{pluralize(n, 'torch thread')} from now on: other processes leave {free:.1f} of {self._free.n} CPUs "
                f"free; threads={self.most} keeps the number whatever else runs"
            )


def threads_for(free: float, most: int) -> int:
    """The number of threads for so many free CPUs: at least 1, at most `most`."""
    return max(1, min(most, int(free + _MARGIN)))
