"""rlframe.train and rlframe.build: one line with the keys of the command line."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import rlframe
from rlframe.core.errors import ConfigError
from rlframe.runners import MinibatchRl

SMALL: dict[str, Any] = {"sampler": "serial", "sampler.batch_T": 16, "sampler.batch_B": 4, "algo.minibatches": 2}
SMALL |= {"eval.n_episodes": 2, "eval.n_envs": 2, "model.hidden": [8], "affinity": "none"}


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "params.json").read_text())["config"]


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
    assert policy.action_space.contains(int(policy.act(policy.observation_space.sample())))


def test_a_trained_run_is_resumed(tmp_path: Path) -> None:
    run = rlframe.train("ppo", "CartPole-v1", 64, log_dir=tmp_path, **SMALL).directory
    result = rlframe.train(resume=run, n_steps=192)
    assert result.directory == run
    assert result.metrics["env_steps"] >= 192


def test_a_preset_is_used_only_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlframe")
    plain = rlframe.train("ppo", "CartPole-v1", 64, log_dir=tmp_path / "plain", **SMALL)
    assert config_of(plain.directory)["algo.epochs"] == rlframe.build("ppo", "CartPole-v1").runner.algo.config.epochs
    assert "experiment=classic/ppo_cartpole" in caplog.text, "it is mentioned"
    named = rlframe.train(n_steps=64, experiment="classic/ppo_cartpole", log_dir=tmp_path / "named", **SMALL)
    assert config_of(named.directory)["algo.epochs"] == 20


def test_build_gives_the_live_objects(tmp_path: Path) -> None:
    with rlframe.build("ppo", "CartPole-v1", n_steps=64, runner="minibatch_rl", **SMALL) as built:
        assert isinstance(built.runner, MinibatchRl)
        built.runner.iterate()
        assert built.runner.env_steps > 0
        assert built.train()["env_steps"] >= 64


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algo": "pppo"}, "did you mean ppo"),
        ({"algo.learning_rte": 1}, "did you mean algo.learning_rate"),
        ({"dry_run": True}, "unknown key dry_run"),
        ({"resume": "/nowhere"}, "name a run directory"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        rlframe.train(log_dir=tmp_path / "runs", **settings) if "resume" not in settings else rlframe.train(**settings)
    assert not list(tmp_path.iterdir())


def test_build_is_for_one_process() -> None:
    with pytest.raises(ConfigError, match="use train for resume=, world_size= and learners="):
        rlframe.build("ppo", "CartPole-v1", world_size=2)
