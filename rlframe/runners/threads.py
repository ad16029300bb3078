"""The CPUs and torch threads of a runner's process: of its affinity, and AdaptiveThreads, as many as CPUs are free."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from rlframe.core.errors import pluralize
from rlframe.system.affinity import Affinity, pin
from rlframe.system.free_cpus import FreeCpus

_LOOK_S = 2.0  # between looks at the machine
_MARGIN = 0.25  # of a CPU that may be missing

_log = logging.getLogger("rlframe")


def keep_threads() -> None:
    """Leave torch's number of threads as it is."""


def apply_affinity(affinity: Affinity | Mapping[str, Any]) -> None:
    """Pin this process and set its number of torch threads, as in rlpyt's runners.

    Args:
        affinity: of `system.affinity.plan`; or a dict with any of master_cpus, torch_threads (also
            master_torch_threads) and set_affinity=False; other entries, such as workers_cpus, are for samplers.
    """
    if isinstance(affinity, Affinity):
        cpus, threads = affinity.master, affinity.threads
    else:
        cpus = tuple(affinity.get("master_cpus", ())) if affinity.get("set_affinity", True) else ()
        threads = int(affinity.get("torch_threads", affinity.get("master_torch_threads", 0)))
    pin(cpus)
    if threads:
        torch.set_num_threads(threads)


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
