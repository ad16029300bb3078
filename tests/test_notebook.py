"""rlframe.train and rlframe.build: one line with the keys of the command line."""

import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import rlframe
from rlframe.core.errors import ConfigError
from rlframe.record.rank_state import env_steps_of
from rlframe.runners import MinibatchRl
from rlframe.system.machine import n_cpus
from tests.runners.resumed import OF_TIME

SMALL: dict[str, Any] = {
    "sampler": "serial",
    "sampler.batch_T": 16,
    "sampler.batch_B": 4,
    "algo.minibatches": 2,
    "algo.epochs": 1,
}
SMALL |= {"eval.n_episodes": 2, "eval.n_envs": 2, "model.hidden": [8], "affinity": "none"}


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "params.json").read_text())["config"]


def without_times(row: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in row.items() if not name.startswith(OF_TIME)}


def test_train_returns_the_run_and_its_last_row(tmp_path: Path) -> None:
    settings = {**SMALL, "algo.learning_rate": 1e-3, "model.normalize_observation": True}
    result = rlframe.train("ppo", "CartPole-v1", n_steps=128, seed=3, log_dir=tmp_path, **settings)
    assert result.directory == tmp_path / "run_0"
    assert result.metrics["env_steps"] >= 128
    assert result.metrics["eval/return_mean"] > 0
    config = config_of(result.directory)
    assert (config["seed"], config["algo.learning_rate"], config["runner.n_steps"]) == (3, 1e-3, 128)
    assert config["model.normalize_observation"] is True
    policy = rlframe.load_policy(result.directory)
    assert re.fullmatch(r"Policy\(observations Box\(.*, actions Discrete\(2\)\)", repr(policy))
    assert policy.action_space.contains(int(policy.act(policy.observation_space.sample())))


def test_a_trained_run_is_resumed(tmp_path: Path) -> None:
    run = rlframe.train("ppo", "CartPole-v1", 64, log_dir=tmp_path, **SMALL).directory
    result = rlframe.train(resume=run, n_steps=192)
    assert result.directory == run
    assert result.metrics["env_steps"] >= 192
    assert rlframe.train(resume=run).metrics == result.metrics, "it is at its end"


@pytest.mark.skipif(n_cpus() < 2, reason="one CPU is all that there is to be pinned to")
def test_a_run_gives_the_cores_back_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlframe")
    cpus = os.sched_getaffinity(0)
    rlframe.train("ppo", "CartPole-v1", 64, log_dir=tmp_path, **{**SMALL, "affinity": "1cpr"})
    assert "affinity: slot 0 of" in caplog.text, "it was pinned"
    assert os.sched_getaffinity(0) == cpus


def test_a_preset_is_used_only_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlframe")
    own = {key: value for key, value in SMALL.items() if key != "algo.epochs"}
    plain = rlframe.train("ppo", "CartPole-v1", 64, log_dir=tmp_path / "plain", **own)
    assert config_of(plain.directory)["algo.epochs"] == rlframe.build("ppo", "CartPole-v1").runner.algo.config.epochs
    assert "experiment=classic/ppo_cartpole" in caplog.text, "it is mentioned"
    named = rlframe.train(n_steps=64, experiment="classic/ppo_cartpole", log_dir=tmp_path / "named", **own)
    assert config_of(named.directory)["algo.epochs"] == 20


def test_build_gives_the_live_objects(tmp_path: Path) -> None:
    with rlframe.build("ppo", "CartPole-v1", n_steps=64, runner="minibatch_rl", **SMALL) as built:
        assert isinstance(built.runner, MinibatchRl)
        built.runner.iterate()
        assert built.runner.env_steps > 0
        assert built.train()["env_steps"] >= 64


def test_a_run_in_a_loop_learns_what_train_learns(tmp_path: Path) -> None:
    keys = {**SMALL, "runner": "minibatch_rl_eval", "eval.n_episodes": 2, "runner.log_interval_steps": 64}
    whole = rlframe.train("ppo", "CartPole-v1", 256, log_dir=tmp_path / "whole", **keys)
    with rlframe.build("ppo", "CartPole-v1", 256, **keys) as run:
        rows = list(run)
        assert without_times(rows[-1]) == without_times(whole.metrics)
        assert run.evaluate()["eval/return_mean"] == rows[-1]["eval/return_mean"]
        assert run.metrics["env_steps"].tolist() == [row["env_steps"] for row in rows]
        assert np.isnan(run.metrics["algo/entropy"][0]), "there is none before the first update"
        assert run.policy.act(np.zeros(4, np.float32)) in (0, 1)


def test_a_saved_run_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    of_dqn = {"algo.learning_starts": 32, "algo.batch_size": 8, "algo.replay_ratio": 2, "runner.log_interval_steps": 64}
    keys = {key: value for key, value in SMALL.items() if not key.startswith("algo")} | of_dqn
    with rlframe.build("dqn", "CartPole-v1", n_steps=256, **keys) as run:
        for row in run:
            if row["env_steps"] >= 100:
                break
        run.algo.learning_rate = 3e-3
        with pytest.raises(AttributeError, match=r"DQN\.batch_size is of the config, which nothing reads"):
            run.algo.batch_size = 4
        run.save(tmp_path / "saved")
        expected = run.train()
        run.save(tmp_path / "saved")
    first, second = sorted((tmp_path / "saved/snapshot").glob("step_*"))
    shutil.rmtree(second)
    with rlframe.restore(tmp_path / "saved", log_dir=tmp_path / "again") as again:
        assert again.runner.env_steps == env_steps_of(first)
        assert again.algo.learning_rate == 3e-3
        row = again.train()
    assert without_times(row) == without_times(expected)
    assert (tmp_path / "again/run_0/progress.csv").is_file(), "log_dir= says where it is recorded"
    assert rlframe.load_policy(tmp_path / "saved").act(np.zeros(4, np.float32)) in (0, 1)


def test_the_time_limit_of_a_run_counts_all_its_rows() -> None:
    keys = {**SMALL, "runner": "minibatch_rl", "runner.log_interval_steps": 64, "runner.max_time_s": 0.3}
    with rlframe.build("ppo", "CartPole-v1", 10**8, **keys) as run:
        start = time.monotonic()
        for _ in run:
            assert time.monotonic() - start < 30, "each row is much faster than the limit"


def test_a_run_left_early_is_recorded_with_a_snapshot(tmp_path: Path) -> None:
    keys = {**SMALL, "runner.log_interval_steps": 64}
    with rlframe.build("ppo", "CartPole-v1", 10_000, **keys, log_dir=tmp_path) as run:
        next(run)
        row = next(run)
    result = json.loads((tmp_path / "run_0/result.json").read_text())
    assert (result["ended"], result["env_steps"]) == ("interrupted", row["env_steps"])
    assert (
        rlframe.train(resume=tmp_path / "run_0", n_steps=row["env_steps"] + 64).metrics["env_steps"] > row["env_steps"]
    )


def sized(size: tuple[int, int], **kwargs: Any) -> gymnasium.Env:
    assert isinstance(size, tuple)
    return gymnasium.make("CartPole-v1")


def test_a_run_is_not_saved_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with rlframe.build("ppo", sized, 64, env_kwargs={"size": (8, 8)}, **SMALL) as run:
        with pytest.raises(ConfigError, match="is not empty, and holds no run"):
            run.save(tmp_path)
        run.save(tmp_path / "own")
        run.save(tmp_path / "own")
    with (
        rlframe.build("ppo", "CartPole-v1", 65, **SMALL) as other,
        pytest.raises(ConfigError, match="is another run's"),
    ):
        other.save(tmp_path / "own")


def test_none_stands_for_a_setting_that_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with rlframe.build("ppo", "CartPole-v1", 64, **SMALL, log_dir=None, name=None, sync=None) as run:
        run.train()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algo": "pppo"}, "did you mean ppo"),
        ({"algo": {"clip": None}}, "algo.clip has no value; leave it out for its default"),
        ({"algo.learning_rte": 1}, "did you mean algo.learning_rate"),
        ({"dry_run": True}, "dry_run=True is no setting of a run: it is for the command line"),
        ({"resume": "/nowhere"}, "name a run directory"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        rlframe.train(log_dir=tmp_path / "runs", **settings) if "resume" not in settings else rlframe.train(**settings)
    assert not list(tmp_path.iterdir())


def test_build_is_for_one_process() -> None:
    with pytest.raises(ConfigError, match="use train for world_size= and learners="):
        rlframe.build("ppo", "CartPole-v1", world_size=2)
