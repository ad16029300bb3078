"""How far a run is, read from the outside: the last row of its progress.csv and the goal in its params.json."""

from __future__ import annotations

import csv
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from rlframe.core.errors import ConfigError
from rlframe.core.files import is_plain, read_json

_TAIL_BYTES = 1 << 16  # that hold the last row, whatever its width
_RETURNS = ("eval/return_mean", "episode/return_mean")


@dataclass(frozen=True)
class Progress:
    """What the last row of the log says; nan where it does not."""

    env_steps: float = math.nan
    n_steps: float = math.nan
    return_: float = math.nan
    elapsed_s: float = math.nan
    written: float = math.nan  # when, as time.time() counts

    def fraction(self) -> float:
        """Of n_steps, from 0 to 1; nan if not known."""
        return min(1.0, self.env_steps / self.n_steps) if self.n_steps > 0 else math.nan

    def left_s(self) -> float:
        """Seconds to its end at the speed so far; nan if not known."""
        if not self.env_steps > 0:
            return math.nan
        at_row = self.elapsed_s * (self.n_steps - self.env_steps) / self.env_steps
        return max(0.0, at_row - (time.time() - self.written))


class Reader:
    """Reads one run's progress, again only when the file has changed."""

    def __init__(self, directory: Path) -> None:
        self._rows, self._params = directory / "progress.csv", directory / "params.json"
        self._seen = (0, 0)
        self._n_steps = math.nan
        self._progress = Progress()

    def read(self) -> Progress:
        """The progress now; never raises for what a run has not written yet, or half."""
        try:
            status = self._rows.stat()
        except OSError:
            return self._progress
        if (status.st_size, status.st_mtime_ns) != self._seen:
            self._seen = (status.st_size, status.st_mtime_ns)
            self._progress = self._read(status.st_mtime)
        return self._progress

    def _read(self, written: float) -> Progress:
        try:
            row = last_row(self._rows)
        except (OSError, ValueError, csv.Error):
            return self._progress
        if math.isnan(self._n_steps):
            self._n_steps = _goal(self._params)
        score = next((row[name] for name in _RETURNS if not math.isnan(row.get(name, math.nan))), math.nan)
        elapsed_s = row.get("time/elapsed_s", math.nan)
        return Progress(row.get("env_steps", math.nan), self._n_steps, score, elapsed_s, written)


def last_row(path: Path) -> dict[str, float]:
    """The numbers of the last whole row of a progress.csv; none if there is no row.

    Raises:
        OSError: it cannot be read.    ValueError, csv.Error: it is no table.
    """
    if not is_plain(path):
        raise ValueError(f"{path} is not a plain file")
    with path.open("rb") as file:
        header = file.readline(_TAIL_BYTES)
        begin = file.tell()
        file.seek(max(begin, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if not whole:
        return {}
    names, cells = next(csv.reader([header.decode()])), next(csv.reader([whole[-1].decode(errors="replace")]))
    return {name: _number(cell) for name, cell in zip(names, cells, strict=False)}


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _goal(params: Path) -> float:
    try:
        return float(read_json(params)["config"]["runner.n_steps"])
    except (ConfigError, ValueError, KeyError, TypeError):
        return math.nan
