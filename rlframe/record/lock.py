"""Who works in a directory: one process at a time, which is told by its host and process id to whoever comes second."""

import fcntl
import json
import logging
import os
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import read_plain

FILE = "owner.json"
_SAME_S = 2.0  # between two readings of when one process began
_MOST_BYTES = 1 << 16

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class Owner:
    """A process."""

    host: str
    pid: int
    began: float  # seconds since the epoch; with the id, it is this process and no later one
    command: str

    def __str__(self) -> str:
        since = f"{datetime.fromtimestamp(self.began):%Y-%m-%d %H:%M:%S}"
        return printable(f"process {self.pid} on {self.host}, since {since} ({self.command})")

    def is_running(self) -> bool:
        """Whether it is still there; of this host only."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.began) < _SAME_S
        except (psutil.Error, OverflowError):
            return False


def this_process() -> Owner:
    """Us."""
    me = psutil.Process()
    return Owner(socket.gethostname(), me.pid, me.create_time(), shlex.join(sys.argv)[:500])


class Ownership:
    """Holds a directory until `close`, or until the process dies: two writers would ruin one another's files.

    The kernel's lock decides, where the file system has locks; else what the owner has written of itself.
    """

    def __init__(self, directory: Path, who: str, instead: str) -> None:
        """Args:
            who: that it goes on there, of another that holds it.    instead: keys that can name another place.
        Raises:
            ConfigError: another process holds it; says which.
        """
        self._path, self._ours = directory / FILE, False
        self._descriptor = os.open(directory, os.O_RDONLY)
        try:
            self._take(f"{directory}: {who} goes on there", f"stop it, or use another {instead}")
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, goes_on: str, remedy: str) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            owner = read_owner(self._path)
            raise ConfigError(f"{goes_on}{f', {owner}' if owner else ''}; {remedy}") from None
        except OSError:
            locked = False
        before = read_owner(self._path)
        if before and not locked:
            self._refuse_living(before, goes_on, remedy)
        if before:
            _logger.warning("%s is taken over from %s, which is gone", self._path.parent, before)
        self._write(goes_on, remedy, before is not None or locked)

    def _refuse_living(self, owner: Owner, goes_on: str, remedy: str) -> None:
        if owner.host != socket.gethostname():
            raise ConfigError(
                f"{goes_on}, {owner}; its file system has no locks, so whether that process still runs can be seen on "
                f"{printable(owner.host)} alone: {remedy}, or if it is gone, remove {self._path}"
            )
        if owner.is_running():
            raise ConfigError(f"{goes_on}, {owner}; {remedy}")

    def _write(self, goes_on: str, remedy: str, replaces: bool) -> None:
        if replaces:
            self._path.unlink(missing_ok=True)
        try:
            with self._path.open("x", encoding="utf-8") as file:
                json.dump(asdict(this_process()), file)
        except FileExistsError:  # another came at the same time, where nothing can be locked
            raise ConfigError(f"{goes_on}, since just now; {remedy}") from None
        self._ours = True

    def close(self) -> None:
        """Let go; harmless when repeated."""
        if self._ours:
            self._ours = False
            with suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)


def read_owner(path: Path) -> Owner | None:
    """Who is named there; None if the file is not there, not whole, or tells what no process can be."""
    try:
        found = json.loads(read_plain(path, _MOST_BYTES))
        owner = Owner(str(found["host"]), int(found["pid"]), float(found["began"]), str(found["command"]))
        datetime.fromtimestamp(owner.began)
    except (ConfigError, OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None
    return owner if owner.pid > 0 else None
