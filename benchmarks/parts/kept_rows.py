"""The CSV file of a benchmark that keeps what it has measured, row by row, and goes on where it stopped."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def rows_in(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows, by column; a file that is not there is made, with its header alone."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join(columns) + "\n", encoding="utf-8")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Append rows to a file that is there."""
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writerows(rows)


def has(rows: Iterable[Mapping[str, str]], **values: str) -> bool:
    """Whether one of the rows has these values."""
    return any(values.items() <= row.items() for row in rows)
