"""FreeCpus: how many of this process's CPUs other processes leave free, from the kernel's accounts."""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 100
_REFRESH = 10  # looks between searches for new children, which read every process of the machine
_BUSY = (0, 1, 2, 5, 6)  # columns of /proc/stat: user, nice, system, irq, softirq


class FreeCpus:
    """Compares the CPU time of all processes with that of this one and its children, since the last look."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        self._children: list[psutil.Process] = []
        self._n_looks = 0
        self._seen = self._times()

    @property
    def n(self) -> int:
        """The CPUs that this process may use."""
        return len(self._cpus) or os.cpu_count() or 1

    def look(self) -> float:
        """CPUs that were free for this process since the last look, from 0 to n; n where the system does not tell."""
        before, self._seen = self._seen, self._times()
        seconds, busy, own = (now - then for now, then in zip(self._seen, before, strict=True))
        if not self._cpus or seconds <= 0.0:
            return float(self.n)
        return min(float(self.n), max(0.0, self.n - max(0.0, busy - own) / seconds))

    def _times(self) -> tuple[float, float, float]:
        """Seconds: the clock, CPU time of all on our CPUs, CPU time of this process and its children."""
        return time.monotonic(), self._busy_s(), self._own_s()

    def _busy_s(self) -> float:
        if not self._cpus:
            return 0.0
        names = {f"cpu{cpu}" for cpu in self._cpus}
        lines = (line.split() for line in _STAT.read_text().splitlines())
        return sum(int(cells[1 + i]) for cells in lines if cells[0] in names for i in _BUSY) / _TICKS

    def _own_s(self) -> float:
        """CPU seconds of this process and of its children; those that have ended count through their parent."""
        me = psutil.Process()
        if self._n_looks % _REFRESH == 0:
            self._children = me.children(recursive=True)
        self._n_looks += 1
        total = sum(me.cpu_times()[:4])
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(child.cpu_times()[:4])
        return float(total)
