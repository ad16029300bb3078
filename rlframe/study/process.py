"""One attempt of a run: a process in its own session, killed when this process dies; and a run with `retries=`."""

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import open_regular_file, open_to_append, read_json
from rlframe.record.directory import RESULT
from rlframe.record.snapshot import list_snapshots
from rlframe.study.plan import PlannedRun, Slot
from rlframe.study.record import move_aside, size_and_time
from rlframe.system import parent_death
from rlframe.system.signals import GRACE, handling

REFUSED = 2  # exit status of a command with a wrong configuration; a retry would fail again
SNAPSHOT_S = 300.0  # time for an interrupted run to write its snapshot
_STACK_S = 2.0  # time for a hung run to write its stack
_GAP_S = 10.0  # the longest time between two looks at a run that counts for `stall_s`
_CLOSE_S = 10.0  # time for a killed process to disappear
_TAIL_BYTES = 1 << 12


def start_process(
    command: Sequence[str], cpus: str, output: IO[bytes] | None, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command in its own session, and kill it when this process dies or closes the descriptor returned.

    Args:
        cpus: such as 0,1; `-` for all.    output: its stdout and stderr; None: those of this process.
    """
    child_end, own_end = os.pipe()  # see parent_death
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", parent_death.__file__, str(child_end), cpus, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(child_end,),
        )
    except BaseException:
        os.close(own_end)
        raise
    finally:
        os.close(child_end)
    return process, own_end


def kill_group(pid: int) -> None:
    """Kill the process group of a process started by `start_process`."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """An exit status, negative for a signal, in words."""
    return f"exit status {status}" if status >= 0 else f"killed by signal {-status}, {signal.strsignal(-status)}"


class RunProcess:
    """One attempt of a run: a process in its own session, pinned to its slot, killed when this process dies.

    With `others` it is one of a stack, which one process trains (stack=true).
    """

    def __init__(self, run: PlannedRun, slot: Slot, resume: bool, others: Sequence[PlannedRun] = ()) -> None:
        """Start or resume the run; its output is appended to `run.log`. Raises OSError or ConfigError if that fails."""
        self.run, self.runs, self.slot = run, (run, *others), slot
        self.kill_reason = ""  # why the queue killed it; empty if it did not
        self.pruned = ""  # why a search has no more use for it
        self.interrupted = False
        self._start_s = self._checked_s = time.monotonic()
        self._idle_s = 0.0  # since a log changed
        self._kill_s = math.inf  # when to kill it
        command = [*(run.resume_command if resume else run.command), f"affinity={slot.code}"]
        if others:
            seeds = ",".join(each.arguments["seed"] for each in self.runs)
            command = [*run.stack_command, f"stack=[{seeds}]", f"affinity={slot.code}"]
        cpus = ",".join(map(str, slot.affinity.cpus)) or "-"
        self._earlier = {each.name: size_and_time(each.directory / RESULT) for each in self.runs}
        folders = [each.directory for each in self.runs] + [*run.directory.parents[: len(Path(run.setting).parts)]]
        for folder in folders:
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link; a study writes only into its own folders")
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(run.log) as log:
            log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} slot {slot.index}: {shlex.join(command)}\n".encode())
            self._process, own_end = start_process(command, cpus, log, _environment())
        self.pid = self._process.pid
        self._descriptors = [own_end]
        try:
            self._descriptors += [os.pidfd_open(self.pid)] if sys.platform == "linux" else []
        except BaseException:
            self.close()
            raise
        written = [each.directory / name for each in self.runs for name in ("progress.csv", "debug.log")]
        self._logs = (run.log, *written)
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
        kill_group(self.pid)
        return True

    def result(self) -> tuple[int, str]:
        """Exit status (negative for a signal) and reason of the failure (empty if none) of an ended process."""
        status = int(self._process.returncode)
        if status == 0 and not self.kill_reason:
            return 0, ""
        output = last_line(self.run.log)
        cause = describe_exit(status)
        return status, self.kill_reason or (f"{cause}: {output}" if output else cause)

    def result_of(self, run: PlannedRun) -> tuple[int, str]:
        """The same of one of the runs of a stack: if the process ended otherwise, by what the run's own record says."""
        status, reason = self.result()
        if not reason or len(self.runs) == 1:
            return status, reason
        own = self.own_result(run)
        if own.get("ended") in ("completed", "stopped", "out_of_time"):
            return 0, ""
        told = own.get("ended") in ("failed", "interrupted") and not self.kill_reason
        return status, str(own["reason"]) if told else reason

    def own_result(self, run: PlannedRun) -> Mapping[str, Any]:
        """The result.json that this attempt has written; empty if there is none, it is damaged, or an earlier one's."""
        path = run.directory / RESULT
        if size_and_time(path) == self._earlier[run.name]:
            return {}
        try:
            return read_json(path)
        except ConfigError:
            return {}

    def check_hung(self, stall_s: float) -> None:
        """Kill the run if its logs have no new line for `stall_s` (0: never). Does not wait.

        A longer gap between two calls is one in which the machine, or the queue with its runs, stood still.
        """
        now, stats = time.monotonic(), self._stat_logs()
        self._idle_s += min(now - self._checked_s, _GAP_S)
        self._checked_s = now
        if stats != self._log_stats:
            self._log_stats, self._idle_s = stats, 0.0
        if stall_s and not self.kill_reason and self._idle_s >= stall_s:
            self.kill_reason = f"hung: no new line in its logs for {stall_s:g} s; {self.run.log.name} has its stack"
            self._send(signal.SIGABRT)  # Python's fault handler writes the stacks of all threads
            self._kill_s = now + _STACK_S
        if now >= self._kill_s:
            kill_group(self.pid)

    def interrupt(self) -> None:
        """Ask the run to write a snapshot and end; kill it after SNAPSHOT_S."""
        self.interrupted = True
        self._send(signal.SIGINT)  # the run stops its own workers
        self._kill_s = min(self._kill_s, time.monotonic() + SNAPSHOT_S)

    def close(self) -> None:
        """Kill the process group if it still runs, and release all resources."""
        if self._process.poll() is None:
            kill_group(self.pid)
            with suppress(subprocess.TimeoutExpired):  # not killable while it waits in the kernel
                self._process.wait(_CLOSE_S)
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _stat_logs(self) -> list[tuple[int, int]]:
        return [size_and_time(path) for path in self._logs]

    def _send(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signum)


def _environment() -> dict[str, str]:
    """This process's, with unbuffered output, stacks on a crash, and the CPUs that affinity codes refer to."""
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", GRACE: f"{0.9 * SNAPSHOT_S:g}", **os.environ}
    if sys.platform == "linux":
        environment.setdefault(parent_death.QUEUE_CPUS, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    return environment


def last_line(path: Path) -> str:
    """The last non-empty line of a log, at most 300 characters."""
    try:
        with open_regular_file(path, sys.maxsize) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    except (ConfigError, OSError):
        return ""
    output = [line.strip() for line in lines if line.strip() and not line.startswith("--- ")]
    return printable(output[-1][:300]) if output else ""


def run_with_retries(run: PlannedRun, retries: int) -> int:
    """Train the run, with this process's output; returns the exit status of its last attempt.

    A failed attempt is followed by at most `retries` others, from its newest snapshot, or from the start if it has
    none. An attempt with wrong settings, or stopped by a signal to this process, is not repeated.
    """
    command, signals = run.command, _Signals()
    with handling(signals.receive):
        for left in reversed(range(retries + 1)):
            status = _attempt(command, signals)
            if status in (0, REFUSED) or signals.received or not left:
                break
            resumes = bool(list_snapshots(run.directory / "snapshot"))
            command = run.resume_command if resumes else run.command
            if not resumes and command != run.resume_command:  # a resume starts it anew in its place
                move_aside(run)
            how = "continues from its snapshot" if resumes else "starts anew, as it has no snapshot"
            text = f"{run.directory} failed, {describe_exit(status)}; it {how}; retries left: {left - 1}"
            print(text, file=sys.stderr, flush=True)
    if status == REFUSED:
        with suppress(OSError):
            run.directory.rmdir()  # if it is empty
    return status if status >= 0 else 128 - status


class _Signals:
    """Passes signals on to a process, each once; those that come while there is none go to the next."""

    def __init__(self) -> None:
        self.received = False
        self._pending: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        self._pending.append(signum)
        self._send()

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._send()

    def _send(self) -> None:
        while self._pending and self._process:
            self._process.send_signal(self._pending.pop(0))


def _attempt(command: tuple[str, ...], signals: _Signals) -> int:
    """Run the command in its own session, so that signals of the terminal reach it once. Returns its exit status."""
    process, own_end = start_process(command, "-", None, os.environ)
    try:
        signals.pass_on_to(process)
        return process.wait()
    finally:
        kill_group(process.pid)
        os.close(own_end)
