"""The CPUs and torch threads of a runner's process: of its affinity, and AdaptiveThreads, as many as run at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, pluralize
from rlframe.kernels.device import restoring_threads
from rlframe.system.affinity import Affinity, pin

_LOOK_S = 2.0  # between looks at the machine
_READ = ("master_cpus", "torch_threads", "master_torch_threads", "set_affinity")  # of an affinity dict
_NOT_READ = ("all_cpus", "workers_cpus", "worker_torch_threads", "alternating", "cuda_idx")  # others of rlpyt's
_MOST_DELAY = 1.75  # of an operation of n threads, in times of one; 1.0 to 1.1 alone, 2.2 and more beside others
_HELD_S = 30.0  # with more threads, after which the next failure counts as the first
_MOST_WAIT = 16  # looks

_REPEATS, _ROWS_A_THREAD = 20, 1 << 15  # the least that torch gives a thread
_GAP_S = 1e-4  # between operations; idle threads sleep, as between those of an update

_log = logging.getLogger("rlframe")


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


class ThreadChoice:
    """Chooses a number of threads by how long an operation of that many is delayed, in times of one thread's.

    Every operation of several threads ends when the last of them is done. If another process keeps one from running,
    all wait: two runs with two threads each on two CPUs make an eighth of what they make with one each. One thread
    waits for none, so this halves the number at once where operations are delayed, and doubles it after looks without
    a delay: two, and twice as many each time that more threads did not hold.
    """

    def __init__(self, most: int, delay: Callable[[int], float], clock: Callable[[], float]) -> None:
        """Args:
        most: threads on a machine that does nothing else, at least 2.
        delay: measures an operation of n threads: its time over that of one thread with one part.
        clock: seconds.
        """
        self.n = self.most = most
        self._delay, self._clock = delay, clock
        self._raised_s = clock()
        self._wait = 1  # looks without a delay, in sequence, that more threads need
        self._good = 0  # such looks so far

    def look(self) -> int:
        """Measure, and return the number of threads to use until the next look."""
        if self.n > 1 and all(self._delay(self.n) > _MOST_DELAY for _ in range(2)):  # one alone may be chance
            self._lower()
        elif self.n < self.most:
            self._raise(min(2 * self.n, self.most))
        return self.n

    def _lower(self) -> None:
        held = self._clock() - self._raised_s >= _HELD_S
        self._wait, self._good = 2 if held else min(2 * self._wait, _MOST_WAIT), 0
        self.n //= 2
        while self.n > 1 and self._delay(self.n) > _MOST_DELAY:
            self.n //= 2

    def _raise(self, more: int) -> None:
        self._good = self._good + 1 if self._delay(more) <= _MOST_DELAY else 0
        if self._good == self._wait:
            self.n, self._raised_s, self._good = more, self._clock(), 0


class AdaptiveThreads:
    """Sets torch's number of threads while a run learns; results may then differ in the last bits of a float.

    Looking takes 8 ms in 2 s. A look itself changes no result.
    """

    def __init__(self, most: int) -> None:
        """`most`: threads on a machine that does nothing else, at least 2."""
        self._choice, self._next_s = ThreadChoice(most, measure_delay, time.monotonic), 0.0

    def __call__(self) -> None:
        """Measure if it is time, and change the number of threads. Call it between operations of a run."""
        if time.monotonic() < self._next_s:
            return
        before, n = self._choice.n, self._choice.look()
        self._next_s = time.monotonic() + _LOOK_S
        if n != before:
            torch.set_num_threads(n)
            why = "other processes delay the work of more" if n < before else "other processes leave them time to run"
            _log.info(
                f"{pluralize(n, 'torch thread')} from now on: {why}; threads={self._choice.most} keeps the number "
                f"whatever else runs"
            )


@torch.inference_mode()
@restoring_threads()
def measure_delay(n: int) -> float:
    """The mean time of an operation of n threads over that of one thread with one part of it.

    Of one thread it is the shortest time, as others delay that too. Ends early where the delay is certain.
    """
    alone = min(_seconds(1, _REPEATS // 4))
    times: list[float] = []
    for seconds in _seconds(n, 1 + _REPEATS):
        times.append(seconds)
        if sum(times[1:]) > _REPEATS * alone * 2 * _MOST_DELAY:
            break
    return sum(times[1:]) / len(times[1:]) / alone  # the first starts threads and touches memory


def _seconds(n: int, repeats: int) -> Iterator[float]:
    """The times of operations of n threads, each after a gap in which one thread computes."""
    torch.set_num_threads(n)
    x = torch.full((n * _ROWS_A_THREAD,), 0.5, dtype=torch.float32, device="cpu")
    result = torch.empty_like(x)
    for _ in range(repeats):
        begin = time.perf_counter()
        while time.perf_counter() < begin + _GAP_S:
            pass
        begin = time.perf_counter()
        torch.digamma(x, out=result)
        yield time.perf_counter() - begin
