"""The directory lock: two real processes, one of them killed, and file systems without locks."""

import errno
import fcntl
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from rlframe.core.errors import ConfigError
from rlframe.record import logger_context
from rlframe.record.directory import LOCK_FILE, DirectoryLock, LockHolder, read_lock, this_process
from tests.fork_server import Popen

HOLD = """
import sys
from pathlib import Path
from rlframe.record.directory import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), "a run", "log_dir")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(directory: Path) -> Iterator[Popen]:
    """Another process that holds the directory."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def lock(directory: Path) -> DirectoryLock:
    return DirectoryLock(directory, "a run", "run_ID or log_dir")


def test_a_second_process_gets_an_error_naming_the_holder_whose_file_is_removed_with_it(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(ConfigError, match="is in use by a run") as caught:
            lock(tmp_path)
        for word in (f"process {process.pid} on {socket.gethostname()}", "since 20", "-c", "use another run_ID"):
            assert word in str(caught.value)
    lock(tmp_path).close()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_run_resumes_with_a_warning_after_the_lock_holder_was_killed(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        pass
    with held(run.directory) as process:
        with pytest.raises(ConfigError, match=f"process {process.pid}"), logger_context(run.directory, resume=True):
            pass
        process.kill()
        process.wait()
        assert read_lock(run.directory / LOCK_FILE)
    with logger_context(run.directory, resume=True, console=False):
        assert read_lock(run.directory / LOCK_FILE) == this_process()
    assert not (run.directory / LOCK_FILE).exists()


def test_a_directory_with_only_a_stale_lock_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "run_0").mkdir()
    with held(tmp_path / "run_0"):
        pass
    with logger_context(tmp_path, console=False):
        pass


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no locks, as NFS for a directory: there is none here, so its answer is given for it."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_file_locks_a_process_of_this_host_is_looked_up(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(ConfigError, match=f"process {process.pid}"):
            lock(tmp_path)
        process.kill()
        process.wait()
        lock(tmp_path).close()


@pytest.mark.usefixtures("no_locks")
def test_without_file_locks_another_host_is_trusted_and_the_file_to_remove_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(LockHolder("elsewhere", 1, 0.0, "python -m rlframe.launch"))))
    with pytest.raises(ConfigError, match=rf"only elsewhere can tell.*remove {tmp_path / LOCK_FILE}"):
        lock(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    lock(tmp_path).close()


def test_a_reused_process_id_is_not_the_lock_holder() -> None:
    me = this_process()
    assert me.is_running()
    assert not LockHolder(me.host, me.pid, me.started - 100, me.command).is_running()


TOLD = [
    {"pid": -1},
    {"pid": 0},
    {"pid": 1e400},
    {"started": 1e400},
    {"started": 1e18},
    {"started": math.nan},
    {"pid": "x"},
]
DAMAGED: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    **{
        f"{told}": lambda path, told=told: path.write_text(json.dumps(asdict(this_process()) | told))  # type: ignore[misc]
        for told in TOLD
    },
    **{
        f"{content[:12]!r}": lambda path, content=content: path.write_bytes(content)  # type: ignore[misc]
        for content in (b"", b"[" * 100_000, b'{"host": 1}', b"\xff", b"x" * 100_000)
    },
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_lock_file_that_no_process_wrote_so_names_no_holder(what: str, tmp_path: Path) -> None:
    DAMAGED[what](tmp_path / LOCK_FILE)
    assert read_lock(tmp_path / LOCK_FILE) is None
    lock(tmp_path).close()


def test_a_lock_holder_is_printed_without_control_characters() -> None:
    assert "\x1b" not in str(LockHolder("\x1b[2J", 1, 0.0, "\x1b]0;x\x07"))


def test_an_impossible_process_id_is_not_running() -> None:
    assert not LockHolder("here", 10**30, 1e9, "").is_running()
