"""Reading files that may be anybody's: plain ones, of bounded size, with one kind of error."""

from __future__ import annotations

import csv
import json
import os
import stat
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError
from rlframe.core.text import printable

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
