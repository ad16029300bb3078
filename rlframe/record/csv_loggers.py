"""Tables of a run: progress.csv, the same as progress.jsonl, and episodes.csv. Used by `record.run`."""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, zip_longest
from pathlib import Path

from rlframe.core.errors import RecordError, pluralize
from rlframe.core.files import (
    append,
    as_csv,
    drop_torn_line,
    iter_csv,
    number_in,
    open_to_append,
    parse_json,
    replace_file,
)
from rlframe.record.loggers import FileLogger
from rlframe.record.rank_state import unused_path

_log = logging.getLogger("rlframe")
_MAX_JSONL, _JSON_BYTES = 1 << 28, 32  # bytes that are copied when a run is resumed, and more for each of its table
_ROWS_AT_ONCE = 1_000
_CLOCKS = ("env_steps", "updates")
_MAX_OWN = 1 << 34  # bytes of a table that a run writes: some 4e8 episodes


class CsvLogger(FileLogger):
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
        """Damaged lines are dropped too; the file as it was is kept then, and if a run that has steps begins anew."""
        end, n_damaged = self._end(env_steps)
        begins_anew = env_steps < 0 and any(step > 0 for step, _ in self._steps())
        if n_damaged or begins_anew:
            shutil.copyfile(self._path, aside := _place_aside(self._path))
            what = "lines of a run that begins anew" if begins_anew else pluralize(n_damaged, "damaged line")
            _log.warning(f"{self._path.name} has {what}; all are kept in {aside.name}")
        self._replace(self._columns, (row for step, row in islice(self._steps(), end) if step <= env_steps))
        self._reopen()

    def _end(self, env_steps: int) -> tuple[int, int]:
        """How many rows come before the first that is later than `env_steps`, and how many lines are damaged.

        A row that seems later is damaged if one follows which is not, and goes on from those before; evaluations may
        follow late.
        """
        of_interval = [i for i, name in enumerate(self._columns) if not name.startswith(("eval/", *_CLOCKS))]
        n_rows, end, last = 0, 0, -math.inf
        n_damaged, n_since, is_past = 0, 0, False  # n_since: that may be damaged, since the last that is kept
        for n_rows, (step, row) in enumerate(self._steps(), 1):
            is_evaluation = not any(row[at] for at in of_interval)
            if step <= env_steps and not (is_past and (is_evaluation or step < last)):
                end, n_damaged, n_since, is_past = n_rows, n_damaged + n_since, 0, False
                last = last if is_evaluation else step
            else:
                n_since += not step <= env_steps
                is_past |= step > env_steps
        return end, n_damaged + self._n_lines() - n_rows - bool(self._columns)

    def _n_lines(self) -> int:
        with self._path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

    def _steps(self) -> Iterator[tuple[float, list[str]]]:
        """Rows, each with where it stands, as `step_of`; NaN if that cell is damaged."""
        rows = _table(self._path)
        columns = next(rows, [])
        clocks = [columns.index(name) for name in _CLOCKS if name in columns]
        for row in rows:
            yield number_in(row[clocks[0]]) or number_in(row[clocks[-1]] or "0"), row

    def _replace(self, columns: list[str], rows: Iterable[Sequence[str]]) -> None:
        replace_file(self._path, _as_csv(chain([columns] if columns else [], rows)))
        self._columns = columns

    def _reopen(self) -> None:
        self._file.close()
        self._file = open_to_append(self._path)


def _table(path: Path) -> Iterator[list[str]]:
    """`iter_csv` of a file that this run writes, which is as long as its episodes are many."""
    return iter_csv(path, _MAX_OWN)


def _rows(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[list[str]]:
    return ([row.get(name, "") for name in columns] for row in rows)


def _as_csv(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The text of rows, in pieces of many rows."""
    left = iter(rows)
    while some := list(islice(left, _ROWS_AT_ONCE)):
        yield as_csv(some)


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, int) else repr(float(value))


class JsonlLogger(FileLogger):
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
        """Put an existing file aside if it has rows that the progress.csv has lost, or has otherwise."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            complete = (line for line in file if line.endswith(b"\n"))
            is_whole = all(_is_row(line, row) for line, row in zip_longest(complete, self._lines()) if line)
        if not is_whole:
            self._path.replace(aside := _place_aside(self._path))
            _log.warning(f"{self._table.name} and {self._path.name} differ: the latter is kept as {aside.name}")

    def _lines(self) -> Iterator[str]:
        """Of the rows of progress.csv."""
        rows = _table(self._table)
        columns = next(rows, [])
        return (_json_line({n: _number(cell) for n, cell in zip(columns, row, strict=True) if cell}) for row in rows)

    def _copy(self) -> None:
        replace_file(self._path, self._bounded(self._lines()))
        self._file = open_to_append(self._path)

    def _bounded(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines; a table from another person may have few rows and endless names, which each line repeats."""
        n_left = limit = _MAX_JSONL + _JSON_BYTES * self._table.stat().st_size
        for line in lines:
            n_left -= len(line)
            if n_left < 0:
                raise RecordError(f"{self._table} is too large: its rows take more than {limit:,} bytes as JSON")
            yield line

    def write(self, row: Mapping[str, float]) -> None:
        """Append the row in one write; after a disk error, which is raised, together with the next one."""
        self._waiting.append(_json_line(row))
        append(self._file, "".join(self._waiting))
        self._waiting.clear()

    def truncate_after(self, env_steps: int) -> None:
        """Copy the rows of progress.csv, which was trimmed before."""
        self._file.close()
        self._copy()


_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def _json_line(row: Mapping[str, float]) -> str:
    return json.dumps({k: v if math.isfinite(v) else _NOT_FINITE.get(v, "NaN") for k, v in row.items()}) + "\n"


def _is_row(line: bytes, row: str | None) -> bool:
    """Whether a line of JSON is that of a row, in whatever order."""
    if row is None or line == row.encode():
        return row is not None
    with suppress(ValueError):
        return bool(parse_json(line) == json.loads(row))
    return False


def _place_aside(path: Path) -> Path:
    return unused_path(path.with_name(f"abandoned_{path.name}"), ".")


def _number(cell: str) -> float:
    try:
        return int(cell)
    except ValueError:
        return number_in(cell)
