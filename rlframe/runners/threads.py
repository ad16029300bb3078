"""The CPUs and torch threads of a runner's process: of its affinity, and AdaptiveThreads, as many as CPUs are free."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, pluralize
from rlframe.system.affinity import Affinity, pin
from rlframe.system.free_cpus import FreeCpus

_LOOK_S = 2.0  # between looks at the machine
_MARGIN = 0.25  # of a CPU that may be missing
_READ = ("master_cpus", "torch_threads", "master_torch_threads", "set_affinity")  # of an affinity dict
_NOT_READ = ("all_cpus", "workers_cpus", "worker_torch_threads", "alternating", "cuda_idx")  # others of rlpyt's

_log = logging.getLogger("rlframe")


def keep_threads() -> None:
    """Leave torch's number of threads as it is."""


def apply_affinity(affinity: Affinity | Mapping[str, Any]) -> None:
    """Pin this process and set its number of torch threads, as in rlpyt's runners.

    Args:
        affinity: of `system.affinity.plan`; or a dict with any of master_cpus, torch_threads (rlpyt's name is
            master_torch_threads) and set_affinity=False, which leaves the process where it is. What rlpyt's dicts say
            of samplers and GPUs, such as workers_cpus, may stand in it and is not read.
    Raises:
        ConfigError: the dict has an unknown name, or a value of the wrong kind.
    """
    if isinstance(affinity, Affinity):
        cpus, threads = affinity.master, affinity.threads
    else:
        cpus, threads = _cpus_and_threads(affinity)
    pin(cpus)
    if threads:
        torch.set_num_threads(threads)


def _cpus_and_threads(affinity: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """CPUs, empty for no pinning, and torch threads, 0 for those there are, of a dict."""
    for name in affinity:
        if name not in (*_READ, *_NOT_READ):
            raise ConfigError(f"affinity has no {name!r}: a runner reads {', '.join(_READ)}{nearest(name, _READ)}")
    if "torch_threads" in affinity and "master_torch_threads" in affinity:
        raise ConfigError("affinity has torch_threads and master_torch_threads, which mean the same; leave one out")
    cpus, pins = affinity.get("master_cpus", ()), affinity.get("set_affinity", True)
    threads = affinity.get("torch_threads", affinity.get("master_torch_threads"))
    if not isinstance(cpus, Sequence) or isinstance(cpus, str) or not all(_is_int(cpu) and cpu >= 0 for cpu in cpus):
        raise ConfigError(f"affinity: master_cpus={cpus!r} must be a list of CPU numbers, such as [0, 1]")
    if not isinstance(pins, bool):
        raise ConfigError(f"affinity: set_affinity={pins!r} must be True or False")
    if threads is not None and not (_is_int(threads) and threads >= 1):
        raise ConfigError(f"affinity: torch_threads={threads!r} must be a whole number, at least 1")
    return tuple(cpus) if pins else (), threads or 0


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


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
