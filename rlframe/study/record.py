"""experiment.json, the file of a study: its settings and the state of each run; and the progress in the runs' logs."""

import csv
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.curves import N_STEPS, read_run
from rlframe.core.command_line import KeyValues
from rlframe.core.errors import ConfigError
from rlframe.core.files import naming_disk_errors, number_in, open_regular_file, read_json, replace_file
from rlframe.record.directory import PARAMS, DirectoryLock, next_attempt, session
from rlframe.record.metrics import signed
from rlframe.runners.stop_rule import check_metric
from rlframe.study.plan import PlannedRun

FILE = "experiment.json"
STATES = ("waiting", "running", "done", "failed", "interrupted", "pruned")  # of a run; pruned: by a search
WAITING, RUNNING, DONE, FAILED, INTERRUPTED, PRUNED = STATES
_FORMAT = 2
_ROWS = 8  # of the tail
_TAIL_BYTES = 1 << 16  # enough for the last row of a progress.csv of any width
RETURNS = ("eval/return_mean", "episode/return_mean")  # the first that a log has


def metric_of(given: KeyValues) -> str:
    """What a search or a population goes by; raises ConfigError for a name that no run logs."""
    metric = given.text("metric", RETURNS[0])
    check_metric(signed(metric)[0], f"metric={metric:.100}")
    return metric


@dataclass(frozen=True)
class StudyProgress:
    """The last row of a run's log; nan where it has no value."""

    steps: float = math.nan
    n_steps: float = math.nan
    return_: float = math.nan
    per_s: float = math.nan  # steps per second of the last log interval
    elapsed_s: float = math.nan
    written: float = math.nan  # time.time() of the row
    unit: str = "env_steps"  # of steps; updates where no environment is stepped

    def fraction(self) -> float:
        """The fraction of n_steps, from 0 to 1; nan if unknown."""
        return min(1.0, self.steps / self.n_steps) if self.n_steps > 0 else math.nan

    def left_s(self) -> float:
        """Seconds left at the mean speed so far; nan if unknown."""
        if not self.steps > 0:
            return math.nan
        at_row = self.elapsed_s * (self.n_steps - self.steps) / self.steps
        return max(0.0, at_row - (time.time() - self.written))


class ProgressReader:
    """Reads the progress of one run, again only if its files have changed."""

    def __init__(self, directory: Path) -> None:
        self._rows, self._params = directory / "progress.csv", directory / "params.json"
        self._stat = ((0, 0), (0, 0))  # of both files when they were last read
        self._progress = StudyProgress()

    def read(self) -> StudyProgress:
        """The progress now. Missing or half-written files are not an error."""
        stat = size_and_time(self._rows), size_and_time(self._params)
        if stat == self._stat:
            return self._progress
        self._stat = stat
        try:
            row = newest_values(self._rows)
        except (ConfigError, OSError, ValueError, csv.Error):
            return self._progress
        n_steps = n_steps_of(self._params)  # a resumed run may go on for longer
        return_ = next((row[name] for name in RETURNS if not math.isnan(row.get(name, math.nan))), math.nan)
        unit = "updates" if row.get("env_steps") == 0 and row.get("updates", 0) > 0 else "env_steps"
        steps, per_s, elapsed_s = (row.get(name, math.nan) for name in (unit, f"time/{unit}_per_s", "time/elapsed_s"))
        self._progress = StudyProgress(steps, n_steps, return_, per_s, elapsed_s, stat[0][1] / 1e9, unit)
        return self._progress


def n_steps_of(params: Path) -> float:
    """The length of a run, as its params.json has it since its last resume; nan if unknown."""
    with suppress(ConfigError, ValueError, TypeError, AttributeError, KeyError):  # of a script, or damaged
        content = read_json(params)
        # What a resume changed is in relation to the first config: without it, that length holds again.
        changed = [each.get("changed", {}) for each in content.get("resumed", [])]
        return float({**content.get("config", {}), **(changed[-1] if changed else {})}[N_STEPS])
    return math.nan


def size_and_time(path: Path) -> tuple[int, int]:
    """A file's size and time of change (ns); zeros if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_size, status.st_mtime_ns)


def newest_values(path: Path) -> dict[str, float]:
    """The newest value in each column of the last complete rows of a progress.csv; empty if it has no row.

    A row may have an evaluation only, of earlier env_steps; those of the result are the largest.

    Raises:
        ConfigError: it cannot be read, or is not a regular file.    ValueError, csv.Error: it is not a table.
    """
    with open_regular_file(path, sys.maxsize) as file:
        header = file.readline(_TAIL_BYTES)
        start = file.tell()
        begin = file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).splitlines(keepends=True)[begin > start :]  # the first may be the end of a row
    complete = [line for line in lines if line.endswith(b"\n")]
    if not complete:
        return {}
    names, found = next(csv.reader([header.decode("utf-8-sig")])), dict[str, float]()
    for cells in csv.reader([line.decode(errors="replace") for line in complete[-_ROWS:]]):
        row = {name: number_in(cell) for name, cell in zip(names, cells, strict=False) if cell}
        found = {**found, **row, "env_steps": max(found.get("env_steps", 0.0), row.get("env_steps", 0.0))}
    return found


def logged_columns(run: PlannedRun) -> Mapping[str, np.ndarray]:
    """The columns of a run's log; none if it has no log yet, or a damaged one."""
    try:
        return read_run(run.directory).columns
    except (ConfigError, OSError):
        return {}


@dataclass
class Status:
    """The state of one run. The queue changes it and saves the record."""

    state: str = WAITING
    slot: int = -1  # its last slot; -1: none yet
    attempts: int = 0
    seconds: float = 0.0  # of all its attempts
    exit_status: int = 0  # of the last attempt that ended; negative for a signal
    reason: str = ""  # why it failed
    has_directory: bool = False  # it made its directory; if that is removed, the run is repeated


class StudyRecord:
    """The study's experiment.json, locked by one queue at a time."""

    def __init__(self, directory: Path, runs: Sequence[PlannedRun], facts: Mapping[str, Any]) -> None:
        """Start a study in `directory`, or continue the one there: finished runs stay done, the others wait.

        The file stays as it is until `save`, so that a command which does not continue the study changes nothing.
        Runs of an earlier command that never started and are not among these are no longer of the study; see `dropped`.

        Args:
            facts: entries for the reader of the file, such as the command and the grid.
        Raises:
            ConfigError: another queue has the lock, it cannot be written, or it holds another study's runs.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create {directory}: {error.strerror}; use another log_dir") from error
        with ExitStack() as on_error, naming_disk_errors("a study", directory):
            self._lock = DirectoryLock(directory, "a study", "log_dir")
            on_error.callback(self._lock.close)
            self._path, self._runs = directory / FILE, list(runs)
            saved = read_record(directory) if self._path.exists() else {}
            self._facts = {**facts, "sessions": [*saved.get("sessions", []), session()]}
            entries, planned = {entry["name"]: entry for entry in saved.get("runs", [])}, {run.name for run in runs}
            self.dropped = [name for name, entry in entries.items() if name not in planned and _never_started(entry)]
            self._entries = {name: entry for name, entry in entries.items() if name not in self.dropped}
            self.statuses = {run.name: restored(run, self._entries.get(run.name)) for run in runs}
            on_error.pop_all()

    def add(self, runs: Sequence[PlannedRun]) -> None:
        """Take further runs into the study; raises ConfigError as the constructor."""
        self.statuses |= {run.name: restored(run, self._entries.get(run.name)) for run in runs}
        self._runs += runs

    def save(self) -> None:
        """Replace the file atomically; after an OSError the old file is intact."""
        for run in self._runs:
            entry = {"name": run.name, "setting": run.setting, "arguments": run.arguments}
            self._entries[run.name] = entry | vars(self.statuses[run.name])
        head = json.dumps({"format": _FORMAT, **self._facts}, indent=2).removesuffix("\n}")
        lines = ",\n    ".join(json.dumps(entry) for entry in self._entries.values())
        replace_file(self._path, f'{head},\n  "runs": [\n    {lines}\n  ]\n}}\n')

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def restored(run: PlannedRun, entry: Mapping[str, Any] | None) -> Status:
    """The state in which a study goes on with a run, of which it has an entry in its file or not.

    Raises:
        ConfigError: its directory is not of this run, or was started with other arguments.
    """
    if entry is None:
        if is_occupied(run.directory):
            raise ConfigError(
                f"{run.directory} is not empty and not a run of this study; move it away, or use another log_dir"
            )
        return Status()
    before, now = entry["arguments"], run.arguments
    n_steps = number_in(now.get(N_STEPS, ""))
    same = {N_STEPS} if n_steps == number_in(before.get(N_STEPS, "")) else set()  # as 2e5 and 200000
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in same]
    status = Status(**{field.name: entry[field.name] for field in fields(Status)})
    is_over, is_begun = status.state in (DONE, PRUNED), run.directory.is_dir()
    is_new = not is_begun and (status.has_directory or not is_over)
    is_longer = differing == [N_STEPS] and (not is_begun or n_steps > n_steps_of(run.directory / PARAMS))
    if differing and not (is_new or is_longer):
        others = ", ".join(f"{key}={before.get(key, '')}, now {now.get(key, '')}" for key in differing)
        if any(_same_object(before.get(key, ""), now.get(key, "")) for key in differing):
            others += " (an object of this name whose code or arguments have changed)"
        raise ConfigError(
            f"{run.directory} was started with other arguments: {others}; repeat the command of the study, with "
            f"more seeds, values or {N_STEPS} if you like, or use another log_dir for a new study"
        )
    if is_new or is_longer or not is_over:
        status.state, status.reason = WAITING, ""
    return status


def _never_started(entry: Mapping[str, Any]) -> bool:
    return entry["state"] in (WAITING, INTERRUPTED) and not entry["has_directory"]


def _same_object(before: str, now: str) -> bool:
    """Whether two words name objects in a study's file that differ in their digests alone."""
    return ".py:" in before and before.rpartition("_")[0] == now.rpartition("_")[0] and before != now


def read_record(directory: Path) -> dict[str, Any]:
    """The content of a study's experiment.json; raises ConfigError if it is missing, damaged or of another format."""
    path = directory / FILE
    content = read_json(path)
    if content.get("format") != _FORMAT:
        raise ConfigError(f"{path} has format {content.get('format')}, but this rlframe reads format {_FORMAT} only")
    keys = ("name", "arguments", *(field.name for field in fields(Status)))
    runs = content.get("runs")
    if not isinstance(runs, list) or not all(
        isinstance(run, dict) and all(key in run for key in keys) and isinstance(run["arguments"], dict) for run in runs
    ):
        raise ConfigError(f"{path} is damaged; move it away and use another log_dir")
    return content


def is_occupied(directory: Path) -> bool:
    """Whether a directory exists and has entries."""
    return directory.exists() and any(directory.iterdir())


def move_aside(run: PlannedRun) -> None:
    """Rename what an attempt without a snapshot left to a hidden directory, so that the run can start anew."""
    if is_occupied(run.directory):
        run.directory.rename(next_attempt(run.directory))
