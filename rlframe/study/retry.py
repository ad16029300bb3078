"""One run with `retries=`: a launch in a process of its own, which is started again from its snapshot if it fails."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rlframe.core.command_line import KeyValues
from rlframe.experiment.config import Experiment
from rlframe.record.context import new_directory
from rlframe.record.snapshot import list_snapshots
from rlframe.study.plan import PlannedRun
from rlframe.study.process import REFUSED, describe_exit, kill_group, start_process
from rlframe.study.record import move_aside
from rlframe.study.sweep import run_template, trusting_itself
from rlframe.system.signals import SIGNALS


def single_run(words: Mapping[str, str], experiment: Experiment) -> PlannedRun:
    """The run of a launch with these words, in the directory that it would have without retries.

    Raises:
        ConfigError: the directory cannot be created or holds a run.
    """
    if "resume" in words:
        command = (sys.executable, "-m", "rlframe.launch", *[f"{key}={value}" for key, value in words.items()])
        return PlannedRun("", experiment.run_ID, words, Path(words["resume"]), command, command)
    directory = new_directory(experiment.log_dir, experiment.run_ID, experiment.title())
    template = run_template(KeyValues(f"{key}={words[key]}" for key in ("trust",) if key in words).flag("trust"))
    arguments = {key: value for key, value in words.items() if key not in ("trust", "log_dir", "run_ID")}
    return trusting_itself(template.make_run(directory.parent, "", "", experiment.run_ID, arguments))


def run_with_retries(run: PlannedRun, retries: int) -> int:
    """Train the run, with this process's output; returns the exit status of its last attempt.

    A failed attempt is followed by at most `retries` others, from its newest snapshot, or from the start if it has
    none. An attempt with wrong settings, or stopped by a signal to this process, is not repeated.
    """
    command = run.command
    with _passing_on_signals() as signals:
        for left in reversed(range(retries + 1)):
            status = _attempt(command, signals)
            if status in (0, REFUSED) or signals.received or not left:
                break
            resumes = bool(list_snapshots(run.directory / "snapshot"))
            command = run.resume_command if resumes else run.command
            if not resumes:
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


@contextmanager
def _passing_on_signals() -> Iterator[_Signals]:
    """Within the block, signals that stop a run go to the process of the attempt. An ignored SIGHUP stays ignored."""
    signals = _Signals()
    handled = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, signals.receive) for signum in handled}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _attempt(command: tuple[str, ...], signals: _Signals) -> int:
    """Run the command in its own session, so that signals of the terminal reach it once. Returns its exit status."""
    process, own_end = start_process(command, "-", None, os.environ)
    try:
        signals.pass_on_to(process)
        return process.wait()
    finally:
        kill_group(process.pid)
        os.close(own_end)
