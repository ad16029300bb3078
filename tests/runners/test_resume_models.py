"""Runs with a transformer, layer normalisation, own convolutions and other distributions are resumed exactly."""

from pathlib import Path

import pytest

from rlframe import launch
from tests.runners.resumed import assert_runs_equal, stopped_at, words

SMALL = "model.hidden=[8] eval.n_episodes=1 eval.n_envs=1 runner.log_interval_steps=80 runner.n_steps=240"
PPO = f"algo=ppo algo.epochs=2 algo.minibatches=2 {SMALL} sampler=serial sampler.batch_T=16 sampler.batch_B=4"
REPLAY = f"{SMALL} sampler=serial sampler.batch_T=4 sampler.batch_B=2 algo.learn_from=20 algo.replay.size=300"
CARTPOLE, PENDULUM = "env=CartPole-v1", "env=Pendulum-v1 env_kwargs.max_episode_steps=45"
TRANSFORMER = "model.memory=transformer model.memory_size=8 model.memory_window=12 model.memory_layers=2"
CONVOLUTIONS = "model.channels=[4,4] model.kernels=[3,2] model.strides=[2,1] model.pools=[1,2] model.image_hidden=[8]"
CASES = {
    "ppo_transformer": f"{PPO} {CARTPOLE} {TRANSFORMER}",
    "r2d1_transformer": f"algo=r2d1 {CARTPOLE} algo.batch_size=2 algo.burn_in=2 algo.learn_T=4 {TRANSFORMER} {REPLAY}",
    "sac_layer_norm": f"algo=sac {PENDULUM} model.layer_norm=true algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "ppo_distribution": f"{PPO} {PENDULUM} model.distribution=squashed_gaussian model.state_dependent_std=true",
    "ppo_convolutions": f"{PPO} env=tests.envs.resumable:Pictures {CONVOLUTIONS}",
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch.main(words(CASES[case], tmp_path / "whole")) == 0
    stopped_at(130, CASES[case], tmp_path / "parts", monkeypatch)
    assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "parts/run_0")
