"""The queue keeps every slot busy until no run waits, and watches every process that it starts."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import wait
from pathlib import Path
from sys import platform

from rlframe.core.errors import counted, printable
from rlframe.study.plan import Run, Slot
from rlframe.study.record import (
    DONE,
    FAILED,
    FILE,
    INTERRUPTED,
    RUNNING,
    WAITING,
    Reader,
    Record,
    Status,
    can_resume,
    set_aside,
)
from rlframe.study.table import Display, Row, summary
from rlframe.system import parent_death
from rlframe.system.signals import StopRequest, stop_request

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


_LOOK_S = 0.5 if platform == "linux" else 0.1  # between looks at all runs; on Linux the end of one wakes us
_GRACE_S = 300.0  # for runs that were asked to stop to write their snapshots
_REFUSED = 2  # exit status of a command that was refused before it started: trying again is in vain


@dataclass(frozen=True)
class Options:
    """What a queue does when a run fails or says nothing."""

    retries: int = 0  # times that a failed run is started again, from its snapshot
    stall_s: float = 3600.0  # without a new line in its logs after which a run is taken for hung; 0: for ever


class Queue:
    """Runs what waits in a record, one process a slot, in the runs' order."""

    def __init__(
        self, runs: Sequence[Run], slots: Sequence[Slot], record: Record, display: Display, options: Options
    ) -> None:
        self._runs, self._record, self._display, self._options = runs, record, display, options
        self._waiting = deque(run for run in runs if record.statuses[run.name].state == WAITING)
        self._free = list(slots)
        self._active: list[Attempt] = []
        self._failures = dict.fromkeys((run.name for run in runs), 0)  # of this queue
        self._readers = {run.name: Reader(run.directory) for run in runs}
        self._shown_s = 0.0

    def run(self) -> int:
        """Start and watch runs until all have ended; a failure is recorded and stops no other run.

        The first SIGINT or SIGTERM asks all runs to write their snapshots, and waits for that. Returns the signal if it
        has left something to be done, else 0.

        Raises:
            Interrupted: by a second signal, which ends all at once.
        """
        with stop_request() as stop, self._leaving_nothing():
            while self._active or (self._waiting and not stop):
                if stop:
                    self._ask_to_stop(stop)
                else:
                    self._fill()
                wait([end for attempt in self._active for end in attempt.sentinels()], _LOOK_S)
                self._look()
                self._show()
        unfinished = any(status.state in (WAITING, INTERRUPTED) for status in self._record.statuses.values())
        return stop.signum if unfinished else 0

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        try:
            yield
        finally:
            for attempt in self._active:
                attempt.close()
                self._status(attempt.run).state = INTERRUPTED
            self._active.clear()
            self._save()
            self._show(last=True)

    def _status(self, run: Run) -> Status:
        return self._record.statuses[run.name]

    def _fill(self) -> None:
        """Start runs while there are slots for them."""
        while self._free and self._waiting:
            run, slot = self._waiting.popleft(), self._free.pop(0)
            status = self._status(run)
            status.state, status.slot, status.attempts = RUNNING, slot.index, status.attempts + 1
            status.reason = ""
            try:
                resume = can_resume(run)
                if not resume:
                    set_aside(run)
                self._active.append(Attempt(run, slot, resume))
            except OSError as error:
                self._free.insert(0, slot)
                self._end(run, FAILED, f"cannot be started: {error}")
                continue
            self._display.message(f"{run.name} {'goes on' if resume else 'starts'} on slot {slot.index}")
            self._save()

    def _look(self) -> None:
        """Take leave of the runs that have ended, and watch the others."""
        for attempt in list(self._active):
            if not attempt.ended():
                attempt.watch(self._options.stall_s)
                continue
            self._active.remove(attempt)
            self._free.append(attempt.slot)
            self._free.sort(key=lambda slot: slot.index)
            status = self._status(attempt.run)
            status.seconds = round(status.seconds + attempt.seconds(), 3)
            status.exit_status, reason = attempt.outcome()
            attempt.close()
            stopped = attempt.asked_to_stop and not attempt.reason
            if not reason and self._readers[attempt.run.name].read().fraction() < 1:  # as its own limit wants it
                stopped, reason = True, "its time is over; the same command goes on with it"
            self._end(attempt.run, INTERRUPTED if reason and stopped else FAILED if reason else DONE, reason)

    def _end(self, run: Run, state: str, reason: str) -> None:
        """Record an end, and queue the run again if it failed and may try again."""
        status = self._status(run)
        status.state, status.reason, status.has_directory = state, reason, run.directory.is_dir()
        if state == FAILED:
            self._failures[run.name] += 1
            left = self._options.retries - self._failures[run.name] + 1
            again = left > 0 and status.exit_status != _REFUSED
            self._display.message(
                f"{run.name} failed, {reason}" + (f"; it will be tried {counted(left, 'time')} more" if again else "")
            )
            if again:
                status.state = WAITING
                self._waiting.append(run)
        else:
            self._display.message(self._row(run).ended())
        self._save()

    def _save(self) -> None:
        """Keep the record; without it the runs go on all the same, and only what it says is out of date."""
        try:
            self._record.save()
        except OSError as error:
            self._display.message(f"{FILE} cannot be written: {error}")

    def _ask_to_stop(self, stop: StopRequest) -> None:
        asked = [attempt for attempt in self._active if not attempt.asked_to_stop]
        if asked:
            self._display.message(f"stopping: waiting for {counted(len(asked), 'snapshot')}; once more stops at once")
        for attempt in asked:
            attempt.interrupt(_GRACE_S)

    def _row(self, run: Run) -> Row:
        status = self._status(run)
        running = next((attempt.seconds() for attempt in self._active if attempt.run is run), 0.0)
        progress = self._readers[run.name].read()
        return Row(run.name, status.state, status.slot, status.seconds + running, status.reason, progress)

    def _show(self, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._shown_s >= self._display.interval_s:
            self._shown_s = now
            rows = [self._row(run) for run in self._runs]
            self._display.show(rows, summary(rows, len(self._free) + len(self._active)), last)
