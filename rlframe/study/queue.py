"""The queue of a study: one process per slot; kills hung runs, retries failed ones and records them all."""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import wait
from pathlib import Path

from rlframe.core.errors import ConfigError, pluralize, printable
from rlframe.core.files import make_own
from rlframe.record.snapshot import list_snapshots
from rlframe.study.plan import Run, Slot
from rlframe.study.record import (
    DONE,
    FAILED,
    FILE,
    INTERRUPTED,
    RUNNING,
    WAITING,
    ProgressReader,
    Status,
    StudyRecord,
    move_aside,
    size_and_time,
)
from rlframe.study.table import Row, StatusTable, summary
from rlframe.system import parent_death
from rlframe.system.signals import stop_request

_POLL_S = 0.5 if sys.platform == "linux" else 0.1  # between polls; on Linux the end of a process wakes the queue
_STACK_S = 2.0  # time for a hung run to write its stack
_CLOSE_S = 10.0  # time for a killed process to disappear
_SNAPSHOT_S = 300.0  # time for interrupted runs to write their snapshots
_REFUSED = 2  # exit status of a command with a wrong configuration; a retry would fail again
_TAIL_BYTES = 1 << 12


@dataclass(frozen=True)
class Options:
    """What a queue does with runs that fail or hang."""

    retries: int = 0  # times a failed run is started again, from its snapshot
    stall_s: float = 3600.0  # seconds without a new line in its logs until a run counts as hung; 0: never


class RunProcess:
    """One attempt of a run: a process in its own session, pinned to its slot, killed when this process dies."""

    def __init__(self, run: Run, slot: Slot, resume: bool) -> None:
        """Start or resume the run; its output is appended to `run.log`. Raises OSError or ConfigError if that fails."""
        self.run, self.slot = run, slot
        self.kill_reason = ""  # why the queue killed it; empty if it did not
        self.interrupted = False
        self._start_s = self._changed_s = time.monotonic()
        self._kill_s = math.inf  # when to kill it
        command = [*(run.resume_command if resume else run.command), f"affinity={slot.code}"]
        cpus = ",".join(map(str, slot.affinity.master)) or "-"
        for folder in (run.directory, run.log.parent if run.setting else run.directory):
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link; a study writes only into its own folders")
        run.log.parent.mkdir(parents=True, exist_ok=True)
        make_own(run.log)
        child_end, own_end = os.pipe()
        self._descriptors = [own_end]  # the child is killed when this end closes (see parent_death)
        try:
            with run.log.open("ab") as log:
                log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} slot {slot.index}: {shlex.join(command)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", parent_death.__file__, str(child_end), cpus, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                    pass_fds=(child_end,),
                )
            self.pid = self._process.pid
            self._descriptors += [os.pidfd_open(self.pid)] if sys.platform == "linux" else []
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            os.close(child_end)
        self._logs = (run.log, run.directory / "progress.csv", run.directory / "debug.log")
        self._log_stats = self._stat_logs()

    def sentinels(self) -> list[int]:
        """Descriptors that become readable when the process ends; none if the system has no pidfd."""
        return self._descriptors[1:]

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def ended(self) -> bool:
        """Whether the process has ended; if so, kill the rest of its process group."""
        if self._process.poll() is None:
            return False
        self._kill_group()
        return True

    def result(self) -> tuple[int, str]:
        """Exit status (negative for a signal) and reason of the failure (empty if none) of an ended process."""
        status = int(self._process.returncode)
        if status == 0 and not self.kill_reason:
            return 0, ""
        output = last_line(self.run.log)
        cause = f"exit status {status}" if status >= 0 else f"killed by signal {-status}, {signal.strsignal(-status)}"
        return status, self.kill_reason or (f"{cause}: {output}" if output else cause)

    def check_hung(self, stall_s: float) -> None:
        """Kill the run if its logs have no new line for `stall_s` (0: never). Does not wait."""
        now, stats = time.monotonic(), self._stat_logs()
        if stats != self._log_stats:
            self._log_stats, self._changed_s = stats, now
        if stall_s and not self.kill_reason and now - self._changed_s >= stall_s:
            self.kill_reason = f"hung: no new line in its logs for {stall_s:g} s; {self.run.log.name} has its stack"
            self._send(signal.SIGABRT)  # Python's fault handler writes the stacks of all threads
            self._kill_s = now + _STACK_S
        if now >= self._kill_s:
            self._kill_group()

    def interrupt(self, grace_s: float) -> None:
        """Ask the run to write a snapshot and end; kill it after `grace_s`."""
        self.interrupted = True
        self._send(signal.SIGINT)  # the run stops its own workers
        self._kill_s = min(self._kill_s, time.monotonic() + grace_s)

    def close(self) -> None:
        """Kill the process group if it still runs, and release all resources."""
        if self._process.poll() is None:
            self._kill_group()
            with contextlib.suppress(subprocess.TimeoutExpired):  # not killable while it waits in the kernel
                self._process.wait(_CLOSE_S)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _stat_logs(self) -> list[tuple[int, int]]:
        return [size_and_time(path) for path in self._logs]

    def _send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """This process's, with unbuffered output, stacks on a crash, and the CPUs that affinity codes refer to."""
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ}
    if sys.platform == "linux":
        environment.setdefault(parent_death.QUEUE_CPUS, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    return environment


def last_line(path: Path) -> str:
    """The last non-empty line of a log, at most 300 characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    output = [line.strip() for line in lines if line.strip() and not line.startswith("--- ")]
    return printable(output[-1][:300]) if output else ""


class Queue:
    """Runs the waiting runs of a record in order, one process per slot."""

    def __init__(
        self, runs: Sequence[Run], slots: Sequence[Slot], record: StudyRecord, table: StatusTable, options: Options
    ) -> None:
        self._runs, self._record, self._table, self._options = runs, record, table, options
        self._waiting = deque(run for run in runs if record.statuses[run.name].state == WAITING)
        self._free = list(slots)
        self._active: list[RunProcess] = []
        self._failures = dict.fromkeys((run.name for run in runs), 0)  # of this queue
        self._readers = {run.name: ProgressReader(run.directory) for run in runs}
        self._shown_s = 0.0

    def run(self) -> int:
        """Process all runs; returns 0, or the number of the signal that left runs unfinished.

        The first SIGINT or SIGTERM asks the active runs to write their snapshots and waits for them. A second one kills
        them and raises Interrupted.
        """
        with stop_request() as stop:
            try:
                while self._active or (self._waiting and not stop):
                    if stop:
                        self._interrupt_runs()
                    else:
                        self._start_runs()
                    wait([fd for process in self._active for fd in process.sentinels()], _POLL_S)
                    self._collect_finished()
                    self._show()
            finally:
                for process in self._active:
                    process.close()
                    self._status(process.run).state = INTERRUPTED
                self._active.clear()
                self._save()
                self._show(last=True)
        unfinished = any(status.state in (WAITING, INTERRUPTED) for status in self._record.statuses.values())
        return stop.signum if unfinished else 0

    def _status(self, run: Run) -> Status:
        return self._record.statuses[run.name]

    def _start_runs(self) -> None:
        """Start waiting runs on the free slots."""
        while self._free and self._waiting:
            run, slot = self._waiting.popleft(), self._free.pop(0)
            status = self._status(run)
            status.state, status.slot, status.reason = RUNNING, slot.index, ""
            status.attempts += 1
            try:
                resume = bool(list_snapshots(run.directory / "snapshot"))
                if not resume:
                    move_aside(run)
                self._active.append(RunProcess(run, slot, resume))
            except (OSError, ConfigError) as error:
                self._free.insert(0, slot)
                self._finish(run, FAILED, f"cannot be started: {error}")
                continue
            self._table.message(f"{run.name} {'resumes' if resume else 'starts'} on slot {slot.index}")
            self._save()

    def _collect_finished(self) -> None:
        """Record the runs that have ended and free their slots; kill hung runs."""
        for process in list(self._active):
            if not process.ended():
                process.check_hung(self._options.stall_s)
                continue
            self._active.remove(process)
            self._free.append(process.slot)
            self._free.sort(key=lambda slot: slot.index)
            status = self._status(process.run)
            status.seconds = round(status.seconds + process.seconds(), 3)
            status.exit_status, reason = process.result()
            process.close()
            interrupted = process.interrupted and not process.kill_reason
            if not reason and self._readers[process.run.name].read().fraction() < 1:  # runner.max_time_s ended it
                interrupted, reason = True, "its time limit is reached; the same command continues it"
            self._finish(process.run, INTERRUPTED if reason and interrupted else FAILED if reason else DONE, reason)

    def _finish(self, run: Run, state: str, reason: str) -> None:
        """Record the end of an attempt; queue a failed run again if retries are left."""
        status = self._status(run)
        status.state, status.reason, status.has_directory = state, reason, run.directory.is_dir()
        if state == FAILED:
            self._failures[run.name] += 1
            left = self._options.retries - self._failures[run.name] + 1
            retry = left > 0 and status.exit_status != _REFUSED
            self._table.message(f"{run.name} failed, {reason}" + (f"; retries left: {left}" if retry else ""))
            if retry:
                status.state = WAITING
                self._waiting.append(run)
        else:
            self._table.message(self._row(run).result())
        self._save()

    def _save(self) -> None:
        """Save the record. A full disk does not stop the runs; experiment.json is then out of date."""
        try:
            self._record.save()
        except OSError as error:
            self._table.message(f"cannot write {FILE}: {error}")

    def _interrupt_runs(self) -> None:
        running = [process for process in self._active if not process.interrupted]
        if running:
            snapshots = pluralize(len(running), "snapshot")
            self._table.message(f"stopping: waiting for {snapshots}; signal again to stop at once")
        for process in running:
            process.interrupt(_SNAPSHOT_S)

    def _row(self, run: Run) -> Row:
        status = self._status(run)
        running = next((process.seconds() for process in self._active if process.run is run), 0.0)
        progress = self._readers[run.name].read()
        return Row(run.name, status.state, status.slot, status.seconds + running, status.reason, progress)

    def _show(self, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._shown_s >= self._table.interval_s:
            self._shown_s = now
            rows = [self._row(run) for run in self._runs]
            self._table.show(rows, summary(rows, len(self._free) + len(self._active)), last)
