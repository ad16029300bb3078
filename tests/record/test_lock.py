"""Tests of one owner to a directory: with two real processes, one of them killed, and where there are no locks."""

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from rlframe.core.errors import ConfigError
from rlframe.record import logger_context
from rlframe.record.lock import FILE, Owner, Ownership, read_owner, this_process
from tests.fork_server import Popen

HOLD = """
import sys
from pathlib import Path
from rlframe.record.lock import Ownership
owned = Ownership(Path(sys.argv[1]), "a run", "log_dir")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(directory: Path) -> Iterator[Popen]:
    """Another process that holds the directory."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def own(directory: Path) -> Ownership:
    return Ownership(directory, "a run", "run_ID or log_dir")


def test_a_second_process_is_refused_with_who_holds_it_and_the_file_goes_with_the_owner(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(ConfigError, match="a run goes on there") as caught:
            own(tmp_path)
        for word in (f"process {process.pid} on {socket.gethostname()}", "since 20", "-c", "use another run_ID"):
            assert word in str(caught.value)
    own(tmp_path).close()
    assert not (tmp_path / FILE).exists()


def test_a_run_goes_on_where_its_owner_was_killed_and_says_so(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        pass
    with held(run.directory) as process:
        with pytest.raises(ConfigError, match=f"process {process.pid}"), logger_context(run.directory, resume=True):
            pass
        process.kill()
        process.wait()
        assert read_owner(run.directory / FILE)
    with logger_context(run.directory, resume=True, console=False):
        assert read_owner(run.directory / FILE) == this_process()
    assert not (run.directory / FILE).exists()


def test_a_directory_with_nothing_but_a_dead_owners_file_is_empty(tmp_path: Path) -> None:
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
def test_without_locks_a_process_of_this_host_is_looked_for(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(ConfigError, match=f"process {process.pid}"):
            own(tmp_path)
        process.kill()
        process.wait()
        own(tmp_path).close()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_another_host_is_believed_and_named_with_the_file_to_remove(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(asdict(Owner("elsewhere", 1, 0.0, "python -m rlframe.launch"))))
    with pytest.raises(ConfigError, match=rf"can be seen on elsewhere alone.*remove {tmp_path / FILE}"):
        own(tmp_path)
    (tmp_path / FILE).unlink()
    own(tmp_path).close()


def test_a_process_id_that_was_given_again_is_not_the_owner() -> None:
    me = this_process()
    assert me.is_running()
    assert not Owner(me.host, me.pid, me.began - 100, me.command).is_running()


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"host": 1}', b"\xff", b"x" * 100_000])
def test_a_damaged_file_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert read_owner(tmp_path / FILE) is None
    own(tmp_path).close()


def test_what_is_said_of_an_owner_cannot_steer_a_terminal() -> None:
    assert "\x1b" not in str(Owner("\x1b[2J", 1, 0.0, "\x1b]0;x\x07"))


@pytest.mark.parametrize(
    "told",
    [{"pid": -1}, {"pid": 0}, {"pid": 1e400}, {"began": 1e400}, {"began": 1e18}, {"began": float("nan")}, {"pid": "x"}],
    ids=str,
)
def test_an_owner_that_can_be_no_process_is_none(told: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(asdict(this_process()) | told))
    assert read_owner(tmp_path / FILE) is None
    own(tmp_path).close()


def test_a_process_id_beyond_all_is_not_running() -> None:
    assert not Owner("here", 10**30, 1e9, "").is_running()


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_has_no_end_is_not_read_for_an_owner(put: Any, tmp_path: Path) -> None:
    put(tmp_path / FILE)
    assert read_owner(tmp_path / FILE) is None
    own(tmp_path).close()
