"""A search: trials from distributions, told by the scores of their seeds, pruned, resumed; wrong words are refused."""

from __future__ import annotations

import csv
import errno
import json
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.core.errors import ConfigError, Interrupted
from rlframe.launch import main
from rlframe.study import sweep
from rlframe.study.plan import PlannedRun, make_slots
from rlframe.study.queue import QueueOptions
from rlframe.study.record import DONE, FAILED, WAITING, Status, StudyRecord
from rlframe.study.search import Search, SearchPlan
from rlframe.study.search_space import check_examples, read_domain
from rlframe.study.study import Study, execute
from rlframe.system.affinity import read_topology

pytest.importorskip("optuna")

SPACE = {"search.x": "uniform(0,1)", "search.kind": "choice(good,bad)"}
SHORT = ("env=CartPole-v1", "sampler=serial", "sampler.batch_T=16", "runner.n_steps=512", "eval.n_episodes=1")


def plan_of(seeds: Sequence[int] = (0,), **words: str) -> SearchPlan:
    return SearchPlan.read({**SPACE, **words}, seeds)


def search_in(directory: Path, plan: SearchPlan) -> Search:
    def make_runs(setting: str, values: Mapping[str, str]) -> list[PlannedRun]:
        place = directory / setting
        of_seed = {seed: {**values, "seed": str(seed)} for seed in plan.seeds}
        return [PlannedRun(setting, seed, each, place / f"run_{seed}", (), ()) for seed, each in of_seed.items()]

    return Search(plan, directory, make_runs)


def write_log(run: PlannedRun, returns: Sequence[float], column: str = "eval/return_mean", every: int = 100) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    with (run.directory / "progress.csv").open("w") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerows([["env_steps", column], *[[every * i, x] for i, x in enumerate(returns)]])


def play(search: Search, score: Callable[[Mapping[str, str]], float]) -> list[dict[str, str]]:
    """Finish all trials, each with the score of its words; returns their words."""
    found = []
    while runs := search.more():
        found.append(dict(runs[0].arguments))
        for run in runs:
            write_log(run, [score(run.arguments)])
            search.finished(run, Status(DONE))
    return found


def good(words: Mapping[str, str]) -> float:
    """Best at x=0.3 and kind=good."""
    return -((float(words["x"]) - 0.3) ** 2) + (words["kind"] == "good")


def test_tpe_searches_where_scores_are_high_and_random_does_not(tmp_path: Path) -> None:
    last = {}
    for name in ("tpe", "random"):
        (tmp_path / name).mkdir()
        search = search_in(tmp_path / name, plan_of(n_runs="40", searcher=name))
        last[name] = np.mean([good(words) for words in play(search, good)[20:]])
        assert "kind=good" in search.describe_best()
    assert last["tpe"] > last["random"] + 0.2


def test_the_score_of_a_trial_is_the_interquartile_mean_of_the_last_values_of_its_seeds(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of((0, 1, 2, 3, 4), n_runs="2"))
    for run, value in zip(search.more(), [0.0, 10.0, 20.0, 60.0, 1000.0], strict=True):
        write_log(run, [5.0, value, math.nan])
        search.finished(run, Status(DONE))
    assert "trial_0, eval/return_mean 30:" in search.describe_best()


def test_lower_is_better_with_a_minus_and_another_metric(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of(n_runs="2", metric="-algo/loss"))
    for value in (3.0, 2.0):
        (run,) = search.more()
        write_log(run, [value], "algo/loss")
        search.finished(run, Status(DONE))
    assert search.describe_best().startswith("best: trial_1, algo/loss 2:")


def test_a_search_goes_on_with_the_trials_that_it_had(tmp_path: Path) -> None:
    first = search_in(tmp_path, plan_of((0, 1), n_runs="3"))
    done, open_ = first.more(), first.more()
    for run in done:
        write_log(run, [1.0])
        first.finished(run, Status(DONE))
    write_log(open_[0], [2.0])
    first.finished(open_[0], Status(DONE))
    again = search_in(tmp_path, plan_of((0, 1), n_runs="3"))
    assert again.started() == [*done, *open_], "the same runs, with the same words"
    write_log(open_[1], [4.0])
    for run in open_:
        again.finished(run, Status(DONE))
    again.finished(done[0], Status(DONE))  # it was told before
    assert "trial_1, eval/return_mean 3:" in again.describe_best()
    assert len(again.more()) == 2
    assert again.more() == []
    with pytest.raises(ConfigError, match="a search of another space"):
        search_in(tmp_path, SearchPlan.read({"search.x": "uniform(0,2)"}, [0]))
    with pytest.raises(ConfigError, match=r"a search of other seeds, \[0, 1\]; use another log_dir"):
        search_in(tmp_path, plan_of((0, 1, 2), n_runs="3"))  # whose scores would be those of two seeds and of three


def test_a_command_that_a_search_refuses_leaves_the_study_as_it_was(tmp_path: Path) -> None:
    with closing(StudyRecord(tmp_path, (), {"command": ["repeats=1"]})) as record:
        record.save()
    search_in(tmp_path, plan_of((0,)))
    file = tmp_path / "experiment.json"
    before = file.read_text()
    study = Study(tmp_path, (), {"command": ["repeats=2"]}, "", plan_of((0, 1)), lambda *_: [])
    with pytest.raises(ConfigError, match="a search of other seeds"):
        execute(study, make_slots("none", read_topology(), 1, False), QueueOptions())
    assert file.read_text() == before, "resume= repeats the command that is there"


def test_a_search_killed_at_any_line_of_its_journal_goes_on_with_whole_trials(tmp_path: Path) -> None:
    first = search_in(tmp_path, plan_of(n_runs="2"))
    (begun,), _ = first.more(), first.more()
    journal = tmp_path / "search.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    first_trial = next(i for i, line in enumerate(lines) if json.loads(line)["op_code"] == 4)
    for n in range(first_trial, len(lines) + 1):
        for torn in (b"", lines[n][:-9] if n < len(lines) else b'{"op_co'):
            journal.write_bytes(b"".join(lines[:n]) + torn)
            (tmp_path / "search.journal.lock").symlink_to(tmp_path / "moved")  # of a queue that was killed
            again = search_in(tmp_path, plan_of(n_runs="2"))
            started = again.started()
            for run in started:
                write_log(run, [1.0])
                again.finished(run, Status(DONE))
            found = [run.arguments for run in started] + play(again, good)
            assert [{*words} for words in found] == [{"x", "kind", "seed"}] * 2
            if n >= first_trial + 3:
                assert found[0] == begun.arguments
    for damaged in (b'{"op_co\n', bytes(20), b"{}\n", b"3\n"):
        journal.write_bytes(b"".join([*lines[:2], damaged, *lines[2:]]))
        with pytest.raises(ConfigError, match=r"search\.journal is damaged: .*; restore it, or use another log_dir"):
            search_in(tmp_path, plan_of(n_runs="2"))


ENDS_WITH_A_SIGNAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a run that has looked for a stop request for the last time
os.makedirs(sys.argv[1])
open(sys.argv[1] + "/progress.csv", "w").write("env_steps,eval/return_mean\\n100,2\\n")
os.kill(os.getppid(), signal.SIGTERM)
"""


def test_a_search_stopped_as_its_only_run_ends_says_how_to_continue(tmp_path: Path) -> None:
    def make_runs(setting: str, values: Mapping[str, str]) -> list[PlannedRun]:
        place = tmp_path / setting / "run_0"
        command = (sys.executable, "-S", "-c", ENDS_WITH_A_SIGNAL, str(place))
        return [PlannedRun(setting, 0, {**values, "seed": "0"}, place, command, command)]

    study = Study(tmp_path, (), {}, "the same command", search=plan_of(n_runs="5"), make_runs=make_runs)
    with pytest.raises(Interrupted, match="the queue was stopped; continue it with the same command") as stopped:
        execute(study, make_slots("none", read_topology(), 1), QueueOptions())
    assert stopped.value.exit_status == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.glob("trial_*/run_?")] == ["run_0"]


def test_a_full_disk_is_named_with_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_in(tmp_path, plan_of())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"search\.journal cannot be written: No space left on device"):
        search.more()


def test_a_trial_with_a_failed_run_stays_open_and_the_run_is_tried_again(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of((0, 1), n_runs="1"))
    one, other = search.more()
    write_log(one, [4.0])
    search.finished(one, Status(DONE))
    search.finished(other, Status(WAITING))
    search.finished(other, Status(FAILED))
    assert search.describe_best() == "no trial is complete"
    again = search_in(tmp_path, plan_of((0, 1), n_runs="1"))
    assert again.started() == [one, other]
    write_log(other, [6.0])
    for run in (one, other):
        again.finished(run, Status(DONE))
    assert "trial_0, eval/return_mean 5:" in again.describe_best()


def test_a_metric_that_no_log_has_ends_the_search_after_a_run_and_names_the_nearest(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of(n_runs="9", metric="eval/return_mine"))
    (run,) = search.more()
    write_log(run, [1.0])
    search.finished(run, Status(DONE))
    for stopped in (search.more, search.describe_best):
        with pytest.raises(
            ConfigError, match="metric=eval/return_mine is not in the logs; did you mean eval/return_mean"
        ):
            stopped()


def test_a_trial_in_whose_log_a_known_metric_never_was_has_failed_and_others_follow(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of(n_runs="2", metric="eval/return_mean"))
    (run,) = search.more()
    write_log(run, [1.0], "algo/loss")
    search.finished(run, Status(DONE))
    assert search.describe_best() == "no trial is complete: no log has eval/return_mean"
    (other,) = search.more()
    write_log(other, [3.0])
    search.finished(other, Status(DONE))
    assert "trial_1, eval/return_mean 3:" in search.describe_best()
    again = search_in(tmp_path, plan_of(n_runs="2"))
    assert again.started() == [run, other]
    assert not again.has_more()


def test_a_known_metric_that_three_trials_lack_ends_the_search(tmp_path: Path) -> None:
    search = search_in(tmp_path, plan_of(n_runs="9"))
    for _ in range(3):
        (run,) = search.more()
        write_log(run, [1.0], "algo/loss")
        search.finished(run, Status(DONE))
    with pytest.raises(ConfigError, match="metric=eval/return_mean is not in the logs"):
        search.more()


WRONG = [
    ("search.algo.clip=uniform(0.1,0.2) sweep.seed=0,1,00", "has the seed 0 2 times"),
    ("search.algo.clip=uniform(0.1,0.2) repeats=4 pruner=wilcoxon", "use repeats=5 or more, or pruner=median"),
    (
        "search.algo.clip=uniform(0.1,0.2) metric=eval/retrun_mean",
        "there is no metric 'eval/retrun_mean'; did you mean",
    ),
    ("search.algo.clip=normal(0,1)", "needs one of uniform(LOW,HIGH), loguniform"),
    ("search.algo.clip=uniform(1)", "needs two numbers, uniform(LOW,HIGH)"),
    ("search.algo.clip=uniform(1,0)", "needs LOW < HIGH"),
    ("search.algo.clip=loguniform(0,1)", "needs LOW < HIGH, both above 0"),
    ("search.algo.epochs=int(1,2.5)", "needs whole numbers"),
    ("search.model.hidden=choice([64,64])", "needs two or more different values"),
    ("search.algo.clp=uniform(0.1,0.2)", "unknown key algo.clp"),
    ("search.algo.discount=uniform(0.9,1.5)", "algo.discount=1.5"),
    ("search.algo.clip=uniform(0.1,0.2) algo.clip=0.1", "algo.clip=0.1 and search.algo.clip"),
    ("search.seed=int(0,9)", "search.seed cannot be in one study"),
    ("search.retries=choice(1,2)", "retries cannot be searched"),
    ("search.algo.clip=uniform(0.1,0.2) sweep.algo.epochs=1,2", "a search has no sweep. or zip."),
    ("search.algo.clip=uniform(0.1,0.2) searcher=tp", "searcher='tp' is not one of tpe, random, cmaes"),
    ("search.algo.clip=uniform(0.1,0.2) pruner=hyper", "pruner='hyper' is not one of"),
    ("search.algo.clip=uniform(0.1,0.2) n_runs=0", "n_runs=0 must be from 1 to"),
    ("repeats=2 n_runs=3", "n_runs=3 is for a search"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[given for given, _ in WRONG])
def test_a_wrong_search_is_refused_before_anything_starts(
    given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "algo=ppo", *given.split(), f"log_dir={tmp_path}/study"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_without_the_extra_one_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r'pip install "rlframe\[search\]"'):
        search_in(tmp_path, plan_of())


def test_examples_reach_each_bound_and_each_choice() -> None:
    seen: list[dict[str, str]] = []
    plan = SearchPlan.read({"search.a": "loguniform(1e-5,1e-2)", "search.b": "choice([1],[2,2],[3])"}, [0])
    check_examples(plan.space, lambda words: seen.append(dict(words)))
    assert [each["a"] for each in seen] == ["1e-05", "0.01", "0.01"]
    assert [each["b"] for each in seen] == ["[1]", "[2,2]", "[3]"]
    assert read_domain("search.n", "int(1,1e3)").examples() == ("1", "1000")


@pytest.mark.parametrize(
    ("word", "trust"),
    [("search.algo.clip=choice(0.1,0.2)", ""), ("search.callbacks=choice([],[./stop.py:Stop])", " trust=true")],
)
def test_the_word_that_continues_a_search_has_trust_if_that_is_needed(
    word: str, trust: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "execute", lambda study, *_: hints.append(study.resume_hint) or 0)
    (tmp_path / "stop.py").write_text("from rlframe.runners import Callback\n\n\nclass Stop(Callback):\n    pass\n")
    assert main([*SHORT, word, "metric=-algo/loss", f"log_dir={tmp_path}/study"]) == 0
    assert hints == [f"resume={tmp_path}/study{trust}"]


@pytest.mark.slow
def test_a_search_of_runs_is_recorded_and_the_same_command_makes_more_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "search.yaml"
    entries = [f"{key}: {value}" for key, value in (word.split("=") for word in SHORT)]
    file.write_text("\n".join([*entries, "algo: ppo", "search:", "  algo.clip: uniform(0.1,0.3)"]))
    command = [
        f"experiment={file}",
        "model.hidden=[8]",
        "affinity=none",
        f"log_dir={tmp_path}/study",
        "metric=eval/return_mean",
    ]
    assert main([*command, "n_runs=1"]) == 0
    assert "best: trial_0, eval/return_mean" in capsys.readouterr().out
    assert main([f"resume={tmp_path}/study", "n_runs=2"]) == 0
    entries_: list[dict[str, Any]] = json.loads((tmp_path / "study/experiment.json").read_text())["runs"]
    assert [each["name"] for each in entries_] == ["trial_0/run_0", "trial_1/run_0"]
    assert [each["attempts"] for each in entries_] == [1, 1]
    clips = [float(each["arguments"]["algo.clip"]) for each in entries_]
    assert all(0.1 <= clip <= 0.3 for clip in clips)
    summary = (tmp_path / "study/summary.csv").read_text().splitlines()
    assert summary[0].startswith("setting,algo.clip,metric")
    assert len(summary) == 3
