"""Loggers of metric rows: progress.csv, progress.jsonl, TensorBoard, and others by name. Used by `record.run`.

`loggers=[tensorboard,wandb,./file.py:Class]` names them. Errors of a user's own name it, as those of other parts do.
"""

import csv
import importlib.util
import io
import json
import logging
import math
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, PartError, RecordError, naming, qualified_name
from rlframe.core.files import (
    append,
    check_in_place,
    drop_torn_line,
    iter_csv,
    number_in,
    open_to_append,
    read_regular_file,
    replace_file,
)
from rlframe.core.names import find_attribute, find_maker
from rlframe.core.objects import is_own, name_of
from rlframe.record.directory import FILMS, film_path
from rlframe.record.metrics import step_of
from rlframe.record.rank_state import unused_path

_log = logging.getLogger("rlframe")
_MAX_JSONL, _JSON_BYTES = 1 << 28, 32  # bytes that are copied when a run is resumed, and more for each of its table
_ROWS_AT_ONCE = 1_000
_MAX_OWN = 1 << 34  # bytes of a table that a run writes: some 4e8 episodes


class Logger(ABC):
    """Writes rows of metrics. Owned by a Run, which closes it.

    Most rows are of one log interval, and their `env_steps` increases strictly. A row that has only `eval/...` may
    follow later than its `env_steps`. A metric has one value at an `env_steps`.
    """

    n_failed = 0  # attempts to send rows elsewhere that failed so far

    def __init__(self, directory: Path, config: Mapping[str, Any], name: str) -> None:  # noqa: B027
        """Open, or continue when a run is resumed.

        Args:
            directory: of the run.    config: as in params.json.    name: of the run, not unique.
        """

    def check(self) -> None:  # noqa: B027  # optional
        """Raise RecordError if rows can no longer be written; called before any logger gets a row."""

    @abstractmethod
    def write(self, row: Mapping[str, float]) -> None:
        """Write a row, which has `env_steps`."""

    @abstractmethod
    def truncate_after(self, env_steps: int) -> None:
        """The run resumes from `env_steps`: drop the first row with a greater one, and all after it."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close; may be called twice."""


class CsvLogger(Logger):
    """progress.csv: complete lines only, one column per metric in order of first appearance."""

    def __init__(self, path: Path) -> None:
        """Continue an existing file; an incomplete last line, left by a crash, is dropped.

        Raises:
            RecordError: its first line is damaged; the file is left as it is.
        """
        self._path = path
        self._columns: list[str] = []
        self._waiting: list[dict[str, str]] = []  # rows not yet written because of a disk error
        if os.path.lexists(path):
            self._columns = next(_table(path), [])
            if self._columns and "env_steps" not in self._columns:
                raise RecordError(
                    f"{path} is damaged: its first line names no column env_steps; mend that line, or move the file "
                    f"away, and a new one is begun"
                )
        self._file = open_to_append(path)
        drop_torn_line(self._file)

    def check(self) -> None:
        check_in_place(self._file)

    def write(self, row: Mapping[str, float]) -> None:
        """Append the row in one write. A new metric rewrites the file with one more column, empty in earlier rows.

        After a disk error, which is raised, the row is written together with the next one.
        """
        self.write_all([row])

    def write_all(self, rows: Sequence[Mapping[str, float | str]]) -> None:
        """Append several rows in one write, as `write`."""
        if not rows:
            return
        self._waiting += [{name: _cell(value) for name, value in row.items()} for row in rows]
        columns = list(dict.fromkeys([*self._columns, *(name for each in self._waiting for name in each)]))
        if columns != self._columns:
            earlier = _table(self._path)
            added = [""] * (len(columns) - len(next(earlier, [])))
            self._replace(columns, chain((row + added for row in earlier), _rows(columns, self._waiting)))
            self._reopen()
        else:
            append(self._file, "".join(_as_csv(_rows(columns, self._waiting))))
        self._waiting.clear()

    def truncate_after(self, env_steps: int) -> None:
        rows = _table(self._path)
        columns = next(rows, [])
        clocks = [columns.index(name) for name in ("env_steps", "updates") if name in columns]
        steps = ((_step([row[at] for at in clocks]), row) for row in rows)
        kept = takewhile(lambda each: each[0] <= env_steps, (each for each in steps if math.isfinite(each[0])))
        self._replace(columns, (row for _, row in kept))
        self._reopen()

    def _replace(self, columns: list[str], rows: Iterable[Sequence[str]]) -> None:
        replace_file(self._path, _as_csv(chain([columns] if columns else [], rows)))
        self._columns = columns

    def _reopen(self) -> None:
        self._file.close()
        self._file = open_to_append(self._path)

    def close(self) -> None:
        self._file.close()


def _table(path: Path) -> Iterator[list[str]]:
    """`iter_csv` of a file that this run writes, which is as long as its episodes are many."""
    return iter_csv(path, _MAX_OWN)


def _rows(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[list[str]]:
    return ([row.get(name, "") for name in columns] for row in rows)


def _as_csv(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The text of rows, in pieces of many rows."""
    left = iter(rows)
    while some := list(islice(left, _ROWS_AT_ONCE)):
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(some)
        yield buffer.getvalue()


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _step(clocks: Sequence[str]) -> float:
    """Where a row with these env_steps, and updates, stands, as `step_of`; NaN if that cell is damaged."""
    return number_in(clocks[0]) or number_in(clocks[-1] or "0")


class JsonlLogger(Logger):
    """progress.jsonl: the rows of progress.csv as one JSON object a line, without empty cells.

    JSON has no NaN and Inf: they are the strings "NaN", "Infinity" and "-Infinity".
    """

    def __init__(self, table: Path) -> None:
        """`table`: the progress.csv, which a CsvLogger has opened; existing rows are copied from it."""
        self._table, self._path = table, table.with_suffix(".jsonl")
        self._waiting: list[str] = []  # rows not yet written because of a disk error
        self._keep_lost()
        self._copy()

    def _keep_lost(self) -> None:
        """Put an existing file aside that has more rows than the progress.csv, which has lost some."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            n_here = sum(1 for line in file if line.endswith(b"\n"))
        n_there = max(0, sum(1 for _ in _table(self._table)) - 1)
        if n_here > n_there:
            aside = unused_path(self._path.with_name(f"abandoned_{self._path.name}"), ".")
            self._path.replace(aside)
            _log.warning(f"{self._table.name} has only {n_there:,} of {n_here:,} rows; all are kept in {aside.name}")

    def _copy(self) -> None:
        table = _table(self._table)
        columns = next(table, [])
        rows = ({name: _number(cell) for name, cell in zip(columns, row, strict=True) if cell} for row in table)
        replace_file(self._path, self._bounded(map(_json_line, rows)))
        self._file = open_to_append(self._path)

    def _bounded(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines; a table from another person may have few rows and endless names, which each line repeats."""
        n_left = limit = _MAX_JSONL + _JSON_BYTES * self._table.stat().st_size
        for line in lines:
            n_left -= len(line)
            if n_left < 0:
                raise RecordError(f"{self._table} is too large: its rows take more than {limit:,} bytes as JSON")
            yield line

    def check(self) -> None:
        check_in_place(self._file)

    def write(self, row: Mapping[str, float]) -> None:
        """Append the row in one write; after a disk error, which is raised, together with the next one."""
        self._waiting.append(_json_line(row))
        append(self._file, "".join(self._waiting))
        self._waiting.clear()

    def truncate_after(self, env_steps: int) -> None:
        """Copy the rows of progress.csv, which was trimmed before."""
        self._file.close()
        self._copy()

    def close(self) -> None:
        self._file.close()


_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def _json_line(row: Mapping[str, float]) -> str:
    return json.dumps({k: v if math.isfinite(v) else _NOT_FINITE.get(v, "NaN") for k, v in row.items()}) + "\n"


def _number(cell: str) -> float:
    try:
        return int(cell)
    except ValueError:
        return number_in(cell)


class TensorBoardLogger(Logger):
    """An event file of scalars by env_steps, flushed with every row; without the thread of TensorBoard's own logger."""

    def __init__(self, directory: Path, config: Mapping[str, Any], name: str) -> None:
        # Imported here: 0.15 s that a program which only reads runs saves. torch.utils.tensorboard costs twice that.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary, self._directory = summary_pb2.Summary, directory
        self._file = _new_event_file(directory)
        self._records = RecordWriter(self._file)
        self._put(file_version="brain.Event:2")

    def check(self) -> None:
        check_in_place(self._file)

    def write(self, row: Mapping[str, float]) -> None:
        step = step_of(row)
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "env_steps"
        ]
        width, height, gif = read_gif(self._directory, step) if "eval/return_mean" in row else (0, 0, b"")
        if gif:
            image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
            values.append(self._summary.Value(tag="eval/video", image=image))
        self._put(step=step, summary=self._summary(value=values))

    def truncate_after(self, env_steps: int) -> None:
        """Write a session start at `env_steps` + 1: TensorBoard then hides later points of older files.

        It cannot hide an evaluation that was logged late: made again, it shows two equal points.
        """
        self._put(step=env_steps + 1, session_log=self._session(status=self._session.START))

    def _put(self, **fields: object) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        if not self._records.closed:
            self._records.close()


def read_gif(directory: Path, env_steps: int) -> tuple[int, int, bytes]:
    """Width, height and content of the GIF of the evaluation at `env_steps` of a run; empty if it was not filmed."""
    try:
        data = read_regular_file(film_path(directory / FILMS, env_steps).with_suffix(".gif"))
        width, height = struct.unpack_from("<HH", data, 6)
    except (ConfigError, struct.error):  # also if it is no GIF
        return 0, 0, b""
    return width, height, data


def _new_event_file(directory: Path) -> io.BufferedWriter:
    stamp = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    number = 0
    while True:
        try:
            return (directory / f"{stamp}.{number}").open("xb")
        except FileExistsError:
            number += 1


MakeLogger = Callable[..., Logger]  # (directory, config, name): that of a Logger's class

_TRACKERS = {  # by the name of the package that they need, which is also the name of the extra
    "wandb": "rlframe.integrations.wandb:WandbLogger",
    "mlflow": "rlframe.integrations.mlflow:MlflowLogger",
    "trackio": "rlframe.integrations.trackio:TrackioLogger",
}
_BUILT_IN = {"tensorboard": "rlframe.record.loggers:TensorBoardLogger", **_TRACKERS}
LOGGERS = tuple(_BUILT_IN)
DEFAULT_LOGGERS = ("tensorboard",)


def check_loggers(names: Sequence[str]) -> None:
    """Check names without importing the trackers' packages.

    Raises:
        ConfigError: an unknown name, a missing package, a name given twice, or a class that is not a Logger.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"loggers names {name} more than once")
        if name in _TRACKERS and not _is_installed(name):
            raise ConfigError(f'loggers={name} needs another package: pip install "rlframe[{name}]"')
        if name not in _BUILT_IN:
            _own(name)


def find_loggers(names: Sequence[str]) -> list[MakeLogger]:
    """The classes of loggers, or functions that make them. Raises ConfigError as `check_loggers`."""
    check_loggers(names)
    return [find_attribute(_BUILT_IN[name], "loggers") if name in _BUILT_IN else _own(name) for name in names]


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # without an origin, it is a folder such as ./wandb


def _own(name: str) -> MakeLogger:
    if ":" not in name:
        known = ", ".join(LOGGERS)
        raise ConfigError(f"loggers={name} is none of {known}, module:Class, ./file.py:Class{nearest(name, LOGGERS)}")
    found = find_attribute(name, "loggers")
    if isinstance(found, Logger):
        return partial(_given, found)
    return find_maker(name, "loggers", Logger, "rlframe.record.Logger")


def _given(logger: Logger, *_: Any) -> Logger:
    """A logger that was made already, in the place of its class."""
    return logger


def make_logger(make: MakeLogger, directory: Path, config: Mapping[str, Any], name: str) -> Logger:
    """A logger. Raises PartError if one of the user's own raises an exception."""
    if not is_own(make):
        return make(directory, config, name)
    with naming(f"logger {name_of(make)} cannot start"):
        return make(directory, config, name)


def close_logger(logger: Logger) -> None:
    """Close a logger. Raises as `naming_logger`."""
    with naming_logger(logger, "close"):
        logger.close()


@contextmanager
def naming_logger(logger: Logger, method: str) -> Iterator[None]:
    """Raise PartError for an exception of a logger; an OSError stays one, as the disk may be full."""
    try:
        with naming(f"logger {qualified_name(type(logger))} failed in {method}"):
            yield
    except PartError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
