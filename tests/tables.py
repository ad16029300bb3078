"""A progress.csv as a table, for tests."""

from pathlib import Path

from rlframe.core.files import iter_csv


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and rows of a progress.csv."""
    lines = iter_csv(path)
    columns = next(lines, [])
    return columns, [dict(zip(columns, cells, strict=True)) for cells in lines]
