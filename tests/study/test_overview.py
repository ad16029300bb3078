"""A study's directory says how far its runs are, to the study command and to Python; a stranger's does no harm."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe import read_study
from rlframe.core.errors import ConfigError
from rlframe.record.directory import LOCK_FILE, this_process
from rlframe.study.__main__ import main
from rlframe.study.record import FILE
from tests.study.test_added import study_in
from tests.study.test_search import write_log


def set_states(directory: Path, *states: str) -> None:
    content = json.loads((directory / FILE).read_text())
    for entry, state in zip(content["runs"], states, strict=True):
        entry["state"], entry["slot"], entry["seconds"] = state, 0, 1.5
    (directory / FILE).write_text(json.dumps(content))


def test_the_rows_of_a_study_have_its_values_states_and_scores(tmp_path: Path) -> None:
    runs = study_in(tmp_path)
    for n, run in enumerate(runs[:3]):
        write_log(run, [1.0, 10.0 + n])
    set_states(tmp_path, "done", "failed", "running", "waiting")
    rows = read_study(tmp_path).runs
    assert [row["state"] for row in rows] == ["done", "failed", "interrupted", "waiting"], "no queue runs"
    assert [row["algo.learning_rate"] for row in rows] == [1e-3, 1e-3, 3e-4, 3e-4]
    assert [row["seed"] for row in rows] == [0, 1, 0, 1]
    assert [row["score"] for row in rows[:3]] == [10.0, 11.0, 12.0]
    assert math.isnan(rows[3]["score"])
    assert rows[0]["setting"] == "learning_rate=1e-3"


def test_the_score_of_finished_runs_is_that_of_evaluations_whatever_others_have_logged(tmp_path: Path) -> None:
    runs = study_in(tmp_path)
    for run in runs[:2]:
        write_log(run, [1.0, 400.0])
    write_log(runs[2], [20.0], "episode/return_mean")
    set_states(tmp_path, "done", "done", "failed", "waiting")
    scores = [row["score"] for row in read_study(tmp_path).runs]
    assert scores[:2] == [400.0, 400.0]
    assert all(map(math.isnan, scores[2:]))


def test_the_curves_of_a_study_are_the_rows_of_all_logs(tmp_path: Path) -> None:
    runs = study_in(tmp_path)
    write_log(runs[0], [1.0, 2.0])
    write_log(runs[2], [3.0], "episode/return_mean")
    curves = read_study(tmp_path).curves()
    assert curves["run"].tolist() == ["learning_rate=1e-3/run_0"] * 2 + ["learning_rate=3e-4/run_0"]
    np.testing.assert_array_equal(curves["eval/return_mean"], [1.0, 2.0, np.nan])
    np.testing.assert_array_equal(curves["episode/return_mean"], [np.nan, np.nan, 3.0])
    assert curves["env_steps"].tolist() == [0.0, 100.0, 0.0]


def test_the_command_shows_the_runs_and_whether_a_queue_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = study_in(tmp_path)
    write_log(runs[0], [1.0, 10.0])
    set_states(tmp_path, "done", "running", "waiting", "waiting")
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 4 runs done, 1 interrupted, 2 waiting" in printed
    assert "no queue runs here" in printed
    assert "learning_rate=1e-3      1      10" in printed
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(this_process())))
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 4 runs done, 1 running, 2 waiting" in printed
    assert f"the queue runs: process {this_process().pid}" in printed


def test_watching_ends_with_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study_in(tmp_path)
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(this_process())))
    waits = []

    def ends(seconds: float) -> None:
        waits.append(seconds)
        (tmp_path / LOCK_FILE).unlink()

    monkeypatch.setattr("rlframe.study.__main__.time.sleep", ends)
    assert main([str(tmp_path), "watch=true"]) == 0
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "is not a study: it has no experiment.json"),
        ([".", "ad", "seed=3"], "'ad' is not add, the only word after DIR; did you mean add?"),
        ([".", "seed=3"], "unknown key 'seed'; to add a run: DIR add seed=..."),
        (["seed=3"], "seed=3 is not a directory; the first word is that of the study"),
        ([".", "watch=maybe"], "watch='maybe' must be true or false"),
    ],
)
def test_wrong_words_of_the_command(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../etc/run_0"},
        {"name": "/etc/run_0"},
        {"name": 3},
        {"state": "\x1b[2J"},
        {"seconds": "x"},
        {"slot": None},
    ],
    ids=str,
)
def test_a_record_of_a_stranger_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    study_in(tmp_path)
    content = json.loads((tmp_path / FILE).read_text())
    content["runs"][0] |= changes
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"experiment\.json is damaged"):
        read_study(tmp_path)
