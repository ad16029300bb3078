"""The tables of a study: status, the progress that it reads from run directories, and summary."""

import csv
import dataclasses
import io
import json
import math
import os
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from rlframe.study.plan import CommandTemplate, PlannedRun, make_runs
from rlframe.study.record import ProgressReader, Status, StudyProgress, newest_values
from rlframe.study.table import (
    LiveStatusTable,
    PlainStatusTable,
    Row,
    format_summary,
    format_table,
    progress_line,
    summarize,
    summary_csv,
)

HALF = StudyProgress(steps=50_123, n_steps=1e5, return_=123.4, per_s=2345.6, elapsed_s=60.0, written=time.time())


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
    assert (progress.steps, progress.fraction(), progress.return_, progress.per_s) == (250, 0.25, 10.0, 8.0)
    assert progress.left_s() == pytest.approx(93.0, abs=5.0)
    (tmp_path / "progress.csv").write_text(rows + "500,61.0,9.0,8.0,8.0\n")
    assert (reader.read().fraction(), reader.read().return_) == (0.5, 9.0)
    longer = {"config": {"runner.n_steps": 1000}, "resumed": [{"changed": {"runner.n_steps": 2000}}]}
    (tmp_path / "params.json").write_text(json.dumps(longer))
    assert reader.read().fraction() == 0.25, "before it has a row of its own"


def test_the_progress_of_a_run_from_data_is_in_updates(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"config": {"runner.n_steps": 1000}}))
    (tmp_path / "progress.csv").write_text(
        "env_steps,updates,eval/return_mean,time/env_steps_per_s,time/updates_per_s\n0,0,1.0,,\n0,250,2.0,,80.0\n"
    )
    progress = ProgressReader(tmp_path).read()
    assert progress.fraction() == 0.25
    assert row("a", "running", progress).line() == "a updates 250/1k, return 2, 80 steps/s"
    assert row("a", "done", progress).result() == "a done, return 2 at updates 250, 00:00"


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,x\n")
    os.truncate(path, 1 << 40)  # empty for 1 TB, which no memory holds
    with path.open("a") as file:
        file.write("\n4998,1\n4999,2\n")
    assert newest_values(path) == {"env_steps": 4_999, "x": 2}


def test_the_rest_of_a_row_before_the_end_of_a_wide_log_is_no_row(tmp_path: Path) -> None:
    names = ["env_steps", "eval/return_mean", *(f"env/{k}" for k in range(4_000))]
    rows = [[str(step), "" if step else "7", *["0.12345"] * 4_000] for step in range(9)]
    (tmp_path / "progress.csv").write_text("".join(f"{','.join(cells)}\n" for cells in [names, *rows]))
    found = newest_values(tmp_path / "progress.csv")
    assert found["env_steps"] == 8
    assert "eval/return_mean" not in found


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
    assert row("a", "running", StudyProgress(steps=0, n_steps=n_steps)).cells()[3] == shown


def test_the_table_has_a_line_per_run_and_the_reason_of_a_failure() -> None:
    text = format_table(
        [
            row("lr=1/run_0", "done", HALF, 61.0),
            row("lr=2/run_0", "failed", reason="exit status 1: no"),
        ]
    )
    assert text.splitlines() == [
        "run         state   slot  env_steps   return  steps/s  time   left",
        "lr=1/run_0  done    0     50.1k/100k  123.4   2,346    01:01",
        "lr=2/run_0  failed  0",
        "  exit status 1: no",
    ]
    assert format_table([row("run_0", "interrupted", reason="its time is over")]).endswith("  its time is over")


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


def plan(study: Path, *settings: str, n_seeds: int) -> tuple[PlannedRun, ...]:
    varied = [{"algo.lr": lr} for lr in settings] or [{}]
    combinations = [{**setting, "seed": str(seed)} for setting in varied for seed in range(n_seeds)]
    make_run = partial(CommandTemplate(("train",), resumes_by_directory=True).make_run, study, "")
    return make_runs(make_run, {"env": "x"}, combinations)


def states(runs: tuple[PlannedRun, ...], *names: str) -> dict[str, Status]:
    return {run.name: Status(name) for run, name in zip(runs, names or ["done"] * len(runs), strict=True)}


def write(run: PlannedRun, *rows: str, header: str = "env_steps,episode/return_mean,eval/return_mean") -> None:
    run.directory.mkdir(parents=True)
    (run.directory / "progress.csv").write_text("\n".join([header, *rows]) + "\n")


def test_a_setting_has_the_mean_and_interval_of_its_last_returns(tmp_path: Path) -> None:
    runs = plan(tmp_path, "1", "2", n_seeds=2)
    for run, score in zip(runs, (10.0, 20.0, 5.0, 5.0), strict=True):
        write(run, "100,1.0,99.0", f"200,2.0,{score}", "300,3.0,")
    results = summarize(runs, states(runs))
    assert [(result.setting, result.mean(), result.best()) for result in results] == [
        ("lr=1", 15.0, 20.0),
        ("lr=2", 5.0, 5.0),
    ]
    assert [result.interval() for result in results] == [(10.0, 20.0), (5.0, 5.0)]
    assert [result.env_steps for result in results] == [300.0, 300.0]
    assert {result.metric for result in results} == {"eval/return_mean"}


def test_failed_runs_are_counted_and_have_no_score(tmp_path: Path) -> None:
    runs = plan(tmp_path, n_seeds=3)
    for run in runs[:2]:
        write(run, "100,1.0,7.0")
    (result,) = summarize(runs, states(runs, "done", "failed", "failed"))
    assert (result.setting, result.scores, result.n_failed) == ("", (7.0,), 2)
    assert all(map(math.isnan, result.interval()))


def test_a_setting_without_evaluation_has_the_return_of_training(tmp_path: Path) -> None:
    runs = plan(tmp_path, n_seeds=2)
    write(runs[0], "100,1.0", header="env_steps,episode/return_mean")
    write(runs[1], "100,3.0,9.0")
    (result,) = summarize(runs, states(runs))
    assert (result.metric, result.scores) == ("episode/return_mean", (1.0, 3.0))


def test_a_run_whose_directory_was_removed_is_no_seed(tmp_path: Path) -> None:
    runs = plan(tmp_path, n_seeds=2)
    write(runs[1], "100,3.0,9.0")
    (result,) = summarize(runs, states(runs))
    assert (result.metric, result.scores) == ("eval/return_mean", (9.0,))


def test_runs_of_an_own_file_that_was_edited_between_them_are_not_pooled_in_silence(tmp_path: Path) -> None:
    runs = plan(tmp_path, n_seeds=2)
    for seed, run in enumerate(runs):
        write(run, "100,3.0,9.0")
        params = {"config": {"algo": "a.py", "seed": seed, "threads": seed}, "code": {"a.py": f"{seed}" * 16}}
        (run.directory / "params.json").write_text(json.dumps(params))
    assert (
        format_summary(summarize(runs, states(runs))).splitlines()[-1].startswith("all runs: its runs differ in algo,")
    )


def test_the_table_and_the_file_have_a_row_per_setting(tmp_path: Path) -> None:
    runs = plan(tmp_path, "1", "2", n_seeds=2)
    for run, score in zip(runs[:3], (100.5, 200.5, 50.5), strict=True):
        write(run, f"20000,,{score}")
    results = summarize(runs, states(runs, "done", "done", "done", "failed"))
    assert format_summary(results).splitlines() == [
        "setting  seeds  return   95 % interval   best  env_steps  failed",
        "lr=1         2   150.5  [100.5, 200.5]  200.5     20,000",
        "lr=2         1   50.50                  50.50     20,000       1",
    ]
    assert list(csv.DictReader(io.StringIO(summary_csv(results)))) == [
        {
            "setting": "lr=1",
            "algo.lr": "1",
            "metric": "eval/return_mean",
            "n_seeds": "2",
            "mean": "150.5",
            "low": "100.5",
            "high": "200.5",
            "best": "200.5",
            "env_steps": "20000.0",
            "n_failed": "0",
        },
        {
            "setting": "lr=2",
            "algo.lr": "2",
            "metric": "eval/return_mean",
            "n_seeds": "1",
            "mean": "50.5",
            "low": "",
            "high": "",
            "best": "50.5",
            "env_steps": "20000.0",
            "n_failed": "1",
        },
    ]
