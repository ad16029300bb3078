"""Pruners end trials that are worse, by values at equal env_steps, however many rows logs have or are read at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlframe.study.plan import PlannedRun
from rlframe.study.queue import Queue
from rlframe.study.record import DONE, PRUNED, Status
from tests.study.test_search import plan_of, search_in, write_log

pytest.importorskip("optuna")


def test_a_trial_that_was_pruned_before_a_stop_stays_pruned(tmp_path: Path) -> None:
    one, other = search_in(tmp_path, plan_of((0, 1), n_runs="1")).more()
    search = search_in(tmp_path, plan_of((0, 1), n_runs="1"))
    search.started()
    search.finished(one, Status(PRUNED, reason="pruned by median"))
    assert search.reason_to_stop(other) == "pruned by median"
    search.finished(other, Status(PRUNED))
    assert not search._trials


def test_a_trial_that_had_trained_to_its_end_when_it_was_to_stop_keeps_its_score(tmp_path: Path) -> None:
    ended: list[tuple[str, str]] = []
    own, stopped = {"ended": "completed"}, SimpleNamespace(pruned="pruned by asha", interrupted=True, kill_reason="")
    stopped.seconds, stopped.result_of, stopped.own_result = lambda: 1.0, lambda run: (-2, "SIGINT"), lambda run: own
    queue = SimpleNamespace(_status=lambda run: Status(), _finish=lambda run, *end: ended.append(end))
    queue._out_of_time = lambda process, run: False
    for result in ("completed", "interrupted"):
        own["ended"] = result
        Queue._finish_of(queue, stopped, None)  # type: ignore[arg-type]
    assert ended == [(DONE, ""), (PRUNED, "pruned by asha")]

    search = search_in(tmp_path, replace(plan_of(n_runs="30", pruner="median"), interval_steps=100))
    for score in (*(5.0,) * 6, 1.0):
        (run,) = search.more()
        write_log(run, [score] * 4, every=100)
        told = search.reason_to_stop(run)
        search.finished(run, Status(DONE))
    assert told.startswith("pruned after")
    assert [trial.values for trial in search._study.get_trials()[-2:]] == [[5.0], [1.0]]


def test_trials_are_compared_at_equal_env_steps_however_many_rows_their_logs_have(tmp_path: Path) -> None:
    search = search_in(tmp_path, replace(plan_of(n_runs="30", pruner="median"), interval_steps=100))

    def write(run: PlannedRun, every: int, end: int) -> None:
        """A score that grows by 1 each 100 env_steps, from one row to the next."""
        write_log(run, [i * every / 100 for i in range(end // every + 1)], every=every)

    for _ in range(6):
        (run,) = search.more()
        for end in (100, 200, 300, 400):
            write(run, 100, end)
            assert not search.reason_to_stop(run)
        search.finished(run, Status(DONE))
    for every in (400, 200, 130):  # the first value of the first is 4, at 400 env_steps
        (run,) = search.more()
        write(run, every, 400)
        assert not search.reason_to_stop(run), every
    (run,) = search.more()
    write_log(run, [0.0, 3.0], every=400)
    assert search.reason_to_stop(run) == "pruned after 2 values of eval/return_mean, by median"


@pytest.mark.parametrize("pruner", ["median", "asha"])
def test_a_trial_that_is_worse_than_the_others_is_pruned_on_its_way(pruner: str, tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of(n_runs="30", pruner=pruner))
    for _ in range(12):
        (run,) = search.more()
        for n in range(1, 10):
            write_log(run, [10.0 * i for i in range(n)])
            if search.reason_to_stop(run):
                break
        search.finished(run, Status(PRUNED if n < 9 else DONE))
    (run,) = search.more()
    write_log(run, [0.0])
    found = search.reason_to_stop(run)
    for n in range(2, 10):
        write_log(run, [-5.0 * i for i in range(n)])
        found = found or search.reason_to_stop(run)
    assert found.startswith("pruned after")
    assert found.endswith(f"by {pruner}")
    search.finished(run, Status(PRUNED))
    assert "eval/return_mean 80" in search.describe_best()


@pytest.mark.parametrize("at_once", [2, 3, 9])
def test_asha_prunes_the_same_trials_however_often_logs_are_read(at_once: int, tmp_path: Path) -> None:
    found = []
    for name, chunk in (("each", 1), ("some", at_once)):
        (tmp_path / name).mkdir()
        search, kept = search_in(tmp_path / name, plan_of(n_runs="8", pruner="asha", searcher="random")), []
        for returns in np.random.default_rng(3).normal(size=(8, 10)).cumsum(1).tolist():
            (run,) = search.more()
            for n in [*range(1 + chunk, 10, chunk), 10]:
                write_log(run, returns[:n])
                if reason := search.reason_to_stop(run):
                    break
            kept.append(reason)
            search.finished(run, Status(PRUNED if reason else DONE))
        found.append(kept)
    assert found[0] == found[1]
    assert 0 < sum(map(bool, found[0])) < 8


def test_no_trial_is_pruned_by_what_it_scored_before_its_first_update(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of(n_runs="30", pruner="median"))
    for start in range(20, 26):
        (run,) = search.more()
        write_log(run, [float(start), 100.0])
        assert not search.reason_to_stop(run)
        search.finished(run, Status(DONE))
    (run,) = search.more()
    write_log(run, [21.0])
    assert not search.reason_to_stop(run)
    write_log(run, [21.0, 99.0])
    assert search.reason_to_stop(run) == "pruned after 2 values of eval/return_mean, by median"


def test_seeds_of_a_trial_that_is_worse_by_wilcoxon_are_not_started(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of(tuple(range(8)), n_runs="2", pruner="wilcoxon"))
    for run in search.more():
        write_log(run, [100.0 + run.run_ID])
        search.finished(run, Status(DONE))
    worse, n_started = search.more(), 0
    for run in worse:
        if reason := search.reason_to_stop(run):
            search.finished(run, Status(PRUNED))
            assert "Wilcoxon" in reason
        else:
            n_started += 1
            write_log(run, [run.run_ID])
            search.finished(run, Status(DONE))
    assert 2 < n_started < 8
    assert not search._trials
