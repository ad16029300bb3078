"""File access: untrusted files are read with a size limit, our own are flushed to disk (fsync)."""

import csv
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError, RecordError, SnapshotError, printable

MAX_BYTES = 1 << 24
_MAX_TABLE_BYTES = 1 << 30


def is_regular_file(path: Path) -> bool:
    """Whether `path` is a regular file, not a link, pipe or device. Raises OSError if it does not exist."""
    return stat.S_ISREG(path.lstat().st_mode)


def read_regular_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole file. Raises ConfigError if it is missing, not a regular file, or larger than `max_bytes`."""
    try:
        if not is_regular_file(path):
            raise ConfigError(f"{path} is not a regular file; replace the link, pipe or folder by the file itself")
        size = path.stat().st_size
        if size > max_bytes:
            raise ConfigError(f"{path} has {size:,} bytes, more than the limit of {max_bytes:,}")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError as `read_regular_file`, or if the file holds anything else."""
    try:
        content = json.loads(read_regular_file(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {printable(str(error))}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it is not a JSON object")
    return content


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a progress.csv as text, without incomplete and damaged lines.

    A missing file is empty; one that is not a regular file or too large raises ConfigError.
    """
    data = read_regular_file(path, _MAX_TABLE_BYTES) if os.path.lexists(path) else b""
    lines = [_cells(line) for line in data.decode("utf-8", errors="replace").split("\n")[:-1]]
    columns = lines[0] if lines else []
    return columns, [dict(zip(columns, line, strict=True)) for line in lines[1:] if len(line) == len(columns)]


def _cells(line: str) -> list[str]:
    """Parse one line by itself, so that a damaged line cannot swallow the next."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def disk_error(what: str, folder: Path, error: OSError, n_bytes: int = 0) -> RecordError:
    """The RecordError for a disk error; `n_bytes`: the size that was to be written, if known."""
    needed = f"it needs {n_bytes:,} bytes and " if n_bytes else ""
    return RecordError(f"{what} cannot be written: {error.strerror or error}; {needed}{_free(folder)}")


def check_free_space(what: str, folder: Path, n_bytes: int) -> None:
    """Raise RecordError if the disk of `folder` has less than `n_bytes` free."""
    if n_bytes > shutil.disk_usage(folder).free:
        raise RecordError(f"{what} cannot be written: it needs {n_bytes:,} bytes and {_free(folder)}")


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} are free in {folder}"
    except OSError:
        return f"{folder} no longer exists"


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a new file and flush it to disk. Raises FileExistsError if it exists, OSError on a disk error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file or the entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_file(file: Path, n_bytes: int, sha256: str) -> None:
    """Raise SnapshotError unless a regular file has this size and hash; the size is checked first."""
    try:
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError(f"{file} is not a regular file")
        if status.st_size != n_bytes:
            found = f"{status.st_size:,} bytes, its manifest says {n_bytes:,}"
            raise SnapshotError(f"{file} has {found}; use another snapshot", damaged=True)
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:  # missing, or a failing disk
        raise SnapshotError(f"{file} cannot be read: {error.strerror}", damaged=True) from None
    if found != sha256:
        raise SnapshotError(
            f"{file} is damaged: its content does not match its hash; use another snapshot", damaged=True
        )
