"""Helpers for tests that start processes: waiting, checking, and running the launch command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.fork_server import Popen

DEADLINE_S = 60.0  # of what takes a second at most, on a machine with other work


def until(holds: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "deadline exceeded"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process with this id runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, if it runs: it may end at any moment."""
    with suppress(psutil.NoSuchProcess):
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    return []


@contextmanager
def launching(*words: str, **how: Any) -> Iterator[Popen]:
    """`rlframe.launch` in a process group of its own, killed in the end; `how`: further arguments of Popen."""
    with Popen(
        [sys.executable, "-m", "rlframe.launch", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **how,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def launched(log_dir: Path, *words: str) -> Iterator[Popen]:
    """`launching`, once it has logged progress."""
    with launching(f"log_dir={log_dir}", *words) as process:
        progress = log_dir / "run_0" / "progress.csv"

        def has_logged() -> bool:
            assert process.poll() is None, process.stdout and process.stdout.read()
            return progress.exists() and len(progress.read_text().splitlines()) > 2

        until(has_logged, DEADLINE_S)
        yield process
