"""Files: untrusted ones are read with bounded size and one kind of error; ours are written to last (fsync)."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframe.core.errors import ConfigError, ReadableError, printable

if TYPE_CHECKING:
    import numpy as np

MOST_BYTES = 1 << 24
_MOST_OF_TABLES = 1 << 30


def is_plain(path: Path) -> bool:
    """Whether it is a file: no link to one, and no pipe or device, which may have no end.

    Raises:
        OSError: it is not there.
    """
    return stat.S_ISREG(path.lstat().st_mode)


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """All of a file.

    Raises:
        ConfigError: it is not there, no plain file, or has more than `most` bytes; names it.
    """
    try:
        if not is_plain(path):
            raise ConfigError(f"{path} is not a plain file; links, pipes and folders in its place are not read")
        size = path.stat().st_size
        if size > most:
            raise ConfigError(f"{path} has {size:,} bytes; of such a file at most {most:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of settings or of records holds.

    Raises:
        ConfigError: it is not there, no plain file, larger than MOST_BYTES, or damaged; names the file.
    """
    try:
        content = json.loads(read_plain(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {printable(str(error))}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it holds no object")
    return content


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and whole rows of a progress.csv, as text; a torn last line is left out, and any that makes no sense.

    Raises:
        ConfigError: it is no plain file, or too large.
    """
    data = read_plain(path, _MOST_OF_TABLES) if os.path.lexists(path) else b""
    lines = [_cells(line) for line in data.decode("utf-8", errors="replace").split("\n")[:-1]]
    columns = lines[0] if lines else []
    return columns, [dict(zip(columns, line, strict=True)) for line in lines[1:] if len(line) == len(columns)]


def _cells(line: str) -> list[str]:
    """Of a line by itself: none of ours goes on in the next, though a damaged one may seem to."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


class SnapshotError(ReadableError):
    """A snapshot that cannot be used; the message names the file, what is wrong and what to do."""

    def __init__(self, message: str, damaged: bool = False) -> None:
        """`damaged`: it was whole once, so another snapshot of the same run may do."""
        super().__init__(message)
        self.damaged = damaged


class NotRecorded(ReadableError):
    """A snapshot or a row of the log that the disk refused; what was written before is whole."""


def refused(what: str, folder: Path, error: OSError, n_bytes: int = 0) -> NotRecorded:
    """What to raise where the disk refused; `n_bytes`: that it was to take, if that is known."""
    needed = f"it needs {n_bytes:,} bytes and " if n_bytes else ""
    return NotRecorded(f"{what} cannot be written: {error.strerror or error}; {needed}{_free(folder)}")


def check_room(what: str, folder: Path, n_bytes: int) -> None:
    """Raises:
    NotRecorded: fewer than `n_bytes` are free where `folder` is.
    """
    if n_bytes > shutil.disk_usage(folder).free:
        raise NotRecorded(f"{what} cannot be written: it needs {n_bytes:,} bytes and {_free(folder)}")


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} are free in {folder}"
    except OSError:
        return f"{folder} is gone"


def write_file(path: Path, data: bytes | memoryview) -> None:
    """A new file, flushed to the disk.

    Raises:
        FileExistsError: it is there.    OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file or a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_file(file: Path, n_bytes: int, sha256: str) -> None:
    """Whether a plain file has this size and content; the size is looked at first.

    Raises:
        SnapshotError: it does not.
    """
    try:
        status = os.lstat(file)
    except OSError as error:
        raise SnapshotError(f"{file} cannot be read: {error.strerror}", damaged=True) from None
    if not stat.S_ISREG(status.st_mode):
        raise SnapshotError(f"{file} is not a plain file")
    if status.st_size != n_bytes:
        raise SnapshotError(
            f"{file} has {status.st_size:,} bytes, its manifest says {n_bytes:,}: truncated?", damaged=True
        )
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:  # gone meanwhile, or a disk that fails
        raise SnapshotError(f"{file} cannot be read: {error.strerror}", damaged=True) from None
    if found != sha256:
        raise SnapshotError(
            f"{file} is damaged: its content does not match its hash; use another snapshot beside it", damaged=True
        )


def as_bytes(array: np.ndarray) -> memoryview:
    """What a contiguous array holds."""
    return array.reshape(-1).view("uint8").data
