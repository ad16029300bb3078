"""The files a row of metrics goes to: progress.csv and TensorBoard's event files."""

import csv
import errno
import io
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlframe.core.files import read_csv as read_csv


class Writer(ABC):
    """Takes one row of metrics a log interval. Owned by a Run, which closes it."""

    @abstractmethod
    def write(self, row: Mapping[str, float]) -> None:
        """Keep a row; it has `env_steps`."""

    @abstractmethod
    def trim(self, env_steps: int) -> None:
        """Forget the rows after `env_steps`: the run goes on from there."""

    @abstractmethod
    def close(self) -> None:
        """Flush and let go; harmless when repeated."""


class CsvWriter(Writer):
    """progress.csv: whole lines only, a column for every name that ever came, in the order of their coming."""

    def __init__(self, path: Path) -> None:
        """Goes on with the file that is there; a last line that a crash has torn is dropped."""
        self._path = path
        self._columns: list[str] = []
        self._waiting: list[dict[str, str]] = []  # rows that the disk has refused, and the newest
        if os.path.lexists(path):
            self._replace(*read_csv(path))
        self._file = path.open("ab", buffering=0)

    def write(self, row: Mapping[str, float]) -> None:
        """One line in one write. A new name rewrites the file with one more column, empty in the rows before.

        A row that the disk refuses is kept, and written before the next.

        Raises:
            OSError: the disk refuses.
        """
        self._waiting.append({name: _cell(value) for name, value in row.items()})
        columns = list(dict.fromkeys([*self._columns, *(name for each in self._waiting for name in each)]))
        if columns != self._columns:
            self._replace(columns, read_csv(self._path)[1] + self._waiting)
            self._reopen()
        else:
            self._append(b"".join(self._line(each) for each in self._waiting))
        self._waiting.clear()

    def _append(self, lines: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        n_written = self._file.write(lines)
        if n_written != len(lines):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, f"{self._path}: the disk took {n_written} of {len(lines)} bytes; is it full?")

    def trim(self, env_steps: int) -> None:
        """Drop the rows after `env_steps`, and those whose step is unreadable."""
        columns, rows = read_csv(self._path)
        self._replace(columns, [row for row in rows if _step(row) <= env_steps])
        self._reopen()

    def _replace(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.new")
        lines = [_line(columns), *(_line(row.get(name, "") for name in columns) for row in rows)] if columns else []
        try:
            temporary.unlink(missing_ok=True)  # which a link might lead elsewhere
            with temporary.open("xb") as file:
                file.write(b"".join(lines))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._columns = columns

    def _line(self, row: Mapping[str, str]) -> bytes:
        return _line(row.get(name, "") for name in self._columns)

    def _reopen(self) -> None:
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file; every row is in it already."""
        self._file.close()


def _line(cells: Iterable[str]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue().encode()


def _cell(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _step(row: Mapping[str, str]) -> float:
    try:
        step = float(row.get("env_steps", ""))
    except ValueError:
        return math.inf
    return step if math.isfinite(step) else math.inf


class TensorBoardWriter(Writer):
    """An event file of scalars by env_steps; flushed with every row. No thread, unlike TensorBoard's own writer."""

    def __init__(self, directory: Path) -> None:
        # Here, not at the top: 0.15 s that a program which only reads runs need not wait for. TensorBoard's record
        # writer and messages alone; torch.utils.tensorboard costs as much again and pulls in far more.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._records = RecordWriter(_new_event_file(directory))
        self._put(file_version="brain.Event:2")

    def write(self, row: Mapping[str, float]) -> None:
        """Every metric of the row as a scalar at its env_steps."""
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "env_steps"
        ]
        self._put(step=int(row["env_steps"]), summary=self._summary(value=values))

    def trim(self, env_steps: int) -> None:
        """A session start just after `env_steps`: TensorBoard then hides what older files have from there on."""
        self._put(step=env_steps + 1, session_log=self._session(status=self._session.START))

    def _put(self, **fields: object) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file; every row is in it already."""
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
