"""progress.csv, progress.jsonl and episodes.csv: no lost, incomplete or repeated rows, and what is damaged is kept."""

import json
import math
import os
from pathlib import Path

import pytest

from rlframe.core import files
from rlframe.core.errors import ConfigError, RecordError
from rlframe.record import csv_loggers
from rlframe.record.csv_loggers import CsvLogger, JsonlLogger
from tests.tables import read_csv


def test_a_late_column_is_added_and_earlier_rows_keep_their_cells(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    logger = CsvLogger(file)
    logger.write({"env_steps": 10, "a": 0.5})
    logger.write({"env_steps": 20, "late,name": 1.0})
    logger.write({"env_steps": 30, "a": 1e-300, "late,name": float("nan")})
    logger.close()
    assert file.read_text() == 'env_steps,a,"late,name"\n10,0.5,\n20,,1.0\n30,1e-300,nan\n'


def test_a_row_is_in_the_file_before_anything_is_closed(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "progress.csv")
    logger.write({"env_steps": 10, "a": 0.1})
    assert (tmp_path / "progress.csv").read_text().endswith("10,0.1\n")
    logger.close()
    logger.close()


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("env_steps,a\n10,0.5\n20,0.", "env_steps,a\n10,0.5\n"),
        (f"env_steps,a\n10,0.5\n{'2' * 200_000}", "env_steps,a\n10,0.5\n"),
        ("env_st", "env_steps,a\n"),
    ],
    ids=["short", "of several blocks", "header"],
)
def test_an_incomplete_last_line_is_dropped_and_the_file_continued(before: str, kept: str, tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text(before)
    logger = CsvLogger(file)
    logger.write({"env_steps": 20, "a": 0.75})
    logger.close()
    assert file.read_text() == f"{kept}20,0.75\n"


def test_a_damaged_header_is_an_error_and_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text('"env_steps,loss\n10,0.5\n20,0.25\n')
    with pytest.raises(RecordError, match=r"progress.csv is damaged: its first line names no column env_steps"):
        CsvLogger(path)
    assert path.read_text().endswith("20,0.25\n")


def test_trimming_drops_rows_after_the_step_and_unreadable_ones(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text("env_steps,a\n10,1.0\n20,2.0\n\0\0,x\n30,3.0\n")
    logger = CsvLogger(file)
    logger.truncate_after(20)
    logger.write({"env_steps": 25, "a": 2.5})
    logger.close()
    assert [row["env_steps"] for row in read_csv(file)[1]] == ["10", "20", "25"]


def test_a_table_longer_than_one_from_another_person_may_be_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.iter_csv, "__defaults__", (100,))
    file = tmp_path / "episodes.csv"
    file.write_text("env_steps,a\n" + "10,1.0\n" * 50)
    with pytest.raises(ConfigError, match="362 bytes, more than the limit of 100"):
        next(files.iter_csv(file))
    logger = CsvLogger(file)
    logger.write({"env_steps": 20, "b": 2.0})
    logger.truncate_after(20)
    logger.close()
    assert file.read_text() == "env_steps,a,b\n" + "10,1.0,\n" * 50 + "20,,2.0\n"


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    logger = CsvLogger(file)
    logger.write({"env_steps": 10, "a": 1.0})
    whole = file.read_text()
    import resource
    import signal

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 3, limits[1]))
        with pytest.raises(OSError, match="bytes written"):
            logger.write({"env_steps": 20, "a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        logger.close()
    assert file.read_text() == whole


def test_a_kill_while_a_column_is_added_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress.csv"
    logger = CsvLogger(file)
    logger.write({"env_steps": 10, "a": 1.0})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        logger.write({"env_steps": 20, "b": 2.0})
    logger.close()
    assert file.read_text() == "env_steps,a\n10,1.0\n"


def test_a_damaged_line_costs_itself_and_no_line_after_it(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    logger = CsvLogger(path)
    for step in range(1, 4):
        logger.write({"env_steps": step, "x": 0.5})
    logger.close()
    path.write_bytes(path.read_bytes().replace(b"\n2,", b'\n"2,').replace(b"3,", b"3," + b"9" * 200_000 + b",", 1))
    assert [row["env_steps"] for row in read_csv(path)[1]] == ["1"]
    logger = CsvLogger(path)
    logger.write({"env_steps": 4, "x": 1.0})
    logger.close()
    assert [row["env_steps"] for row in read_csv(path)[1]] == ["1", "4"]


def test_trimming_drops_all_rows_from_the_first_later_one_on(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,algo/loss,eval/return_mean\n10,1.0,\n10,,5.0\n20,2.0,\n10,,6.0\n30,3.0,\n20,,7.0\n")
    logger = CsvLogger(path)
    logger.truncate_after(20)
    logger.close()
    assert path.read_text() == "env_steps,algo/loss,eval/return_mean\n10,1.0,\n10,,5.0\n20,2.0,\n10,,6.0\n"


def strict(text: str) -> list[dict[str, float]]:
    """The rows of a progress.jsonl, read by a parser that knows no NaN; strings become numbers."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return [{name: float(value) for name, value in row.items()} for row in rows]


def test_jsonl_has_the_rows_of_csv_also_after_a_kill_between_the_two_and_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    rows: list[dict[str, float]] = [
        {"env_steps": 1, "a": 0.1, "b": math.nan},
        {"env_steps": 2, "late": math.inf, "b": -math.inf},
        {"env_steps": 3, "a": 1e-300, "b": 7},
    ]
    table = CsvLogger(path)
    lines = JsonlLogger(path)
    for row in rows[:2]:
        table.write(row)
        lines.write(row)
    table.write(rows[2])  # killed here
    table.close()
    lines.close()
    assert repr(strict((tmp_path / "progress.jsonl").read_text())) == repr(as_floats(rows[:2]))
    table = CsvLogger(path)
    lines = JsonlLogger(path)
    for logger in (table, lines):
        logger.truncate_after(3)
        logger.close()
    assert by_name(strict((tmp_path / "progress.jsonl").read_text())) == by_name(as_floats(rows))
    cells = [{name: float(cell) for name, cell in row.items() if cell} for row in read_csv(path)[1]]
    assert by_name(strict((tmp_path / "progress.jsonl").read_text())) == by_name(cells)


def as_floats(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in row.items()} for row in rows]


def by_name(rows: list[dict[str, float]]) -> str:
    """Text that is equal for equal rows, NaN included, in any order of columns."""
    return repr([sorted(row.items()) for row in rows])


def test_a_torn_line_of_jsonl_is_replaced_on_resume(tmp_path: Path) -> None:
    (tmp_path / "progress.csv").write_text("env_steps,a\n10,0.5\n")
    (tmp_path / "progress.jsonl").write_text('{"env_steps": 10, "a": 0.5}\n{"env_st')
    table = CsvLogger(tmp_path / "progress.csv")
    lines = JsonlLogger(tmp_path / "progress.csv")
    for logger in (table, lines):
        logger.write({"env_steps": 20, "a": 1.0})
        logger.close()
    assert strict((tmp_path / "progress.jsonl").read_text()) == [{"env_steps": 10, "a": 0.5}, {"env_steps": 20, "a": 1}]


def test_a_strangers_table_cannot_grow_without_end_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.csv"
    path.write_text(f"env_steps,{'x' * 5_000}\n" + "1,1\n" * 1_000)
    assert csv_loggers._MAX_JSONL == 1 << 28
    monkeypatch.setattr(csv_loggers, "_MAX_JSONL", 1 << 20)
    with pytest.raises(RecordError, match="its rows take more than 1,336,928 bytes as JSON"):
        JsonlLogger(path)


def test_rows_that_the_csv_has_lost_are_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "progress.csv"
    table, lines = CsvLogger(path), JsonlLogger(path)
    for step in (0, 100, 200):
        table.write({"env_steps": step})
        lines.write({"env_steps": step})
    lines.close()
    table.close()
    JsonlLogger(path).close()
    assert not (aside := tmp_path / "abandoned_progress.jsonl").exists()
    before = path.with_suffix(".jsonl").read_text()
    path.write_text("env_steps\n0\n1")
    JsonlLogger(path).close()
    assert aside.read_text() == before
    assert "progress.csv and progress.jsonl differ: the latter is kept as abandoned_progress.jsonl" in caplog.text
    path.write_text("env_steps\n")
    JsonlLogger(path).close()
    assert aside.read_text() == before, "a second loss does not take the place of the first"


def test_a_cell_that_the_csv_has_otherwise_keeps_the_jsonl_aside(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,b,a\n0,1.0,\n100,nan,inf\n")
    path.with_suffix(".jsonl").write_text(
        '{"env_steps": 0, "b": 1.0}\n{"a": "Infinity", "env_steps": 100, "b": "NaN"}\n'
    )
    JsonlLogger(path).close()
    assert not (aside := tmp_path / "abandoned_progress.jsonl").exists(), "the same rows, in whatever order"
    path.write_text("env_steps,b,a\n0,1#0,\n100,nan,inf\n")
    JsonlLogger(path).close()
    assert '"b": 1.0' in aside.read_text()


@pytest.mark.parametrize(
    ("damaged", "kept", "n_damaged"),
    [
        ("env_steps,a\n0,1.0\n9100,2.0\n20,3.0\n30,4.0\n", "env_steps,a\n0,1.0\n20,3.0\n", 1),
        ("env_steps,a\n0,1.0\n1#0,2.0\n20,3.0\n30,4.0\n", "env_steps,a\n0,1.0\n20,3.0\n", 1),
        ("env_steps,a,b\n0,1.0\n10,2.0\n20,3.0,\n30,4.0\n", "env_steps,a,b\n20,3.0,\n", 3),
        ("env_steps,a,eval/b\n0,1,\n90,,3\n20,3,\n30,4,\n10,,7\n", "env_steps,a,eval/b\n0,1,\n20,3,\n", 1),
        ("env_steps,a\n0,1\n10,2\n1e400,3\n20,4\n30,5\n4,6\n", "env_steps,a\n0,1\n10,2\n20,4\n", 1),
    ],
    ids=["later", "no number", "header", "late evaluation", "earlier, after the end"],
)
def test_a_damaged_line_costs_itself_alone_on_resume_and_the_file_is_kept(
    damaged: str, kept: str, n_damaged: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "episodes.csv"
    path.write_text(damaged)
    logger = CsvLogger(path)
    logger.truncate_after(20)
    logger.close()
    assert path.read_text() == kept
    assert (tmp_path / "abandoned_episodes.csv").read_text() == damaged
    assert f"episodes.csv has {n_damaged} damaged line" in caplog.text
    logger = CsvLogger(path)
    logger.truncate_after(20)
    logger.close()
    assert [each.name for each in tmp_path.iterdir() if each != path] == ["abandoned_episodes.csv"], "kept once"


def test_a_byte_order_mark_changes_no_column(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_bytes(b"\xef\xbb\xbfenv_steps,a\n10,1.0\n")
    assert read_csv(path)[0] == ["env_steps", "a"]


def test_a_table_of_many_rows_may_be_as_long_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,algo/policy_loss\n" + "123456,0.123456\n" * 1_000)
    monkeypatch.setattr(csv_loggers, "_MAX_JSONL", 1 << 10)
    JsonlLogger(path).close()
    assert (tmp_path / "progress.jsonl").stat().st_size > 3 * path.stat().st_size
