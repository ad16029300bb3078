"""Samplers and replay in Ray actors on two nodes, evaluation beside them: kill -9 of any of them and of the learner."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.clusters import with_cluster
from tests.processes import until
from tests.tables import read_csv

RUN = (
    "env=Pendulum-v1 algo=sac runner=async_rl sampler=ray sampler.n_samplers=2 sampler.cpus=0.1 sampler.batch_T=8 "
    "sampler.batch_B=2 replay=ray algo.replay.size=20_000 algo.learning_starts=100 algo.batch_size=16 "
    "algo.replay_ratio=2 model.hidden=[8] ray.fake_nodes=2 ray.num_cpus=1 ray.object_store_gb=0.1 "
    "eval.asynchronous=true eval.n_envs=1 eval.n_episodes=1 eval.max_length=50 runner.log_interval_steps=400 "
    "affinity=none compile=false device=cpu threads=1"
)
N_KILLS = 20
RESTARTS = "sampler/restarts", "replay/restarts", "eval/restarts"


@contextmanager
def running(*words: str) -> Iterator[psutil.Popen]:
    command = [sys.executable, "-m", "rlframe.launch", *words]
    with psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def n_rows(run: Path) -> int:
    file = run / "progress.csv"
    return len(file.read_text().splitlines()) - 1 if file.is_file() else 0


def last_row(run: Path) -> dict[str, str]:
    """The last row of the log that is of training, not of an evaluation alone."""
    return [row for row in read_csv(run / "progress.csv")[1] if row["updates"]][-1]


def victims(learner: psutil.Popen) -> dict[str, list[psutil.Process]]:
    """The processes that may die, by what they are."""
    found: dict[str, list[psutil.Process]] = {"sampler": [], "replay": [], "node": [], "tester": []}
    for process in learner.children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            name = words[0] if words else ""
            of_forkserver = "forkserver" in " ".join(process.parent().cmdline())  # type: ignore[union-attr]
            if name.startswith("ray::SamplerActor"):
                found["sampler"].append(process)
            elif name.startswith("ray::Shard"):
                found["replay"].append(process)
            elif name.endswith("/raylet") and "--head" not in words:
                found["node"].append(process)
            elif of_forkserver:
                found["tester"].append(process)
    return found


def killed_while_it_trains(log_dir: Path, rng: random.Random, most: int) -> Counter[str]:
    """Train with a kill at random times until it ends, at most so many; returns how often each was killed."""
    kills: Counter[str] = Counter()
    with running(*RUN.split(), "runner.n_steps=16_000", f"seed={rng.randrange(100)}", f"log_dir={log_dir}") as process:
        run, due = log_dir / "run_0", 2
        while kills.total() < most and process.poll() is None:
            until(lambda due=due: n_rows(run) >= due or process.poll() is not None, 200.0)
            there = {what: found for what, found in victims(process).items() if found}
            if process.poll() is None and there:
                what = rng.choice(sorted(there))
                with suppress(psutil.NoSuchProcess):
                    rng.choice(there[what]).kill()
                    kills[what] += 1
            due = n_rows(run) + rng.randrange(1, 5)
        assert process.wait(300.0) == 0, process.stderr and process.stderr.read()[-3_000:]
    last = last_row(run)
    assert int(last["env_steps"]) >= 16_000
    assert int(last["updates"]) > 500
    rows = read_csv(run / "progress.csv")[1]
    counted = {name: max(int(float(row[name] or 0)) for row in rows) for name in RESTARTS}
    assert counted["eval/restarts"] == kills["tester"]
    print(dict(kills), counted, f"replay/rows {last['replay/rows']}, {last['time/elapsed_s']} s")
    return kills


@with_cluster
@pytest.mark.timeout(1_800)
def test_runs_complete_however_often_their_parts_are_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    rng, kills, n = random.Random(0), Counter[str](), 0
    while kills.total() < N_KILLS:
        kills += killed_while_it_trains(tmp_path / str(n), rng, min(7, N_KILLS - kills.total()))
        n += 1
        assert n <= 10, kills
    print(f"{kills.total()} kills in {n} runs: {dict(kills)}")
    assert set(kills) == {"sampler", "replay", "node", "tester"}


@with_cluster
@pytest.mark.timeout(600)
def test_nothing_is_left_of_a_learner_that_is_killed_and_resume_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run = tmp_path / "run_0"
    with running(*RUN.split(), "runner.n_steps=10_000_000", f"log_dir={tmp_path}") as process:
        until(lambda: n_rows(run) > 3 or process.poll() is not None, 200.0)
        family = process.children(recursive=True)
        assert any("raylet" in " ".join(each.cmdline()) for each in family)
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=10.0)
    assert left == []
    before = last_row(run)
    with running(f"resume={run}", f"runner.n_steps={int(before['env_steps']) + 1_000}") as again:
        assert again.wait(300.0) == 0, again.stderr and again.stderr.read()[-3_000:]
    last = last_row(run)
    assert int(last["env_steps"]) >= int(before["env_steps"]) + 1_000
    assert int(last["replay/rows"]) > int(before["replay/rows"])
