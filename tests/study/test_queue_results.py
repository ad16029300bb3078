"""A study knows from result.json whether a run is complete, however it ended."""

import json
import sys
import time
from pathlib import Path

import pytest

from rlframe import launch
from rlframe.study.plan import PlannedRun, make_slots
from rlframe.study.process import RunProcess
from rlframe.study.record import DONE, PRUNED, WAITING, Status, restored
from rlframe.system.affinity import read_topology

SHORT = "env=CartPole-v1 sampler=serial sampler.batch_T=16 sampler.batch_B=4 model.hidden=[8] runner.n_steps=100000 "
SHORT += "runner.log_interval_steps=100 eval.n_episodes=2 eval.n_envs=2 affinity=1cpr sweep.seed=0"


@pytest.mark.parametrize(
    ("word", "state"),
    [
        pytest.param("stop=env_steps>150", "done", marks=pytest.mark.slow),
        ("runner.target_return=1", "done"),
        pytest.param("runner.max_time_s=0.3", "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ended_early_is_done_unless_its_time_was_over(word: str, state: str, tmp_path: Path) -> None:
    status = launch.main([*SHORT.split(), word, f"log_dir={tmp_path}"])
    assert status == (0 if state == "done" else 1)
    (entry,) = json.loads((tmp_path / "experiment.json").read_text())["runs"]
    assert entry["state"] == state
    assert (tmp_path / "summary.csv").is_file() == (state == "done")


WRITE = """
import json, sys
for folder, ended, reason in json.loads(sys.argv[1]):
    with open(folder + "/result.json", "w") as file:
        json.dump({"ended": ended, "reason": reason}, file)
sys.exit("of the process")
"""


def ended_stack(folder: Path, before: dict[str, tuple[str, str]], written: dict[str, tuple[str, str]]) -> RunProcess:
    """An attempt of runs by these names, of which some had a result.json, and some get one; it has failed."""
    rows = [(str(folder / f"run_{i}"), *written[name]) for i, name in enumerate(before) if written[name][0]]
    command = (sys.executable, "-c", WRITE, json.dumps(rows))
    runs = [PlannedRun("", i, {"seed": str(i)}, folder / f"run_{i}", (), (), command) for i in range(len(before))]
    for run, (ended, reason) in zip(runs, before.values(), strict=True):
        run.directory.mkdir()
        if ended:
            (run.directory / "result.json").write_text(json.dumps({"ended": ended, "reason": reason}))
    process = RunProcess(runs[0], make_slots("none", read_topology(), 1)[0], True, runs[1:])
    while not process.ended():
        time.sleep(0.01)
    process.close()
    return process


def test_of_a_stack_each_run_has_the_reason_of_its_own_record(tmp_path: Path) -> None:
    ends = {"failed": "an error", "interrupted": "SIGINT: stopped at env_steps 8", "stopped": "by a callback"}
    ends |= {"out_of_time": "", "": ""}
    written = {ended: (ended, reason) for ended, reason in ends.items()}
    process = ended_stack(tmp_path, dict.fromkeys(ends, ("", "")), written)
    done, unknown = (0, ""), (1, "exit status 1: of the process")
    assert [process.result_of(run) for run in process.runs] == [
        (1, "an error"),
        (1, ends["interrupted"]),
        done,
        done,
        unknown,
    ]
    process.kill_reason = "hung"
    assert [process.result_of(run) for run in process.runs] == [(1, "hung"), (1, "hung"), done, done, (1, "hung")]


def test_the_result_of_an_earlier_attempt_is_not_that_of_a_stack_which_ended_before_it_went_on(tmp_path: Path) -> None:
    before = {ended: (ended, "long ago") for ended in ("completed", "interrupted", "out_of_time")}
    process = ended_stack(tmp_path, before, dict.fromkeys(before, ("", "")))
    assert [process.result_of(run) for run in process.runs] == [(1, "exit status 1: of the process")] * 3
    assert [process.own_result(run) for run in process.runs] == [{}] * 3


def test_a_run_that_never_began_may_be_made_longer(tmp_path: Path) -> None:
    run = PlannedRun("", 0, {"seed": "0", "runner.n_steps": "2000"}, tmp_path / "run_0", (), ())
    for state in (WAITING, PRUNED, DONE):
        before = {"arguments": {"seed": "0", "runner.n_steps": "1000"}, **vars(Status(state))}
        assert restored(run, before).state == WAITING


def test_a_length_that_is_written_otherwise_is_the_same(tmp_path: Path) -> None:
    run = PlannedRun("", 0, {"seed": "0", "runner.n_steps": "200000"}, tmp_path / "run_0", (), ())
    run.directory.mkdir()
    for text in ("2e5", "200000.0", "200_000"):
        before = {"arguments": {"seed": "0", "runner.n_steps": text}, **vars(Status(DONE, has_directory=True))}
        assert restored(run, before).state == DONE
