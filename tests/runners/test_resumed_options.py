"""Runs with options that have state of their own, stopped and resumed, equal undisturbed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframe import launch
from tests.runners.resumed import assert_runs_equal, stopped_at, words

SMALL = "model.hidden=[8] eval.n_episodes=1 eval.n_envs=1 runner.log_interval_steps=80 runner.n_steps=240"
ON_POLICY = f"{SMALL} sampler=serial sampler.batch_T=8 sampler.batch_B=4"
REPLAY = f"{SMALL} sampler=serial sampler.batch_T=4 sampler.batch_B=2 algo.learn_from=20 algo.replay.size=300"
CARTPOLE, PENDULUM = "env=CartPole-v1", "env=Pendulum-v1 env_kwargs.max_episode_steps=45"
DELAYED = "algo.batch_size=8 algo.replay_ratio=1 algo.policy_interval=2 algo.target_interval=3"
SOFT = "algo.huber_delta=inf algo.target_interval=2 algo.target_tau=linear(0.5,0.1)"
CASES = {
    "kl_penalty": f"algo=ppo {CARTPOLE} algo.epochs=2 algo.minibatches=2 algo.clip=inf algo.kl_coef=1 {ON_POLICY}",
    "acting_errors": f"algo=dqn {CARTPOLE} algo.prioritized=true algo.initial_priority=td algo.n_step=3 {SOFT} "
    f"algo.batch_size=8 {REPLAY}",
    "state_interval": f"algo=r2d1 {CARTPOLE} algo.state_interval=8 {SOFT} algo.batch_size=2 algo.burn_in=2 "
    f"algo.learn_T=4 model.memory=lstm {REPLAY}",
    "target_noise": f"algo=ddpg {PENDULUM} algo.target_noise=0.2 algo.n_critics=2 algo.target_clip=9 {DELAYED} "
    f"{REPLAY}",
    "gaussian_prior": f"algo=sac {PENDULUM} algo.action_prior=gaussian {DELAYED} {REPLAY}",
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch.main(words(CASES[case], tmp_path / "whole")) == 0
    stopped_at(130, CASES[case], tmp_path / "parts", monkeypatch)
    assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "parts/run_0")


@pytest.mark.slow
def test_two_ranks_have_one_kl_penalty_and_resume_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["kl_penalty"].replace("eval.n_episodes=1", "eval.n_episodes=2") + " world_size=2 runner=sync_rl"
    assert launch.main(words(case, tmp_path / "whole")) == 0
    stopped_at(130, case, tmp_path / "parts", monkeypatch)
    for rank in (0, 1):
        assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "parts/run_0", rank)
