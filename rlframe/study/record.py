"""experiment.json: what a study is and how far each run is, read from the runs' own files."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError
from rlframe.core.files import is_plain, read_json
from rlframe.record.lock import Ownership
from rlframe.record.params import replace_file, session
from rlframe.record.snapshot import list_snapshots
from rlframe.study.plan import Run

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


FILE = "experiment.json"
WAITING, RUNNING, DONE, FAILED, INTERRUPTED = "waiting", "running", "done", "failed", "interrupted"
_FORMAT = 1


@dataclass
class Status:
    """How far one run is. The queue changes it, and saves the record then."""

    state: str = WAITING
    slot: int = -1  # its last; -1: none yet
    attempts: int = 0
    seconds: float = 0.0  # of all its attempts
    exit_status: int = 0  # of the last that ended; negative for a signal
    reason: str = ""  # why it failed
    has_directory: bool = False  # it has left one, so without it the run is to be repeated


class Record:
    """The study's file, held by one queue at a time."""

    def __init__(self, directory: Path, runs: Sequence[Run], facts: Mapping[str, Any]) -> None:
        """Begin a study in `directory`, or go on with the one there: what is done stays done, the rest waits.

        Args:
            facts: command, grid and the like, for whoever reads the file.
        Raises:
            ConfigError: another queue holds it, it cannot be written, or a run there is not one of these.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {directory}: {error.strerror}; use another log_dir") from error
        self._owned = Ownership(directory, "a study", "log_dir")
        try:
            before = read_record(directory) if (directory / FILE).exists() else {}
            self._path = directory / FILE
            self._facts = {**facts, "sessions": [*before.get("sessions", []), session()]}
            self._known = {entry["name"]: entry for entry in before.get("runs", [])}
            self._runs = tuple(runs)
            self.statuses = {run.name: self._status(run) for run in runs}
            self.save()
        except OSError as error:
            self._owned.close()
            raise ConfigError(f"cannot write in {directory}: {error.strerror}; use another log_dir") from error
        except BaseException:
            self._owned.close()
            raise

    def _status(self, run: Run) -> Status:
        known = self._known.get(run.name)
        if known is None:
            if run.directory.exists() and any(run.directory.iterdir()):
                raise ConfigError(f"{run.directory} is not empty, and no run of this study; use another log_dir")
            return Status()
        if known["words"] != run.words:
            words = " ".join(f"{key}={value}" for key, value in known["words"].items())
            raise ConfigError(
                f"{run.directory} was begun with other words, {words}; a study goes on by the same command, "
                f"with other seeds or values at most; use another log_dir for a new one"
            )
        status = Status(**{field.name: known[field.name] for field in fields(Status) if field.name in known})
        if status.state != DONE or (status.has_directory and not run.directory.is_dir()):
            status.state, status.reason = WAITING, ""
        return status

    def save(self) -> None:
        """Write the file, whole: the facts, and a line for each run.

        Raises:
            OSError: the disk refuses; the file is as it was.
        """
        for run in self._runs:
            entry = {"name": run.name, "setting": run.setting, "words": run.words}
            self._known[run.name] = entry | vars(self.statuses[run.name])
        head = json.dumps({"format": _FORMAT, **self._facts}, indent=2).removesuffix("\n}")
        lines = ",\n    ".join(json.dumps(entry) for entry in self._known.values())
        replace_file(self._path, f'{head},\n  "runs": [\n    {lines}\n  ]\n}}\n')

    def close(self) -> None:
        """Let go of the directory."""
        self._owned.close()


def read_record(directory: Path) -> dict[str, Any]:
    """The content of a study's file.

    Raises:
        ConfigError: there is none, or it is unreadable.
    """
    path = directory / FILE
    try:
        content = read_json(path)
        entries = [(entry["name"], entry["words"], entry["state"]) for entry in content["runs"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}); move it away, and use another log_dir") from None
    if content.get("format") != _FORMAT or not all(isinstance(name, str) for name, _, _ in entries):
        raise ConfigError(f"{path} has format {content.get('format')}, and this rlframe reads format {_FORMAT}")
    known: dict[str, Any] = content
    return known


def can_resume(run: Run) -> bool:
    """Whether there is a snapshot to go on from."""
    return bool(list_snapshots(run.directory / "snapshot"))


def set_aside(run: Run) -> None:
    """Make way for a run that starts anew: what an attempt without a snapshot has left becomes a hidden directory."""
    if not run.directory.exists() or not any(run.directory.iterdir()):
        return
    n = 1
    while (aside := run.directory.with_name(f".{run.directory.name}.{n}")).exists():
        n += 1
    run.directory.rename(aside)
