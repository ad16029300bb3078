"""progress.csv and event files: no lost, incomplete or repeated rows."""

import json
import math
import os
from pathlib import Path

import pytest

from rlframe.core.errors import RecordError
from rlframe.record import writers
from rlframe.record.writers import CsvWriter, JsonlWriter, TensorBoardWriter
from tests.tables import read_csv


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_late_column_is_added_and_earlier_rows_keep_their_cells(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    writer = CsvWriter(file)
    writer.write({"env_steps": 10, "a": 0.5})
    writer.write({"env_steps": 20, "late,name": 1.0})
    writer.write({"env_steps": 30, "a": 1e-300, "late,name": float("nan")})
    writer.close()
    assert file.read_text() == 'env_steps,a,"late,name"\n10,0.5,\n20,,1.0\n30,1e-300,nan\n'


def test_a_row_is_in_the_file_before_anything_is_closed(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path / "progress.csv")
    writer.write({"env_steps": 10, "a": 0.1})
    assert (tmp_path / "progress.csv").read_text().endswith("10,0.1\n")
    writer.close()
    writer.close()


def test_an_incomplete_last_line_is_dropped_and_the_file_continued(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text("env_steps,a\n10,0.5\n20,0.")
    writer = CsvWriter(file)
    writer.write({"env_steps": 20, "a": 0.75})
    writer.close()
    assert file.read_text() == "env_steps,a\n10,0.5\n20,0.75\n"


def test_a_damaged_header_is_an_error_and_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text('"env_steps,loss\n10,0.5\n20,0.25\n')
    with pytest.raises(RecordError, match=r"progress.csv is damaged: its first line names no column env_steps"):
        CsvWriter(path)
    assert path.read_text().endswith("20,0.25\n")


def test_a_file_torn_in_its_header_starts_anew(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text("env_st")
    writer = CsvWriter(file)
    writer.write({"env_steps": 20, "a": 0.75})
    writer.close()
    assert file.read_text() == "env_steps,a\n20,0.75\n"


def test_trimming_drops_rows_after_the_step_and_unreadable_ones(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text("env_steps,a\n10,1.0\n20,2.0\n\0\0,x\n30,3.0\n")
    writer = CsvWriter(file)
    writer.trim(20)
    writer.write({"env_steps": 25, "a": 2.5})
    writer.close()
    assert [row["env_steps"] for row in read_csv(file)[1]] == ["10", "20", "25"]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    writer = CsvWriter(file)
    writer.write({"env_steps": 10, "a": 1.0})
    whole = file.read_text()
    import resource
    import signal

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 3, limits[1]))
        with pytest.raises(OSError, match="bytes written"):
            writer.write({"env_steps": 20, "a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        writer.close()
    assert file.read_text() == whole


def test_a_kill_while_a_column_is_added_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress.csv"
    writer = CsvWriter(file)
    writer.write({"env_steps": 10, "a": 1.0})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.write({"env_steps": 20, "b": 2.0})
    writer.close()
    assert file.read_text() == "env_steps,a\n10,1.0\n"


def test_tensorboard_reads_the_scalars_by_env_steps(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, {}, "run")
    writer.write({"env_steps": 10, "a/b": 0.5})
    writer.write({"env_steps": 20, "a/b": 1.5})
    assert scalars(tmp_path, "a/b") == [(10, 0.5), (20, 1.5)]  # before it is closed
    writer.close()


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path, {}, "run")
    for step in (10, 20, 30):
        first.write({"env_steps": step, "a": 1.0})
    first.close()
    second = TensorBoardWriter(tmp_path, {}, "run")
    second.trim(20)
    second.write({"env_steps": 30, "a": 2.0})
    second.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    assert scalars(tmp_path, "a") == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_damaged_line_costs_itself_and_no_line_after_it(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    writer = CsvWriter(path)
    for step in range(1, 4):
        writer.write({"env_steps": step, "x": 0.5})
    writer.close()
    path.write_bytes(path.read_bytes().replace(b"\n2,", b'\n"2,').replace(b"3,", b"3," + b"9" * 200_000 + b",", 1))
    assert [row["env_steps"] for row in read_csv(path)[1]] == ["1"]
    writer = CsvWriter(path)
    writer.write({"env_steps": 4, "x": 1.0})
    writer.close()
    assert [row["env_steps"] for row in read_csv(path)[1]] == ["1", "4"]


def test_trimming_drops_all_rows_from_the_first_later_one_on(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,algo/loss,eval/return_mean\n10,1.0,\n10,,5.0\n20,2.0,\n10,,6.0\n30,3.0,\n20,,7.0\n")
    writer = CsvWriter(path)
    writer.trim(20)
    writer.close()
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
    table = CsvWriter(path)
    lines = JsonlWriter(path)
    for row in rows[:2]:
        table.write(row)
        lines.write(row)
    table.write(rows[2])  # killed here
    table.close()
    lines.close()
    assert repr(strict((tmp_path / "progress.jsonl").read_text())) == repr(as_floats(rows[:2]))
    table = CsvWriter(path)
    lines = JsonlWriter(path)
    for writer in (table, lines):
        writer.trim(3)
        writer.close()
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
    table = CsvWriter(tmp_path / "progress.csv")
    lines = JsonlWriter(tmp_path / "progress.csv")
    for writer in (table, lines):
        writer.write({"env_steps": 20, "a": 1.0})
        writer.close()
    assert strict((tmp_path / "progress.jsonl").read_text()) == [{"env_steps": 10, "a": 0.5}, {"env_steps": 20, "a": 1}]


def test_a_strangers_table_cannot_grow_without_end_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.csv"
    path.write_text(f"env_steps,{'x' * 5_000}\n" + "1,1\n" * 1_000)
    assert writers._MAX_JSONL == 1 << 28
    monkeypatch.setattr(writers, "_MAX_JSONL", 1 << 20)
    with pytest.raises(RecordError, match="its rows take more than 1,048,576 bytes as JSON"):
        JsonlWriter(path)
