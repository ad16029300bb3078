"""Population-based training: who copies whom, what is tried, and that a killed study goes on; runs are imitated."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import shutil
import signal
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.analysis.add_runs import add_runs
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import Schedule
from rlframe.experiment.settings import from_flat
from rlframe.launch import main
from rlframe.record import branch
from rlframe.record.branch import changes_of
from rlframe.record.directory import write_params
from rlframe.record.snapshot import load_snapshot, save_snapshot
from rlframe.study.overview import read_study
from rlframe.study.pbt import Member, PbtPlan, changed, first_members, next_members, schedules
from rlframe.study.plan import PlannedRun
from rlframe.study.population import Population
from rlframe.study.queue import QueueOptions
from rlframe.study.record import DONE, FAILED, INTERRUPTED, WAITING, Status, StudyRecord
from rlframe.study.search_space import read_domain
from rlframe.study.study import _run_intervals
from rlframe.system.signals import StopRequest
from tests.study.switching import BEST, START

SHORT = ("env=CartPole-v1", "algo=ppo", "sampler=serial", "runner.n_steps=1000", "runner.log_interval_steps=100")
SPACE = {"algo.h": read_domain("", "uniform(0,1)")}


def plan_of(n_members: int = 4, seed: int = 0, n_steps: int = 1_000, **more: Any) -> PbtPlan:
    return PbtPlan(SPACE, n_members, 100, n_steps, seed, scheduled=frozenset(SPACE), **more)


class Study:
    """Members in `directory` whose runs are imitated: a snapshot is x and y of `tests.study.switching`."""

    def __init__(self, directory: Path, plan: PbtPlan) -> None:
        self.plan, self.directory = plan, directory
        directory.mkdir(exist_ok=True)
        places = [directory / f"member_{k}" / f"run_{k}" for k in range(plan.n_members)]
        firsts = first_members(plan)
        self.runs = [PlannedRun(f"member_{k}", k, firsts[k].settings, x, (), ()) for k, x in enumerate(places)]
        self.statuses = {run.name: Status() for run in self.runs}
        self.population = Population(plan, directory, self.runs, self.statuses)

    def train(self, failing: str = "") -> None:
        """One interval of all members that wait."""
        for run in self.population.start_interval():
            status = self.statuses[run.name]
            if status.state == WAITING:
                stop = run.command[-1].rpartition(" ")[2]
                self._train(run, int(stop) if stop != "stop=" else self.plan.n_steps)
                status.state = FAILED if run.name == failing else DONE

    def _train(self, run: PlannedRun, end: int) -> None:
        snapshots, params = run.directory / "snapshot", run.directory / "params.json"
        if not params.exists():
            run.directory.mkdir(parents=True, exist_ok=True)
            write_params(params, {"algo.h": float(run.arguments["algo.h"]), "seed": run.run_ID, "stop": "x"})
            start, place = 0, np.full(2, START)
        else:
            state, facts = load_snapshot(run.directory)
            start, place = facts["env_steps"], state["place"]
        h = json.loads(params.read_text())["config"]["algo.h"]
        falls = np.array([h > 0.7, h < 0.3])
        for _ in range(start, end, 50):
            place = place * (1 - 0.25 * falls)
        with (run.directory / "progress.csv").open("a") as file:
            rows = csv.writer(file, lineterminator="\n")
            if start == 0:
                rows.writerow(["env_steps", "eval/return_mean"])
            rows.writerow([end, BEST - float((place**2).sum())])
        save_snapshot(snapshots, {"place": place}, {"env_steps": end})

    def finish(self) -> str:
        self.train()
        while self.population.advance():
            self.train()
        return self.population.describe_best()

    def journal(self) -> str:
        return (self.directory / "population.jsonl").read_text()

    def places(self) -> list[list[float]]:
        return [load_snapshot(run.directory)[0]["place"].tolist() for run in self.runs]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_population_finds_the_schedule_without_which_its_score_stays_low(seed: int, tmp_path: Path) -> None:
    study = Study(tmp_path / "study", plan_of(8, 100 * seed, 2_000))
    said = study.finish()
    assert float(said.split()[3].rstrip(":")) == pytest.approx(BEST, abs=0.01), "0.39 with constant h"
    config = json.loads((tmp_path / "study/best.json").read_text())["config"]
    h = Schedule.parse(config["algo.h"]).over(2_000)
    place = np.full(2, START)
    for step in range(0, 2_000, 50):
        place = place * (1 - 0.25 * np.array([h(step) > 0.7, h(step) < 0.3]))
    assert BEST - (place**2).sum() == pytest.approx(float(said.split()[3].rstrip(":")), abs=1e-5)


def test_the_worst_copy_one_of_the_best_and_only_they_change() -> None:
    members = [
        Member({"algo.h": str(0.1 * k)}, 1_000 + k, float(score)) for k, score in enumerate([3, 9, 1, 7, 5, 6, 4, 8])
    ]
    found = next_members(plan_of(8), 1, members)
    assert [member.copied >= 0 for member in found] == [True, False, True, False, False, False, False, False]
    for member in (found[0], found[2]):
        assert member.copied in (1, 7)
        assert member.env_steps == 1_000 + member.copied
        assert member.settings != members[member.copied].settings
    assert found[1].settings == members[1].settings
    assert found == next_members(plan_of(8), 1, members), "the same for the same seed and scores"
    assert found != next_members(plan_of(8, seed=1), 1, members)


def test_members_without_a_score_copy_and_of_equal_ones_as_many_as_of_others() -> None:
    scores = [math.nan, 2.0, math.nan, math.nan]
    found = next_members(plan_of(), 1, [Member({"algo.h": "0.5"}, 100, score) for score in scores])
    assert [member.copied for member in found] == [1, -1, 1, 1]
    equal = next_members(plan_of(), 1, [Member({"algo.h": "0.5"}, 100, 2.0)] * 4)
    assert sum(member.copied >= 0 for member in equal) == 1


def test_settings_move_within_their_bounds() -> None:
    rng = np.random.default_rng(0)

    def moves(text: str, word: str) -> set[str]:
        return {changed(read_domain("", text), word, 0.0, rng) for _ in range(50)}

    assert moves("uniform(0,10)", "5") == {"4", "6"}
    assert moves("loguniform(1e-5,1.1e-3)", "1e-3") == {"0.0008", "0.0011"}
    assert moves("int(1,20)", "2") == {"1", "3"}
    assert moves("int(1,20)", "10") == {"8", "12"}
    assert moves("choice([1],[2,2],[3])", "[2,2]") == {"[1]", "[3]"}
    assert moves("choice([1],[2,2],[3])", "[3]") == {"[2,2]", "[3]"}
    anew = {changed(read_domain("", "logint(1,1000)"), "5", 1.0, rng) for _ in range(50)}
    assert len(anew) > 20
    assert all(1 <= int(word) <= 1000 for word in anew)


def test_settings_over_time_are_schedules_that_jump_where_they_changed() -> None:
    pieces = [
        Member({"algo.h": h}, env_steps) for h, env_steps in [("0.1", 0), ("0.1", 110), ("0.2", 220), ("0.3", 330)]
    ]
    words = schedules(plan_of(), pieces)
    assert words == {"algo.h": "piecewise(0:0.1,220:0.1,220:0.2,330:0.2,330:0.3)"}
    curve = Schedule.parse(words["algo.h"]).over(1_000)
    assert [curve(x) for x in (0, 219, 220, 329, 330, 999)] == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]


class Killed(BaseException):
    """What a test raises in the place of a kill."""


@pytest.fixture
def kill_after(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Raises Killed before the file operation of number `left`, and all after it; -1: never. Without locks."""
    left = {"left": -1}

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if left["left"] == 0:
                raise Killed
            left["left"] -= 1
            return function(*arguments, **named)

        return call

    for place, name in ((os, "replace"), (os, "link"), (Path, "rename"), (Path, "unlink"), (shutil, "rmtree")):
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    monkeypatch.setattr(branch, "DirectoryLock", lambda *_: nullcontext())
    monkeypatch.setattr(branch, "closing", lambda lock: lock)  # a kill ends the lock, an exception may not
    return left


def test_a_study_killed_at_any_file_operation_of_an_exploit_goes_on_as_one_that_was_not(
    tmp_path: Path, kill_after: dict[str, int]
) -> None:
    plan = plan_of(4, 3, 300, quantile=0.5)
    whole = Study(tmp_path / "whole", plan)
    whole.finish()
    assert whole.journal().count('"copied": -1') < 12, "some are copied"
    first = Study(tmp_path / "first", plan)
    first.train()
    for n in itertools.count():
        place = tmp_path / f"killed_{n}"
        shutil.copytree(tmp_path / "first", place, symlinks=True)
        study = Study(place, plan)
        for status in study.statuses.values():
            status.state = DONE
        try:
            kill_after["left"] = n
            study.population.advance()
            study.population.start_interval()
            break
        except Killed:
            kill_after["left"] = -1
        again = Study(place, plan)
        again.finish()
        assert (again.journal(), again.places()) == (whole.journal(), whole.places()), n
    kill_after["left"] = -1
    assert n > 10


def test_a_journal_whose_last_line_was_cut_decides_the_same_again(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", plan_of())
    study.train()
    assert study.population.advance()
    before = study.journal()
    (tmp_path / "study/population.jsonl").write_text(before[:-20])
    again = Study(tmp_path / "study", plan_of())
    again.train()
    assert again.population.advance()
    assert again.journal() == before
    with pytest.raises(ConfigError, match=r"population with pbt.resample=0.25, not 0.5; use another log_dir"):
        Study(tmp_path / "study", plan_of(resample=0.5))
    (tmp_path / "study/population.jsonl").write_text('{"plan": 3}\n{}\n')
    with pytest.raises(ConfigError, match="is damaged"):
        Study(tmp_path / "study", plan_of())


def test_the_overview_has_each_members_settings_of_now_and_its_metric_and_copies_are_no_results(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", plan_of(metric="-eval/return_mean"))
    with closing(StudyRecord(study.directory, study.runs, {})) as record:
        record.save()
    study.finish()
    overview = read_study(study.directory)
    assert overview.metric == "eval/return_mean"
    now = [member["settings"]["algo.h"] for member in json.loads(study.journal().splitlines()[-1])["members"]]
    assert [run.arguments["algo.h"] for run in study.runs] != now, "some have changed"
    assert [run.arguments["algo.h"] for run in study.population.runs_as_tuned()] == now
    assert [row["algo.h"] for row in overview.runs] == [float(h) for h in now]
    copied = [run.directory for run in study.runs if changes_of(run.directory)]
    assert copied
    with pytest.raises(ConfigError, match="is of a population, and copied others"):
        add_runs(copied[:1], tmp_path / "x.csv", (), "", True)


@pytest.mark.parametrize(("at", "end"), [(104, 200), (149, 200), (198, 300), (390, 400)])
def test_no_interval_but_the_last_is_a_rest_of_the_one_before(at: int, end: int, tmp_path: Path) -> None:
    study = Study(tmp_path / "study", plan_of(2, n_steps=400, quantile=0.5))
    for run in study.runs:
        save_snapshot(run.directory / "snapshot", {"place": np.full(2, START)}, {"env_steps": at})
        write_params(run.directory / "params.json", {"algo.h": 0.5})
        (run.directory / "progress.csv").write_text(f"env_steps,eval/return_mean\n{at},1.0\n")
        study.statuses[run.name].state = DONE
    assert study.population.advance()
    assert f"interval 2, to env_steps {end} of 400" in study.population.describe()


def test_an_interval_ends_beyond_where_all_members_are_and_one_that_has_passed_it_keeps_its_score(
    tmp_path: Path,
) -> None:
    study = Study(tmp_path / "study", plan_of(2, n_steps=300, quantile=0.5))
    for run, end, score in zip(study.runs, (250, 310), (1.0, 2.0), strict=True):
        save_snapshot(run.directory / "snapshot", {"place": np.full(2, START)}, {"env_steps": end})
        write_params(run.directory / "params.json", {"algo.h": 0.5})
        (run.directory / "progress.csv").write_text(f"env_steps,eval/return_mean\n{end},{score}\n")
        study.statuses[run.name].state = DONE
    study.train()
    assert study.population.advance()
    assert "interval 2, to env_steps 300 of 300\n  member_0/run_0 copies member_1/run_1" in study.population.describe()
    study.train()
    assert not study.population.advance()
    assert "best: member_0/run_0, eval/return_mean 2:" in study.population.describe_best()


def test_a_failed_member_is_replaced_and_a_member_that_was_interrupted_is_waited_for(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", plan_of())
    study.train(failing="member_2/run_2")
    study.statuses["member_1/run_1"].state = INTERRUPTED
    assert not study.population.advance()
    study.statuses["member_1/run_1"].state = DONE
    assert study.population.advance()
    assert "member_2/run_2 copies" in study.population.describe()
    study.population.start_interval()
    assert study.statuses["member_2/run_2"].state == WAITING
    (note,) = json.loads((study.runs[2].directory / "params.json").read_text())["changes"]
    assert note["env_steps"] == 100
    assert note["before"] == study.runs[2].arguments


def test_a_member_stopped_after_the_end_of_an_interval_but_before_its_row_goes_on(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", plan_of())
    study.train()
    study.statuses["member_1/run_1"].state = INTERRUPTED  # amid the evaluation at 100, of which the log has nothing
    study.population.start_interval()
    assert [status.state for status in study.statuses.values()] == [DONE, WAITING, DONE, DONE]


def test_a_signal_as_the_last_member_of_an_interval_ends_starts_no_further_one(tmp_path: Path) -> None:
    stop = StopRequest()

    class Endless:
        """A population whose members have ended before anyone looks."""

        def describe(self) -> str:
            return ""

        def start_interval(self) -> list[PlannedRun]:
            assert not stop.signum
            stop.signum = signal.SIGTERM
            return []

        def advance(self) -> bool:
            return True

        def runs_as_tuned(self) -> list[PlannedRun]:
            return []

    population: Any = Endless()
    with closing(StudyRecord(tmp_path, (), {})) as record:
        assert _run_intervals(population, (), record, QueueOptions(), stop) == ([], signal.SIGTERM)


def test_a_metric_that_no_log_has_ends_the_study_with_the_nearest(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", plan_of(metric="-eval/return_mine"))
    study.train()
    for stopped in (study.population.advance, study.population.describe_best):
        with pytest.raises(ConfigError, match="metric=-eval/return_mine is not in the logs; did you mean eval"):
            stopped()


WRONG = [
    ("metric=eval/retrun_mean", "there is no metric 'eval/retrun_mean'; did you mean eval/return_mean"),
    ("pbt.interval_steps=1000", "pbt.interval_steps=1,000 must be above 0 and below runner.n_steps=1,000"),
    ("pbt.interval_steps=50", "set runner.log_interval_steps=50"),
    ("n_runs=3", "use n_runs=4 or more"),
    ("pbt.quantile=0.6", "pbt.quantile=0.6 must be above 0 and at most 0.5"),
    ("pbt.resample=2", "pbt.resample=2 must be a number from 0 to 1"),
    ("pbt.resampel=0.2", "unknown key pbt.resampel; did you mean pbt.resample?"),
    ("search.model.hidden=choice([64],[32])", "search.model.hidden: a run cannot change model.hidden at a snapshot"),
    ("search.sampler.batch_T=int(100,200)", "a run cannot change sampler.batch_T"),
    ("snapshot_mode=none", "snapshot_mode=none: members"),
    ("runner.target_return=100", "without stop or a target; set runner.target_return=inf"),
    ("pruner=median", "pruner=median is not for searcher=pbt"),
    ("repeats=3", "repeats=3 is not for searcher=pbt"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[given for given, _ in WRONG])
def test_a_wrong_population_is_refused_before_anything_starts(
    given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORT, "search.algo.clip=uniform(0.1,0.3)", "searcher=pbt", given, f"log_dir={tmp_path}/study"]
    own = given.partition("=")[0]
    assert main([word for word in words if word == given or not word.startswith(f"{own}=")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_population_of_runs_from_data_is_refused() -> None:
    data = {"runner": "offline_rl", "algo": "bc", "algo.replay": "dataset", "algo.replay.path": "mine-v0"}
    with pytest.raises(ConfigError, match="runner=offline_rl takes no env_steps"):
        PbtPlan.read({"search.algo.learning_rate": "uniform(0.1,0.3)"}, from_flat({"env": "CartPole-v1", **data}))


def test_words_of_a_population_are_refused_in_another_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "search.algo.clip=uniform(0.1,0.3)", "pbt.quantile=0.2", f"log_dir={tmp_path}/study"]) == 2
    assert "pbt.quantile=0.2 is for searcher=pbt, not for tpe" in capsys.readouterr().err


def test_a_dry_run_shows_the_members_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "search.algo.epochs=int(1,4)", "searcher=pbt", "n_runs=4", f"log_dir={tmp_path}/s", "dry_run=true"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "every 100 env_steps, up to 1,000, the worst 1 of 4 members by eval/return_mean copy" in said
    assert all(f"member_{k}/run_{k}" in said for k in range(4))
    assert not (tmp_path / "s").exists()
