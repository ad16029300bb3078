"""File access: untrusted files are read with a size limit, our own are flushed to disk (fsync)."""

import csv
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlframe.core.errors import ConfigError, RecordError, SnapshotError, printable

MAX_BYTES = 1 << 24
LEAST_BYTES = 100_000  # of a new run or study: its settings, log and lock
_MAX_NODES = 1 << 21  # values of a JSON text; each takes about 100 bytes of memory
_MAX_TABLE_BYTES = 1 << 26
_MAX_YAML = 1 << 17  # characters
_MAX_LINE_BYTES, _MAX_ROWS = 1 << 20, 2_000_000


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise yaml.YAMLError(f"an alias in line {line}: aliases may grow endlessly, so write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for n, key in enumerate(keys) if key in keys[:n]), None)
        if twice is not None:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} and below: the key {twice} is there twice")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The plain values of YAML text without aliases. Raises ValueError if it is not valid, too long or too deep."""
    if len(text) > _MAX_YAML:
        raise ValueError(f"it has {len(text):,} characters, more than the limit of {_MAX_YAML:,}")
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_regular_file(path: Path) -> bool:
    """Whether `path` is a regular file, not a link, pipe or device. Raises OSError if it does not exist."""
    return stat.S_ISREG(path.lstat().st_mode)


def read_regular_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole file. Raises ConfigError if it is missing, not a regular file, or larger than `max_bytes`."""
    _check_regular(path, max_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _check_regular(path: Path, max_bytes: int) -> None:
    try:
        if not is_regular_file(path):
            raise ConfigError(f"{path} is not a regular file; replace the link, pipe or folder by the file itself")
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if size > max_bytes:
        raise ConfigError(f"{path} has {size:,} bytes, more than the limit of {max_bytes:,}")


def make_own(path: Path) -> None:
    """Make sure that appending to `path` changes no other file: one with several names is copied.

    Raises:
        ConfigError: it is a link, pipe or folder.    OSError: it cannot be copied.
    """
    if not os.path.lexists(path):
        return
    if not is_regular_file(path):
        raise ConfigError(f"{path} is not a regular file; remove it")
    if path.stat().st_nlink > 1:
        own = shutil.copyfile(path, path.with_name(f".{path.name}.new"), follow_symlinks=False)
        os.replace(own, path)


def parse_json(data: bytes) -> Any:
    """The content of JSON text. Raises ValueError if it is not valid, or so nested or long that it fills the memory."""
    n = sum(map(data.count, (b",", b"[", b"{")))
    if n > _MAX_NODES:
        raise ValueError(f"it has {n:,} entries, more than the limit of {_MAX_NODES:,}")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError as `read_regular_file`, or if the file holds anything else."""
    try:
        content = parse_json(read_regular_file(path))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {printable(str(error))}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it is not a JSON object")
    return content


def iter_csv(path: Path) -> Iterator[list[str]]:
    """The columns of a progress.csv, then the cells of each row; without incomplete, damaged and endless lines.

    A missing file is empty. Raises ConfigError if it is not a regular file, or too large.
    """
    if not os.path.lexists(path):
        return
    _check_regular(path, _MAX_TABLE_BYTES)
    n_columns = n_rows = 0
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
            if not line.endswith(b"\n"):  # torn by a crash, or too long
                while line and not line.endswith(b"\n"):
                    line = file.readline(_MAX_LINE_BYTES)
                continue
            cells = _cells(line[:-1].decode("utf-8", errors="replace"))
            n_columns = n_columns or len(cells)
            if cells and len(cells) == n_columns:
                n_rows += 1
                if n_rows > _MAX_ROWS:
                    raise ConfigError(f"{path} has more than {_MAX_ROWS:,} rows, the limit")
                yield cells


def _cells(line: str) -> list[str]:
    """Parse one line by itself, so that a damaged line cannot swallow the next."""
    if '"' not in line:
        return line.removesuffix("\r").split(",") if line else []
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
