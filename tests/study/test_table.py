"""The status table of a study, and the progress it reads from run directories."""

import dataclasses
import io
import json
import math
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from rlframe.study.record import ProgressReader, StudyProgress, newest_values
from rlframe.study.table import LiveStatusTable, PlainStatusTable, Row, format_table, progress_line

HALF = StudyProgress(env_steps=50_123, n_steps=1e5, return_=123.4, per_s=2345.6, elapsed_s=60.0, written=time.time())


NOTHING = StudyProgress()


def row(name: str, state: str, progress: StudyProgress = NOTHING, seconds: float = 0.0, reason: str = "") -> Row:
    return Row(name, state, 0, seconds, reason, progress)


def test_progress_is_the_newest_values_of_complete_rows_and_n_steps_of_the_run(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path)
    assert math.isnan(reader.read().fraction())
    (tmp_path / "params.json").write_text(json.dumps({"config": {"runner.n_steps": 1000}}))
    header = "env_steps,time/elapsed_s,eval/return_mean,episode/return_mean,time/env_steps_per_s"
    rows = f"{header}\n0,1.0,10.0,,\n250,31.0,,17.5,8.0\n"
    (tmp_path / "progress.csv").write_text(rows + "500,61.0,9")
    os.utime(tmp_path / "progress.csv", (time.time(), time.time()))
    progress = reader.read()
    assert (progress.env_steps, progress.fraction(), progress.return_, progress.per_s) == (250, 0.25, 10.0, 8.0)
    assert progress.left_s() == pytest.approx(93.0, abs=5.0)
    (tmp_path / "progress.csv").write_text(rows + "500,61.0,9.0,8.0,8.0\n")
    assert (reader.read().fraction(), reader.read().return_) == (0.5, 9.0)


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,x\n" + "".join(f"{step},{'1' * 90}\n" for step in range(5_000)))
    assert newest_values(path)["env_steps"] == 4_999


@pytest.mark.parametrize("text", ["", "env_steps,x", "env_steps,x\n", "env_steps,x\n1"])
def test_a_log_without_a_complete_row_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.csv").write_text(text)
    assert newest_values(tmp_path / "progress.csv") == {}


def test_the_time_left_is_estimated_from_finished_runs() -> None:
    rows = [row("a", "done", seconds=100.0), row("b", "waiting"), row("c", "waiting"), row("d", "waiting")]
    assert progress_line(rows, n_slots=2) == "1 of 4 runs done, 3 waiting; about 02:30 left"
    assert progress_line(rows[:1], n_slots=2) == "1 of 1 run done"
    assert progress_line(rows[1:], n_slots=2) == "0 of 3 runs done, 3 waiting"


@pytest.mark.parametrize(
    ("n_steps", "shown"), [(512, "0/512"), (99_999, "0/99.9k"), (999_999, "0/999k"), (1e7, "0/10M"), (2.5e9, "0/2.5G")]
)
def test_counts_of_steps_are_short_and_rounded_down(n_steps: float, shown: str) -> None:
    assert row("a", "running", StudyProgress(env_steps=0, n_steps=n_steps)).cells()[3] == shown


def test_the_table_has_a_line_per_run_and_the_reason_of_a_failure() -> None:
    text = format_table(
        [row("lr=1/run_0", "done", HALF, 61.0), row("lr=2/run_0", "failed", reason="exit status 1: no")]
    )
    assert text.splitlines() == [
        "run         state   slot  env_steps   return  steps/s  time   left",
        "lr=1/run_0  done    0     50.1k/100k  123.4   2,346    01:01",
        "lr=2/run_0  failed  0",
        "  exit status 1: no",
    ]


def test_without_a_terminal_the_table_is_printed_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    table = PlainStatusTable()
    half = row("run_0", "running", dataclasses.replace(HALF, written=time.time()))
    table.show([half, row("run_1", "running"), row("run_2", "done")], "1 of 3 runs done", last=False)
    line, *runs = capsys.readouterr().out.splitlines()
    assert line.split(" ", 1)[1] == "1 of 3 runs done"
    assert runs[0].startswith("  run_0 env_steps 50.1k/100k, return 123.4, 2,346 steps/s, ")
    assert len(runs) == 1  # the other has no row yet
    table.show([row("run_0", "done")], "1 of 1 run done", last=True)
    assert "run    state" in capsys.readouterr().out


def test_lines_without_a_terminal_become_less_frequent(capsys: pytest.CaptureFixture[str]) -> None:
    table = PlainStatusTable()
    intervals = [table.interval_s]
    for _ in range(40):
        table.show([row("run_0", "running")], "0 of 1 run done", last=False)
        intervals.append(table.interval_s)
    assert intervals[0] == 60.0
    assert intervals == sorted(intervals)
    assert intervals[-1] == 600.0


def test_a_terminal_shows_active_runs_first_and_all_runs_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=9, color_system=None)
    rows = [row(f"run_{i}", "done") for i in range(9)] + [row("run_9", "running", HALF), row("run_10", "failed")]
    table = LiveStatusTable(console)
    table.message("run_9 starts on slot 1")
    table.show(rows, "11 runs", last=False)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    table.show(rows, "11 runs", last=True)
    table.close()
    for text in (
        "run_9 starts on slot 1",
        "run_9",
        "run_10",
        "running",
        "50.1k/100k",
        "123.4",
        "2,346",
        "(7 not shown)",
    ):
        assert text in printed
    assert "run_2" not in printed
    assert "run_8" in console.file.getvalue()[len(printed) :]  # type: ignore[attr-defined]
