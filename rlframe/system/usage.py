"""What a run uses: memory and CPU time of its process and of the processes that it has started."""

import contextlib
import time

import psutil


class Usage:
    """Measures between two calls of `metrics`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._seconds: dict[int, float] = {}  # CPU time of each process so far
        self._measured_at = time.monotonic()
        self.metrics()

    def metrics(self) -> dict[str, float]:
        """Resident memory in MB, shared pages counted in each process, and CPUs used since the last call."""
        resident: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has exited meanwhile
                times = process.cpu_times()
                resident[process.pid] = process.memory_info().rss
                seconds[process.pid] = times.user + times.system
        before, self._seconds = self._seconds, seconds
        start, self._measured_at = self._measured_at, time.monotonic()
        used = sum(now - before.get(pid, 0.0) for pid, now in seconds.items())
        return {
            "memory/resident_mb": sum(resident.values()) / 1e6,
            "memory/main_mb": resident.get(self._process.pid, 0) / 1e6,
            "system/cpus_used": used / max(self._measured_at - start, 1e-9),
            "system/cpus_busy": psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1),
        }
