"""One process of a run, as the queue sees it: its start on a slot, its signs of life, its end."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from rlframe.core.errors import printable
from rlframe.study.plan import Run
from rlframe.study.slots import Slot
from rlframe.system import parent_death

_STACK_S = 2.0  # for a run that hangs to write its stack
_CLOSE_S = 10.0  # for a killed process to be gone
_TAIL_BYTES = 1 << 12


class Attempt:
    """A process with a session and process group of its own, pinned to its slot; it cannot outlive us.

    Owned by the queue, which looks at it, ends it, and closes it.
    """

    def __init__(self, run: Run, slot: Slot, resume: bool) -> None:
        """Start the run, or go on with it; all it prints is appended to `run.log`.

        Raises:
            OSError: the log cannot be written, or the system has no more processes.
        """
        self.run, self.slot = run, slot
        self.reason = ""  # why we ended it; empty: we did not
        self.asked_to_stop = False
        self._start_s = self._sign_s = time.monotonic()
        self._kill_s = math.inf  # when it is killed, if it has not ended
        command = [*(run.again if resume else run.command), f"affinity={slot.code}"]
        run.log.parent.mkdir(parents=True, exist_ok=True)
        line, ours = os.pipe()
        self._descriptors = [ours]  # the run's leash
        try:
            with run.log.open("ab") as log:
                log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} slot {slot.index}: {shlex.join(command)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", parent_death.__file__, str(line), _cpus(slot), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                    pass_fds=(line,),
                )
            self.pid = self._process.pid
            self._descriptors += [os.pidfd_open(self.pid)] if sys.platform == "linux" else []
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(line)
        self._files = (run.log, run.directory / "progress.csv", run.directory / "debug.log")
        self._signs = self._look()

    def sentinels(self) -> list[int]:
        """Descriptors that can be read once it has ended, where the system has such."""
        return self._descriptors[1:]

    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._start_s

    def ended(self) -> bool:
        """Whether the process is gone; what it has left in its process group goes too."""
        if self._process.poll() is None:
            return False
        self._kill_group()
        return True

    def outcome(self) -> tuple[int, str]:
        """Of one that has ended: its exit status, negative for a signal, and why it failed; empty if it did not."""
        status = int(self._process.returncode)
        if status == 0 and not self.reason:
            return 0, ""
        said = last_line(self.run.log)
        how = f"exit status {status}" if status >= 0 else f"killed by {_signal_name(-status)}"
        return status, self.reason or (f"{how}: {said}" if said else how)

    def watch(self, stall_s: float) -> None:
        """Take a run without a new line in its logs for `stall_s` (0: for ever) for hung, and end it; never waits."""
        now, signs = time.monotonic(), self._look()
        if signs != self._signs:
            self._signs, self._sign_s = signs, now
        if stall_s and not self.reason and now - self._sign_s >= stall_s:
            self.reason = f"hung: no new line in its logs for {stall_s:g} s; {self.run.log.name} shows where it stood"
            self._send(signal.SIGABRT)  # Python's fault handler writes the stacks of its threads
            self._kill_s = now + _STACK_S
        if now >= self._kill_s:
            self._kill_group()

    def interrupt(self, grace_s: float) -> None:
        """Ask it to write its snapshot and end, within `grace_s`; its own processes are its own affair."""
        self.asked_to_stop = True
        self._send(signal.SIGINT)
        self._kill_s = min(self._kill_s, time.monotonic() + grace_s)

    def close(self) -> None:
        """Leave nothing of it: kill what still runs, and let go."""
        if self._process.poll() is None:
            self._kill_group()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be killed while the system is at its work
                self._process.wait(_CLOSE_S)
        self._let_go()

    def _let_go(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _look(self) -> tuple[tuple[int, int], ...]:
        return tuple(_size_and_time(path) for path in self._files)

    def _send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _cpus(slot: Slot) -> str:
    return ",".join(map(str, slot.affinity.master)) or "-"


def _environment() -> dict[str, str]:
    """Ours; lines come when they are printed, a crash shows its stack, and affinity codes speak of our CPUs."""
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ}
    if sys.platform == "linux":
        environment.setdefault(parent_death.QUEUE_CPUS, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    return environment


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_size, status.st_mtime_ns)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def last_line(path: Path) -> str:
    """The last line of a text that is not empty, shortened."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip() and not line.startswith("--- ")]
    return printable(said[-1][:300]) if said else ""
