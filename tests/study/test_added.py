"""Runs that are added to a study: checked first, taken by its queue or when it is continued, each once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlframe.core.errors import ConfigError
from rlframe.launch import main as launch
from rlframe.study.__main__ import main
from rlframe.study.added import ADDED_FILE, Added, AddedFile, AddedRuns, append_added, read_added
from rlframe.study.plan import CommandTemplate, PlannedRun, make_runs, make_slots
from rlframe.study.queue import Queue, QueueOptions
from rlframe.study.record import DONE, Status, StudyRecord
from rlframe.study.search import SearchPlan
from rlframe.study.sweep import make_added
from rlframe.study.table import PlainStatusTable
from rlframe.system.affinity import read_topology
from rlframe.system.signals import StopRequest
from tests.study.test_search import search_in, write_log
from tests.study.worker import HERE

WORDS = {"env": "CartPole-v1", "algo": "ppo", "sweep.algo.learning_rate": "1e-3,3e-4", "repeats": "2"}
BASE = {"env": "CartPole-v1", "algo": "ppo"}


def study_in(directory: Path, experiments: Mapping[str, Mapping[str, str]] | None = None) -> list[PlannedRun]:
    """A study of learning rates 1e-3 and 3e-4 with seeds 0 and 1, of which none has run; its runs."""
    make_run = partial(CommandTemplate((), True).make_run, directory, "")
    combinations = [{"algo.learning_rate": rate, "seed": seed} for rate in ("1e-3", "3e-4") for seed in "01"]
    runs = make_runs(make_run, BASE, combinations)
    facts = {"command": [], "experiments": experiments or {"": WORDS}}
    with closing(StudyRecord(directory, runs, facts)) as record:
        record.save()
    return list(runs)


def added_to(directory: Path, *words: str) -> Added:
    assert main([str(directory), "add", *words]) == 0
    return read_added(directory)[-1]


def test_an_added_seed_is_in_the_folder_of_its_setting_and_another_value_in_a_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_in(tmp_path)
    seed = added_to(tmp_path, "algo.learning_rate=1e-3", "seed=7")
    assert (seed.name, seed.arguments) == (
        "learning_rate=1e-3/run_7",
        {**BASE, "algo.learning_rate": "1e-3", "seed": "7"},
    )
    value = added_to(tmp_path, "algo.learning_rate=1e-4", "algo.clip=0.1")
    assert (value.name, value.arguments["algo.clip"]) == ("learning_rate=1e-4,clip=0.1/run_0", "0.1")
    assert f"no queue runs here, so python -m rlframe.launch resume={tmp_path} starts it" in capsys.readouterr().out
    assert main([str(tmp_path), "add", "algo.learning_rate=1e-4", "algo.clip=0.1", "seed=1,2"]) == 0
    both = "learning_rate=1e-4,clip=0.1/run_1, learning_rate=1e-4,clip=0.1/run_2"
    assert f"added {both}: no queue runs here" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 0
    assert "8 waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["algo.learning_rat=1e-4"], "did you mean algo.learning_rate?"),
        (["seed=3"], "the study varies algo.learning_rate: give the new run algo.learning_rate=VALUE too, such as"),
        (["algo.learning_rate=fast"], "'fast' is neither a number nor a schedule"),
        (["algo.learning_rate=1e-3", "seed=1"], "learning_rate=1e-3/run_1 is in the study already, waiting"),
        (["algo.learning_rate=1e-3", "seed=-1"], "seed=-1 is not a whole number"),
        (["algo.learning_rate=1e-3", "seed=4,1"], "learning_rate=1e-3/run_1 is in the study already, waiting"),
        (["algo.learning_rate=1e-3", "seed=4,4"], "seed=4,4 has a seed twice"),
        (["algo.learning_rate=1e-3", "seed=4,04"], "seed=4,04 has a seed twice"),
        (["algo.learning_rate=1e-3", "seed=4,"], "seed= is not a whole number"),
        (["algo.learning_rate=1e-3", "log_dir=x"], "log_dir=x is not for a run that is added"),
        (["algo.learning_rate=1e-3", "sweep.seed=3,4"], "sweep.seed=3,4 is not for a run that is added"),
        (["algo.learning_rate=1e-3", "env=./mine.py:Env", "seed=9"], "cannot bring code, env=./mine.py:Env"),
        (["ppo", "algo.learning_rate=1e-3"], "no experiment 'ppo': the study has one without a name"),
        ([], "add needs words of the new run"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_words_are_refused_and_nothing_is_written(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_in(tmp_path)
    assert main([str(tmp_path), "add", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / ADDED_FILE).exists()


def test_an_experiment_is_named_and_its_folder_has_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_in(tmp_path, {"one": WORDS, "two": {"env": "CartPole-v1", "algo": "a2c"}})
    assert added_to(tmp_path, "two", "algo.learning_rate=1e-4").name == "two/learning_rate=1e-4/run_0"
    assert main([str(tmp_path), "add", "tow", "seed=1"]) == 2
    assert "no experiment 'tow': name one of one, two" in capsys.readouterr().err
    study_in(tmp_path / "from_python", {"algo=ppo,hidden=32": WORDS, "algo=a2c": WORDS})
    words = "algo=ppo,hidden=32", "algo.learning_rate=1e-4"
    assert added_to(tmp_path / "from_python", *words).name == "algo=ppo,hidden=32/learning_rate=1e-4/run_0"


def test_an_added_run_becomes_longer_with_its_study_unless_its_length_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_in(tmp_path, {"": {**WORDS, "runner.n_steps": "1000"}})
    added_to(tmp_path, "algo.learning_rate=1e-3", "seed=7")
    added_to(tmp_path, "algo.learning_rate=1e-4", "runner.n_steps=500")
    for length in ([], ["runner.n_steps=2000"]):
        capsys.readouterr()
        assert launch([f"resume={tmp_path}", *length, "dry_run=true"]) == 0
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "seed=" in line}
        expected = "runner.n_steps=2000" if length else "runner.n_steps=1000"
        assert expected in lines["learning_rate=1e-3/run_1"].split()
        assert expected in lines["added_0/run_7"].split()
        assert "runner.n_steps=500" in lines["learning_rate=1e-4,n_steps=500/run_0"].split()


def test_the_queue_that_runs_takes_a_run_which_is_added_meanwhile_once(tmp_path: Path) -> None:
    template = CommandTemplate((sys.executable, "-S", HERE), False)
    runs = list(make_runs(partial(template.make_run, tmp_path, ""), {"do": "brief"}, [{"seed": "0"}]))

    def make(added: Added) -> PlannedRun:
        return template.make_run(tmp_path, "", added.setting, added.run_ID, added.arguments)

    class Meanwhile(PlainStatusTable):
        def message(self, text: str) -> None:
            if text == "run_0 starts on slot 0":
                for _ in range(2):
                    append_added(tmp_path, Added("late", 3, {"do": "brief", "seed": "3"}))

    record = StudyRecord(tmp_path, runs, {})
    slots = make_slots("none", read_topology(), 1)
    queue = Queue(runs, slots, record, Meanwhile(), QueueOptions(), AddedRuns(tmp_path, make, runs))
    assert queue.run(StopRequest()) == 0
    record.close()
    assert {name: status.state for name, status in record.statuses.items()} == {"run_0": DONE, "late/run_3": DONE}
    assert (tmp_path / "late/run_3/trace").exists()
    assert [run.name for run in queue.runs] == ["run_0", "late/run_3"]


def test_a_line_after_one_that_was_taken_back_is_new(tmp_path: Path) -> None:
    added = AddedFile(tmp_path)
    append_added(tmp_path, Added("first", 0, {}))
    assert [each.name for each in added.new()] == ["first/run_0"]
    (tmp_path / ADDED_FILE).unlink()
    append_added(tmp_path, Added("second", 0, {}))
    assert [each.name for each in added.new()] == ["second/run_0"]
    assert added.new() == []


def test_a_line_that_a_loss_of_power_cut_off_spoils_no_later_one(tmp_path: Path) -> None:
    append_added(tmp_path, Added("first", 0, {}))
    with (tmp_path / ADDED_FILE).open("a") as file:
        file.write('{"setting": "sec')
    append_added(tmp_path, Added("third", 0, {}))
    assert [each.name for each in read_added(tmp_path)] == ["first/run_0", "third/run_0"]


def test_a_run_whose_folder_holds_another_is_not_added_and_the_queue_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_in(tmp_path / "study")
    (tmp_path / "study/learning_rate=1e-3/run_7/old").mkdir(parents=True)
    assert main([str(tmp_path / "study"), "add", "algo.learning_rate=1e-3", "seed=7"]) == 2
    assert "run_7 is not empty and not a run of this study; move it away" in capsys.readouterr().err

    template = CommandTemplate((sys.executable, "-S", HERE), False)
    make = partial(template.make_run, tmp_path / "queue", "")
    runs, (late,) = (list(make_runs(make, {"do": "brief"}, [{"seed": seed}])) for seed in "03")
    (late.directory / "old").mkdir(parents=True)
    source = AddedRuns(tmp_path / "queue", lambda added: late, runs)
    record = StudyRecord(tmp_path / "queue", runs, {})
    append_added(tmp_path / "queue", Added("", 3, {}))
    queue = Queue(runs, make_slots("none", read_topology(), 1), record, PlainStatusTable(), QueueOptions(), source)
    assert queue.run(StopRequest()) == 0
    record.close()
    assert {name: status.state for name, status in record.statuses.items()} == {"run_0": DONE}
    assert "run_3 is not empty and not a run of this study" in capsys.readouterr().err
    assert AddedRuns(tmp_path / "queue", lambda added: late, runs).more() == [], "when it is continued too"


def test_an_added_run_that_is_done_is_passed_over(tmp_path: Path) -> None:
    make = partial(CommandTemplate((sys.executable, "-S", HERE), False).make_run, tmp_path, "")
    runs, late = (list(make_runs(make, {"do": "brief"}, [{"seed": seed}])) for seed in "03")
    earlier = StudyRecord(tmp_path, [*runs, *late], {})
    late[0].directory.mkdir()
    earlier.statuses["run_3"].state = DONE
    earlier.save()
    earlier.close()
    source = AddedRuns(tmp_path, lambda added: late[0], runs)
    record = StudyRecord(tmp_path, runs, {})
    append_added(tmp_path, Added("", 3, {}))  # as after a repair of a file that was damaged as the queue began
    slots = 2 * make_slots("none", read_topology(), 1)
    queue = Queue(runs, slots, record, PlainStatusTable(), QueueOptions(), source)
    assert queue.run(StopRequest()) == 0
    record.close()
    assert {name: status.state for name, status in record.statuses.items()} == {"run_0": DONE, "run_3": DONE}


BAD_LINES: dict[str, Any] = {
    "folder outside": {"setting": "../x", "run_ID": 0, "arguments": {}, "token": "a"},
    "absolute folder": {"setting": "/tmp/x", "run_ID": 0, "arguments": {}, "token": "a"},
    "hidden folder": {"setting": ".x", "run_ID": 0, "arguments": {}, "token": "a"},
    "no number": {"setting": "x", "run_ID": "../1", "arguments": {}, "token": "a"},
    "no words": {"setting": "x", "run_ID": 0, "arguments": {"a": 1}, "token": "a"},
    "no length": {"setting": "x", "run_ID": 0, "arguments": {}, "own_length": 3, "token": "a"},
    "no token": {"setting": "x", "run_ID": 0, "arguments": {}, "token": 3},
    "list": [],
    "missing": {"setting": "x"},
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_damaged_line_is_an_error_and_a_running_queue_goes_on(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ADDED_FILE).write_text(f"{json.dumps(BAD_LINES[name])}\n")
    with pytest.raises(ConfigError, match="damaged"):
        read_added(tmp_path)
    assert AddedRuns(tmp_path, lambda _: pytest.fail("made"), []).more() == []
    assert "warning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("trust", "true", "trust=true is not for a run that is added to a study"),
        ("resume", "/x", "resume=/x is not for a run that is added to a study"),
        ("log_dir", "/x", "log_dir=/x is not for a run that is added to a study"),
        ("callbacks", "os:system", "callbacks=os:system; if you trust its author"),
        ("env", "./evil.py:Env", "env=./evil.py:Env; if you trust its author"),
    ],
)
def test_a_line_of_a_stranger_brings_no_code_and_no_place(key: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        make_added(tmp_path, [], False, {}, Added("x", 0, {**BASE, key: text}))
    assert "trust=true" not in make_added(tmp_path, [], False, {}, Added("x", 0, BASE)).command


def test_an_added_trial_has_its_values_once_and_is_run_beyond_n_runs(tmp_path: Path) -> None:
    plan = SearchPlan.read({"search.x": "uniform(0,1)", "search.kind": "choice(good,bad)", "n_runs": "1"}, (0, 1))
    search = search_in(tmp_path, plan)
    for run in (first := search.more()):
        write_log(run, [1.0])
        search.finished(run, Status(DONE))
    assert len(first) == 2
    assert search.more() == []
    assert not search.has_more()
    append_added(tmp_path, Added("", 0, {"x": "0.25", "kind": "bad"}))
    assert search.has_more(), "also if a signal stops the study before the line is read"
    append_added(tmp_path, Added("", 0, {"x": "2"}))  # out of bounds: a warning
    again = search_in(tmp_path, plan)
    again.started()
    runs = again.more()
    assert [(run.name, run.arguments["x"], run.arguments["kind"]) for run in runs] == [
        ("trial_1/run_0", "0.25", "bad"),
        ("trial_1/run_1", "0.25", "bad"),
    ]
    assert again.more() == []
    continued = search_in(tmp_path, plan)
    assert [run.name for run in continued.started()] == [run.name for run in (*first, *runs)]
    assert continued.more() == []


def test_a_search_that_was_killed_before_it_started_an_added_trial_starts_it_once(tmp_path: Path) -> None:
    plan = SearchPlan.read({"search.x": "uniform(0,1)", "n_runs": "1"}, (0,))
    search_in(tmp_path, plan).more()
    append_added(tmp_path, Added("", 0, {"x": "0.5"}))
    killed = search_in(tmp_path, plan)
    killed._queue_added()  # it is in the journal, and has no run
    again = search_in(tmp_path, plan)
    assert [run.name for run in again.started()] == ["trial_0/run_0"]
    assert [run.arguments["x"] for run in again.more()] == ["0.5"]
    assert again.more() == []


def test_a_line_that_a_stopped_queue_has_not_read_is_more_to_do(tmp_path: Path) -> None:
    source = AddedRuns(tmp_path, lambda added: PlannedRun("", added.run_ID, {}, tmp_path / "run_3", (), ()), ())
    assert not source.has_more()
    append_added(tmp_path, Added("", 3, BASE))
    assert source.has_more()
    assert [run.name for run in source.more()] == ["run_3"]
    assert not source.has_more()


def test_words_of_an_added_trial_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {**BASE, "search.algo.clip": "uniform(0.1,0.3)", "pruner": "wilcoxon"}
    with closing(StudyRecord(tmp_path, [], {"command": [], "experiments": {"": words}})) as record:
        record.save()
    for word, says in {
        "algo.clip=0.4": "it needs a number from 0.1 to 0.3",
        "algo.clop=0.2": "did you mean algo.clip?",
        "seed=1": "a run for each seed of the search",
    }.items():
        assert main([str(tmp_path), "add", word]) == 2
        assert says in capsys.readouterr().err
    assert added_to(tmp_path, "algo.clip=0.2") == Added("", 0, {"algo.clip": "0.2"})
