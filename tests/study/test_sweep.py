"""`launch` with sweep.*: errors before anything starts, and complete studies from start to plot."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlframe import plot
from rlframe.launch import main
from rlframe.record.snapshot import list_snapshots
from rlframe.study.record import n_steps_of
from tests.fork_server import Popen
from tests.processes import DEADLINE_S, launching, until
from tests.tables import read_csv

ROOT = Path(__file__).parents[2]
SHORT = ("env=CartPole-v1", "sampler=serial", "sampler.batch_T=16", "runner.n_steps=512", "eval.n_episodes=1")
STUDY_S = 600.0  # for eight runs on a busy machine


def record(study: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads((study / "experiment.json").read_text())["runs"]}


@pytest.mark.parametrize(
    ("params", "n_steps"),
    [
        ({"config": {"runner.n_steps": 5}}, 5),
        ({"config": {"runner.n_steps": 5}, "resumed": [{"changed": {}}, {"changed": {"runner.n_steps": 9}}]}, 9),
        ({"config": {"runner.n_steps": 5}, "resumed": [{"changed": {"runner.n_steps": 9}}, {"changed": {}}]}, 5),
        ({"config": {"lr": 1}}, math.nan),
        ({"config": {"runner.n_steps": "many"}}, math.nan),
        ([], math.nan),
    ],
)
def test_the_length_of_a_run_is_that_of_its_last_resume_or_unknown(params: Any, n_steps: float, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert n_steps_of(tmp_path / "params.json") == pytest.approx(n_steps, nan_ok=True)


REFUSED = [
    (["sweep.algo.learning_rte=1,2"], "did you mean algo.learning_rate"),
    (["sweep.algo=ppo,a2cc"], "algo=a2cc/run_0: .*did you mean a2c"),
    (["sweep.seed=0,1", "sweep.model.memory=none,lst"], "memory=lst/run_0: .*did you mean lstm"),
    (["sweep.seed=0,1", "sweep.experiment=classic/ppo_cartpole,classic/a2c_cartpol"], "did you mean classic/a2c_cart"),
    (["sweep.runner.n_steps=1e4,many"], "'many' is not a number"),
    (["sweep.seed=0,x"], "'x' is not a whole number"),
    (["sweep.seed=0,1", "seed=3"], "seed is given as 3 and as sweep.seed"),
    (["sweep.seed=0,1", "seeds=outer"], "did you mean outermost"),
    (["sweep.seed=0,1", "affinity=99cpr"], "cannot get 99 of"),
    (["sweep.seed=0,1", "affinity=1cpr_0slt"], "leave out slt"),
    (["sweep.seed=0,1", "retries=-1"], "retries='-1' must be a whole number"),
    (["sweep.seed=0,1", "run_ID=2"], "a run's ID is its seed"),
    (["sweep.seed=0,1", "tune_sampler=true"], "tune_sampler=true is for a single run"),
    (["sweep.log_dir=a,b"], "log_dir cannot be swept"),
    (["sweep.seed=0,1", "retrys=1"], "unknown key retrys"),
    (["sweep.seed=0,1", "algo=r2d1", "algo.learning_starts=1e9"], "run_0: nothing would be learned"),
    (["zip.algo.clip=0.1,0.2", "zip.algo.discount=0.9"], "zip.algo.clip has 2, zip.algo.discount has 1"),
    (["zip.algo.clip=0.1,0.2", "zip.algo.discount=0.9,2"], "clip=0.2,discount=2/run_0: algo.discount=2"),
    (["repeats=2", "seed=x"], "seed='x' must be a whole number"),
    (["repeats=2", "run_ID=2"], "a run's ID is its seed"),
    (["sweep.algo.clip=0.1,0.2", "stack=true"], "no setting of this study has; add repeats=N"),
    (["repeats=2", "stack=yes"], "stack='yes' must be true or false"),
    (["repeats=2", "stack=true", "sampler=cpu"], "stack=true is not for sampler=cpu"),
    (["repeats=2", "stack=true", "env=mpe2/simple_spread_v3"], "stack=true is not for environments of several agents"),
    (["search.algo.clip=uniform(0.1,0.2)", "repeats=2", "stack=true"], "not for a search"),
    (["stack=true"], "stack=true; add repeats=N or sweep.seed="),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_an_error_in_any_combination_is_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    place = [] if "sweep.log_dir=a,b" in words else [f"log_dir={tmp_path / 'study'}"]
    assert main([*words, *place]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_plan_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep.seed=0,1", "sweep.model.hidden=[64,64],[256,256]", "affinity=1cpu_1cpr", "dry_run=true"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "4 runs" in printed
    assert re.search(r"slot 0  CPU \d+  \(affinity=1cpu_1cpr\)", printed)
    assert re.search(r"hidden=64x64/run_0 +slot 0 +model.hidden=\[64,64\] seed=0", printed)
    assert re.search(r"hidden=256x256/run_1 +the next free slot", printed)
    assert "data/local" in printed
    assert main([*words, "stack=true", "device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"hidden=64x64/run_1 +with \S*hidden=64x64/run_0", printed)
    assert re.search(r"hidden=256x256/run_0 +the next free slot", printed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.quick
def test_a_study_is_trained_longer_run_by_run_from_where_each_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study"
    assert main([*SHORT, "sweep.seed=3,4", f"log_dir={study}"]) == 0
    first = (study / "run_4/progress.csv").read_text()
    for more in ([], ["dry_run=true"]):
        assert main([f"resume={study}", "runner.n_steps=256", *more]) == 2, "shorter"
        assert "started with other arguments: runner.n_steps=512, now 256" in capsys.readouterr().err
    assert main([*SHORT, "sweep.seed=3,4,5", f"log_dir={study}", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert [bool(re.search(rf"run_{seed} +done ", printed)) for seed in (3, 4, 5)] == [True, True, False]
    assert main([f"resume={study}", "runner.n_steps=1024"]) == 0
    assert (study / "run_4/progress.csv").read_text().startswith(first)
    assert [n_steps_of(study / f"run_{seed}/params.json") for seed in (3, 4)] == [1024, 1024]
    assert float(read_csv(study / "summary.csv")[1][0]["env_steps"]) >= 1024
    capsys.readouterr()
    assert main([f"resume={study}"]) == 0
    assert "2 already done" in capsys.readouterr().out
    assert main([f"resume={study / 'run_3'}", "runner.n_steps=2048"]) == 0
    capsys.readouterr()
    assert main([f"resume={study}"]) == 0
    assert re.search(r"\nall runs: its runs end at 1,\d+ to 2,\d+ env_steps\n", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.quick
def test_a_study_of_seeds_is_recorded_resumed_and_plotted_as_one_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORT, "sweep.seed=3,4", f"log_dir={tmp_path / 'study'}"]
    assert main(words) == 0
    study = tmp_path / "study"
    content = json.loads((study / "experiment.json").read_text())
    assert content["command"] == words
    assert content["grid"] == {"seed": ["3", "4"]}
    assert content["started_in"] == str(Path.cwd())
    assert content["config"]["runner.n_steps"] == 512
    assert {name: entry["state"] for name, entry in record(study).items()} == {"run_3": "done", "run_4": "done"}
    params = json.loads((study / "run_4/params.json").read_text())
    assert (params["config"]["seed"], params["config"]["affinity"]) == (4, record_code(study / "run_4.log"))
    rows = (study / "run_3/progress.csv").read_bytes()
    assert main([f"resume={study}"]) == 0
    assert (study / "run_3/progress.csv").read_bytes() == rows
    printed = capsys.readouterr().out
    assert re.search(r"\nall runs +2 +[\d.]+ +\[[\d.]+, [\d.]+\] +[\d.]+ +\d+\n", printed)
    (row,) = read_csv(study / "summary.csv")[1]
    assert (row["n_seeds"], row["n_failed"], row["metric"]) == ("2", "0", "eval/return_mean")
    assert main([*SHORT, "seed=3", "repeats=2", f"log_dir={study}"]) == 0  # the same runs
    assert "2 runs, 2 already done" in capsys.readouterr().out
    assert main([*SHORT, "sweep.seed=5", f"log_dir={study}"]) == 0
    assert [row["n_seeds"] for row in read_csv(study / "summary.csv")[1]] == ["3"], "with those before"
    capsys.readouterr()
    assert main([f"resume={study}", "algo.discount=0.5"]) == 2
    assert "cannot change algo.discount" in capsys.readouterr().err
    assert plot.main([str(study), f"out={tmp_path / 'curves.png'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "3 seeds" in line).startswith("study: eval/return_mean")


def record_code(log: Path) -> str:
    """The affinity code that a run was given."""
    return str(re.findall(r"affinity=(\S+)", log.read_text().splitlines()[0])[-1])


def sweeping(study: Path, *words: str) -> AbstractContextManager[Popen]:
    """The launch command with these words, in a process group of its own."""
    return launching(f"log_dir={study}", *words)


def has_rows(study: Path, n_runs: int) -> bool:
    return sum(len(read_csv(path)[1]) > 1 for path in study.rglob("progress.csv")) >= n_runs


@pytest.mark.slow
def test_ctrl_c_snapshots_a_run_and_resume_continues_it(tmp_path: Path) -> None:
    words = (*SHORT[:3], "eval.n_episodes=1", "runner.n_steps=1e8", "runner.log_interval_steps=1024", "sweep.seed=0,1")
    with sweeping(tmp_path, *words, "affinity=1cpu_1cpr") as process:
        until(lambda: has_rows(tmp_path, 1), DEADLINE_S)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, output
    assert f"continue it with resume={tmp_path}" in output
    assert [entry["state"] for entry in record(tmp_path).values()] == ["interrupted", "waiting"]
    snapshot = list_snapshots(tmp_path / "run_0/snapshot")[-1]
    with Popen(
        [sys.executable, "-m", "rlframe.launch", f"resume={tmp_path}"], stdout=subprocess.PIPE, text=True
    ) as again:
        until(lambda: list_snapshots(tmp_path / "run_0/snapshot")[-1].name > snapshot.name, DEADLINE_S)
        again.send_signal(signal.SIGINT)
        again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 130
    steps = [int(row["env_steps"]) for row in read_csv(tmp_path / "run_0/progress.csv")[1]]
    assert steps == sorted(set(steps))


GRID = ("sweep.seed=0,1", "sweep.algo.learning_rate=1e-3,3e-4", "sweep.model.hidden=[32,32],[64,64]")


@pytest.mark.slow
@pytest.mark.timeout(3 * STUDY_S)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_sweep_of_eight_on_two_slots_never_overlaps_and_repeats_nothing_after_ctrl_c(tmp_path: Path) -> None:
    study = tmp_path / "study"
    words = ("experiment=classic/ppo_cartpole", "runner.n_steps=2e4", *GRID, "affinity=2cpu_1cpr")
    seen_together = False
    with sweeping(study, *words) as process:
        deadline = time.monotonic() + STUDY_S
        done: list[str] = []
        while len(done) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout and process.stdout.read()
            cpus = cpus_of_runs(process.pid)
            assert len(cpus) <= 2
            seen_together |= len(cpus) == 2
            for one, other in combinations(cpus, 2):
                assert not set(one) & set(other)
            time.sleep(0.05)
            entries = record(study).items() if (study / "experiment.json").exists() else ()
            done = [name for name, entry in entries if entry["state"] == "done"]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, output
    assert seen_together
    finished = [name for name, entry in record(study).items() if entry["state"] == "done"]
    before = {name: (study / name / "progress.csv").stat().st_mtime_ns for name in finished}
    assert main([f"resume={study}"]) == 0
    assert {entry["state"] for entry in record(study).values()} == {"done"}
    assert {name: (study / name / "progress.csv").stat().st_mtime_ns for name in finished} == before
    assert plot.main([str(study), f"out={tmp_path / 'curves.png'}"]) == 0


def cpus_of_runs(queue: int) -> list[list[int]]:
    """Where each run of a queue is. Before it becomes one, a child has the queue's own command line, or the leash's."""
    found = []
    for child in psutil.Process(queue).children():
        with suppress(psutil.Error):
            command = child.cmdline()
            if command[1:3] == ["-m", "rlframe.launch"] and command[-1].endswith("slt"):
                found.append(child.cpu_affinity())
    return found


CARTPOLE_AT_FAULT = """
import time
import gymnasium

class AtFault(gymnasium.Wrapper):
    fault, steps = "", 0

    def step(self, action):
        self.steps += 1
        if self.steps > 300 and self.fault == "crash":
            raise RuntimeError("the simulator diverged")
        if self.steps > 300 and self.fault == "hang":
            time.sleep(3600)
        return super().step(action)

def make(fault):
    env = AtFault(gymnasium.make("CartPole-v1"))
    env.fault = fault
    return env
"""


@pytest.mark.slow
@pytest.mark.timeout(2 * STUDY_S)
def test_one_run_hangs_one_crashes_and_the_others_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tmp_path / "study"
    (tmp_path / "at_fault.py").write_text(CARTPOLE_AT_FAULT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    words = ("env=at_fault:make", "sampler=serial", "runner=minibatch_rl", "runner.n_steps=1e4", "stall_s=45")
    grid = "sweep.env_kwargs.fault=hang,crash,calm,quiet"
    with sweeping(study, *words, grid, "runner.log_interval_steps=1e3") as process:
        output, _ = process.communicate(timeout=STUDY_S)
    assert process.returncode == 1, output
    reasons = {name: entry["reason"] for name, entry in record(study).items() if entry["state"] == "failed"}
    assert set(reasons) == {"fault=hang/run_0", "fault=crash/run_0"}
    assert "hung" in reasons["fault=hang/run_0"]
    assert "the simulator diverged" in reasons["fault=crash/run_0"]
    assert "2 of 4 runs done, 2 failed" in output
    assert "in step" in (study / "fault=hang/run_0.log").read_text()
    assert plot.main([str(study), f"out={tmp_path / 'curves.png'}"]) == 0
