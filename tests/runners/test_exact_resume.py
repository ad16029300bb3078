"""A run that was stopped and resumed equals one that was not: parameters, states and metrics, bit for bit."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rlframe import launch
from rlframe.core.files import read_json
from rlframe.experiment import train
from rlframe.record.snapshot import list_snapshots, remove_snapshot
from tests.fork_server import run_python
from tests.processes import DEADLINE_S
from tests.runners.resumed import (
    ANYWHERE,
    TRUST,
    assert_resumed_exactly,
    assert_runs_equal,
    count_equal,
    last_state,
    log,
    stopped_at,
    words,
)
from tests.runners.resumed_cases import CARTPOLE, CASES, ON_POLICY, PPO, REPLAY, SMALL, UNREPEATABLE, WALK
from tests.variants import variants

SLOW = {  # others do more: test_modes.py, and of models and options those that have state of their own
    *("ppo_moded", "rainbow", "dqn_in_torch", "ppo_in_torch", "ppo_distribution", "ppo_convolutions"),
    *("sac_layer_norm", "sac_gaussian_prior", "r2d1_transformer", "ppo_continuous", "sac_discrete", "td3"),
    *("bc", "bc_lstm", "iql", "td3_bc", "cql", "dqn_league", "rainbow_images", "dqn_initial_priorities", "a2c", "pqn"),
    *("btr", "btr_alone", "ppo", "dqn", "ddpg", "sac", "xqc", "r2d1"),  # ppo_vector, dqn_between_updates, flashsac, ...
    *("ppo_lstm", "ppo_transformer"),  # and other folders
    *("simbav2", "td3_chosen_critics"),  # flashsac, redq_droq_tqc
    *("dqn_between_updates", "ddpg_target_noise"),  # exploration/test_runs.py
    *("ppo_kl_penalty", "ppo_normalized_rewards"),  # ppo_vector, exploration/test_gsde_runs.py
    *("envs_restored_by_actions", "envs_restored_by_their_state"),  # samplers/test_resume.py, envs/test_restore.py
}


@pytest.mark.parametrize("case", variants(CASES, CASES.keys() - SLOW))
def test_a_resumed_run_equals_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resumed_exactly(CASES[case], tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_run_in_two_torch_threads_is_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_resumed_exactly(f"{CASES['rainbow_images']} threads=2", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("sampler", "resumed_by"),
    [
        ("cpu", "gpu"),
        pytest.param("gpu", "serial", marks=pytest.mark.slow),
        pytest.param("cpu", "cpu", marks=pytest.mark.slow),
    ],
)
def test_workers_are_resumed_exactly_by_those_of_another_sampler_too(
    sampler: str, resumed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"{PPO} {WALK} model.memory=gru {ON_POLICY}"
    assert launch.main(words(case, tmp_path / "whole")) == 0
    with_workers = f"{case.replace('sampler=serial', f'sampler={sampler}')} sampler.n_workers=2 eval.n_workers=0"
    stopped_at(90, with_workers, tmp_path / "parts", monkeypatch, f"sampler={resumed_by}")
    whole, parts = (log(tmp_path / name / "run_0") for name in ("whole", "parts"))
    assert {row.pop("sampler/restarts") for row in parts} <= {"0", ""}
    assert whole == parts
    (session,) = read_json(tmp_path / "parts/run_0/params.json")["resumed"]
    assert session["changed"].get("sampler", sampler) == resumed_by


@pytest.mark.parametrize(
    "env",
    [
        "env=HalfCheetah-v5 env_backend=python",
        pytest.param("env=ALE/Pong-v5 env_backend=python env_kwargs.obs_type=ram", marks=pytest.mark.slow),
    ],
)
def test_simulators_are_resumed_exactly(env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco" if "Cheetah" in env else "ale_py")
    case = f"{PPO} {env} env_kwargs.max_episode_steps=40 {SMALL} sampler=serial sampler.batch_T=8 sampler.batch_B=2"
    assert_resumed_exactly(case, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "ppo_moded", "ppo_kl_penalty", "dqn", "ddpg"])
def test_two_ranks_are_resumed_exactly(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_each = CASES[case].replace("eval.n_episodes=1", "eval.n_episodes=2").replace("eval.n_envs=1", "eval.n_envs=2")
    launch_ranks = f"{of_each} world_size=2 runner=sync_rl"
    assert launch.main(words(launch_ranks, tmp_path / "whole")) == 0
    stopped_at(90, launch_ranks, tmp_path / "parts", monkeypatch)
    for rank in (0, 1):
        assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "parts/run_0", rank)


@pytest.mark.slow
def test_another_evaluation_changes_nothing_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.main(words(CASES["ppo"], tmp_path / "whole")) == 0
    stopped_at(90, CASES["ppo"], tmp_path / "parts", monkeypatch, "eval.n_envs=3", "eval.n_episodes=5")
    one, other = (last_state(tmp_path / name / "run_0") for name in ("whole", "parts"))
    assert sum(count_equal(one[part], other[part], part) for part in ("agent", "algo", "sampler")) > 5


@pytest.mark.quick
def test_a_killed_run_continues_in_a_new_process_from_its_last_snapshot(tmp_path: Path) -> None:
    """Killed after rows that no snapshot holds, in the middle of a line."""
    assert launch.main(words(f"{CASES['dqn']} snapshot_mode=all", tmp_path / "whole")) == 0
    whole, killed = tmp_path / "whole/run_0", tmp_path / "killed/run_0"
    shutil.copytree(whole, killed, symlinks=True)
    for snapshot in list_snapshots(killed / "snapshot")[2:]:
        remove_snapshot(snapshot)
    with (killed / "progress.csv").open("a") as file:
        file.write("999999,1.0,2.")
    command = [sys.executable, "-m", "rlframe.launch", f"resume={killed}", TRUST]
    done = run_python(command, timeout=2 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "the run continues exactly" in done.stdout
    assert_runs_equal(whole, killed)


def test_a_run_without_snapshots_starts_again_and_keeps_its_rows_unless_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(words(CASES["ppo"], tmp_path / "whole")) == 0
    whole, killed = tmp_path / "whole/run_0", tmp_path / "killed/run_0"
    shutil.copytree(whole, killed, ignore=shutil.ignore_patterns("snapshot"))
    before = {file: (killed / file).read_bytes() for file in ("progress.csv", "episodes.csv", "result.json")}
    assert launch.main([f"resume={killed}", TRUST, "runner.n_steps=400"]) == 2
    assert "has ended (completed), and has no snapshot (removed, or" in capsys.readouterr().err
    assert {file: (killed / file).read_bytes() for file in before} == before
    (killed / "result.json").unlink()  # as of a run that was killed
    assert launch.main([f"resume={killed}", TRUST]) == 0
    assert_runs_equal(whole, killed)
    for file in ("progress.csv", "episodes.csv"):
        assert (killed / f"abandoned_{file}").read_bytes() == before[file]


def test_a_run_that_goes_on_while_it_is_read_is_not_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(words(CASES["ppo"], tmp_path)) == 0
    run, read = tmp_path / "run_0", train._newest_state

    def reading(*args: Any) -> Any:
        found = read(*args)
        shutil.copytree(found.snapshot, found.snapshot.with_name("step_000000009999"))  # as by its own process
        return found

    monkeypatch.setattr(train, "_newest_state", reading)
    assert launch.main([f"resume={run}", TRUST, "runner.n_steps=400"]) == 2
    assert "went on while its snapshot was read, and has step_000000009999 now" in capsys.readouterr().err
    assert (run / "result.json").exists()
    assert (run / "snapshot/step_000000009999").exists()


def test_the_log_names_episodes_that_cannot_be_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = f"{PPO} {UNREPEATABLE} {ON_POLICY}"
    assert launch.main(words(case.replace("n_steps=160", "n_steps=100"), tmp_path)) == 0
    assert launch.main([f"resume={tmp_path / 'run_0'}", TRUST, "runner.n_steps=200"]) == 0
    assert "4 of 4 running episodes start anew" in capfd.readouterr().out


def test_async_rl_logs_that_its_episodes_start_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = f"algo=dqn {CARTPOLE} {REPLAY} runner=async_rl"
    assert launch.main([*case.split(), *ANYWHERE, f"log_dir={tmp_path}"]) == 0
    assert launch.main([f"resume={tmp_path / 'run_0'}", TRUST, "runner.n_steps=150"]) == 0
    assert "2 of 2 running episodes start anew (its sampler collects ahead" in capfd.readouterr().out
