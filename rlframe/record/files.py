"""Files that are on the disk before anyone counts on them, and that are read only as what they are said to be."""

import hashlib
import os
import shutil
import stat
from pathlib import Path

import numpy as np

from rlframe.core.errors import ReadableError


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
    return array.reshape(-1).view(np.uint8).data
