"""Settling an experiment on this machine, and launching it with each sampler: the same run, faults included."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError
from rlframe.experiment import hardware
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.kernels.device import bf16_is_faster
from rlframe.launch import main
from rlframe.record.snapshot import list_snapshots
from rlframe.samplers import auto, cpu, gpu, serial
from rlframe.system.service import Supervision
from tests.processes import DEADLINE_S, launched, until
from tests.tables import read_csv

SMALL = ["env=Pendulum-v1", "sampler.batch_T=16", "sampler.batch_B=4", "runner.n_steps=256", "eval.n_episodes=2"]
SMALL += ["runner.log_interval_steps=128", "eval.n_envs=2", "algo.minibatches=2", "algo.epochs=2"]
ENDLESS = [*(word for word in SMALL if not word.startswith("runner.")), "runner.n_steps=1e8"]
PARALLEL = {"cpu": ["sampler=cpu", "sampler.n_workers=2"], "gpu": ["sampler=gpu", "sampler.n_workers=2"]}
PARALLEL["alternating"] = [*PARALLEL["gpu"], "sampler.n_groups=2"]


def experiment(*words: str) -> Any:
    return from_flat(dict(word.split("=", 1) for word in [*SMALL, *words]))


def run_of(log_dir: Path, *words: str) -> Path:
    assert main([f"log_dir={log_dir}", *SMALL, *words]) == 0
    return log_dir / "run_0"


OTHERS = ("time/", "sampler/", "memory/", "system/", "eval/restarts")  # differ between samplers


def metrics(run: Path) -> list[dict[str, str]]:
    """progress.csv without metrics that differ between samplers."""
    _, rows = read_csv(run / "progress.csv")
    return [{k: v for k, v in row.items() if not k.startswith(OTHERS)} for row in rows]


def test_the_default_sampler_is_chosen_by_timing_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "Supervision", Supervision)  # spawned, as for users
    asked = experiment()
    assert isinstance(asked.sampler, auto.Config)
    resolved = hardware.resolve(asked)
    assert isinstance(resolved.experiment.sampler, serial.Config | cpu.Config | gpu.Config)
    assert resolved.experiment.sampler.batch_T == 16
    assert resolved.experiment.eval.n_workers >= 0
    assert "an environment's step takes" in resolved.notes[0]


def test_workers_follow_from_the_affinity_and_never_exceed_the_environments() -> None:
    resolved = hardware.resolve(experiment("sampler=cpu", "sampler.batch_B=1"))
    assert resolved.experiment.sampler.n_workers == len(resolved.affinity.workers) == 1
    resolved = hardware.resolve(experiment("sampler=gpu", "sampler.n_workers=3", "affinity=none"))
    assert resolved.experiment.sampler.n_workers == 3
    assert resolved.affinity.workers == ((), (), ())
    assert resolved.experiment.eval.n_workers == 3


def test_evaluation_is_split_over_workers_only_where_that_changes_no_episode() -> None:
    def n_workers(n_envs: int) -> int:
        asked = experiment("env=CartPole-v1", "sampler=cpu", "sampler.n_workers=2", f"eval.n_envs={n_envs}")
        n_workers: int = hardware.resolve(asked).experiment.eval.n_workers
        return n_workers

    assert n_workers(8) == 0  # a native vector environment, whose environments share one generator
    assert n_workers(4) == 2


def test_nothing_is_auto_afterwards() -> None:
    resolved = hardware.resolve(experiment("sampler=cpu")).experiment
    assert AUTO not in (resolved.sampler.n_workers, resolved.eval.n_workers)
    assert resolved.precision == ("bf16" if bf16_is_faster() else "fp32")
    assert to_flat(hardware.resolve(resolved).experiment) == to_flat(resolved)


def test_a_vector_environment_of_one_generator_stays_serial() -> None:
    resolved = hardware.resolve(experiment("env=CartPole-v1", "sampler.batch_B=16"))
    assert isinstance(resolved.experiment.sampler, serial.Config)
    assert "cannot be split" in resolved.notes[0]


@pytest.mark.slow
def test_tuning_measures_every_candidate_and_prints_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_TUNE_S", 0.05)
    resolved = hardware.resolve(experiment("affinity=none", "sampler.n_workers=2"), tune=True)
    table = capsys.readouterr().out.splitlines()
    assert [line.rsplit(maxsplit=1)[0].strip() for line in table] == [
        "sampler",
        "serial",
        "cpu, 2 workers",
        "gpu, 2 workers",
        "gpu, 2 workers in 2 groups",
    ]
    assert "the fastest of 4" in resolved.notes[0]
    with pytest.raises(ConfigError, match="leave out sampler="):
        hardware.resolve(experiment("sampler=cpu"), tune=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run with a sampler, made once."""
    made = {"serial": ["sampler=serial"], **PARALLEL}
    return functools.cache(lambda how: run_of(tmp_path_factory.mktemp(how), *made[how]))


@pytest.mark.quick
@pytest.mark.parametrize("how", ["cpu", "alternating", pytest.param("gpu", marks=pytest.mark.slow)])
def test_a_run_has_the_same_metrics_whatever_sampler(how: str, trained: Callable[[str], Path]) -> None:
    one, other = trained("serial"), trained(how)
    assert metrics(one) == metrics(other)
    assert read_csv(other / "progress.csv")[1][-1]["sampler/restarts"] == "0"


def test_a_run_can_be_resumed_with_another_sampler_but_not_with_another_batch(
    trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained("cpu"), tmp_path / "run_0", symlinks=True))
    assert main([f"resume={run}", "sampler=serial", "runner.n_steps=512"]) == 0
    assert int(float(read_csv(run / "progress.csv")[1][-1]["env_steps"])) >= 512
    assert main([f"resume={run}", "sampler.n_workers=1", "dry_run=true"]) == 0
    assert capsys.readouterr().out.endswith(f"resumes: {list_snapshots(run / 'snapshot')[-1]}\n")
    assert main([f"resume={run}", "sampler.batch_B=8"]) == 2
    assert "sampler.batch_B cannot change" in capsys.readouterr().err


def test_a_dry_run_names_processes_cores_threads_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in SMALL if not word.startswith("eval.n_envs")]
    assert main([*words, *PARALLEL["cpu"], "eval.n_envs=5", "threads=3", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    config, end = json.JSONDecoder().raw_decode(printed)
    assert config["sampler.n_workers"] == 2
    for words in (
        "workers  2:",
        "threads  3",
        "worker 0",
        "acts and steps environments 2 to 3",
        "evaluation    2 workers to step 2 environments",  # one for each episode
        "memory: about",
    ):
        assert words in printed[end:], printed[end:]


@pytest.mark.parametrize(
    ("words", "says", "size"),
    [
        (["algo=ppo", "sampler.batch_B=8"], "rank 1        does the same, 1 torch thread", 8),
        (["algo=dqn", "sampler.batch_B=3"], "rank 1        learns from a part of each batch, 1 torch thread", 3),
    ],
    ids=["ppo", "dqn"],
)
def test_a_dry_run_names_the_other_learners(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str, size: int
) -> None:
    assert main(["env=CartPole-v1", "sampler=serial", "affinity=none", "learners=2", *words, "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    config, end = json.JSONDecoder().raw_decode(printed)
    assert (config["learners"], config["sampler.batch_B"]) == (2, size)
    assert says in printed[end:], printed[end:]
    assert " for each rank: main" in printed[end:]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cpu", "alternating"])
def test_a_killed_worker_is_replaced_and_counted_in_the_log_of_the_run(tmp_path: Path, how: str) -> None:
    log = tmp_path / "run_0/debug.log"
    with launched(tmp_path, *ENDLESS, *PARALLEL[how], "runner.log_interval_steps=2000") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        max(workers, key=lambda p: p.create_time()).kill()  # one of the evaluation's, which start last
        until(lambda: "restarted with the same seeds" in log.read_text(), DEADLINE_S)
        until(lambda: read_csv(tmp_path / "run_0/progress.csv")[1][-1]["eval/restarts"] == "1", DEADLINE_S)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, output
    assert " evaluation worker " in log.read_text()
    last = read_csv(tmp_path / "run_0/progress.csv")[1][-1]
    assert (last["sampler/restarts"], last["eval/restarts"]) == ("0", "1")
