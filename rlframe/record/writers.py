"""Writers of metric rows: progress.csv and TensorBoard event files. Used by `record.run`."""

import csv
import errno
import io
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from rlframe.core.errors import RecordError
from rlframe.core.files import iter_csv
from rlframe.record.directory import replace_file


class Writer(ABC):
    """Writes one row of metrics per log interval. Owned by a Run, which closes it."""

    @abstractmethod
    def write(self, row: Mapping[str, float]) -> None:
        """Write a row, which has `env_steps`."""

    @abstractmethod
    def trim(self, env_steps: int) -> None:
        """Drop the rows after `env_steps`, from where the run resumes."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close; may be called twice."""


class CsvWriter(Writer):
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
            rows = iter_csv(path)
            columns = next(rows, [])
            if columns and "env_steps" not in columns:
                raise RecordError(
                    f"{path} is damaged: its first line names no column env_steps; mend that line, or move the file "
                    f"away, and a new one is begun"
                )
            self._replace(columns, rows)
        self._file = path.open("ab", buffering=0)

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
            earlier = iter_csv(self._path)
            added = [""] * (len(columns) - len(next(earlier, [])))
            self._replace(columns, chain((row + added for row in earlier), _rows(columns, self._waiting)))
            self._reopen()
        else:
            self._append("".join(map(_line, _rows(columns, self._waiting))).encode())
        self._waiting.clear()

    def _append(self, lines: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        n_written = self._file.write(lines)
        if n_written != len(lines):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, f"{self._path}: {n_written} of {len(lines)} bytes written; is the disk full?")

    def trim(self, env_steps: int) -> None:
        rows = iter_csv(self._path)
        columns = next(rows, [])
        at = columns.index("env_steps") if columns else 0
        self._replace(columns, (row for row in rows if _step(row[at]) <= env_steps))
        self._reopen()

    def _replace(self, columns: list[str], rows: Iterable[Sequence[str]]) -> None:
        replace_file(self._path, "".join(map(_line, chain([columns], rows))) if columns else "")
        self._columns = columns

    def _reopen(self) -> None:
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()


def _rows(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[list[str]]:
    return ([row.get(name, "") for name in columns] for row in rows)


def _line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _step(cell: str) -> float:
    try:
        step = float(cell)
    except ValueError:
        return math.inf
    return step if math.isfinite(step) else math.inf


class TensorBoardWriter(Writer):
    """An event file of scalars by env_steps, flushed with every row; without the thread of TensorBoard's own writer."""

    def __init__(self, directory: Path) -> None:
        # Imported here: 0.15 s that a program which only reads runs saves. torch.utils.tensorboard costs twice that.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._records = RecordWriter(_new_event_file(directory))
        self._put(file_version="brain.Event:2")

    def write(self, row: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "env_steps"
        ]
        self._put(step=int(row["env_steps"]), summary=self._summary(value=values))

    def trim(self, env_steps: int) -> None:
        """Write a session start at `env_steps` + 1: TensorBoard then hides later points of older files."""
        self._put(step=env_steps + 1, session_log=self._session(status=self._session.START))

    def _put(self, **fields: object) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        if not self._records.closed:
            self._records.close()


def _new_event_file(directory: Path) -> io.BufferedWriter:
    stamp = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    number = 0
    while True:
        try:
            return (directory / f"{stamp}.{number}").open("xb")
        except FileExistsError:
            number += 1
