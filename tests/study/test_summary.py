"""The summary of a study, from the logs of its runs."""

import csv
import io
import math
from functools import partial
from pathlib import Path

from rlframe.study.plan import CommandTemplate, PlannedRun, make_runs
from rlframe.study.record import Status
from rlframe.study.summary import format_summary, summarize, summary_csv


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
