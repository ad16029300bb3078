"""Whole runs with state-dependent exploration and parameter noise: resumed exactly, equal in worker processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlframe import launch
from rlframe.deploy.load import load_policy
from tests.runners.resumed import assert_runs_equal, count_equal, last_state, stopped_at, words

PENDULUM = "env=Pendulum-v1 env_kwargs.max_episode_steps=45"
SMALL = "model.hidden=[8] eval.n_episodes=1 eval.n_envs=1 runner.log_interval_steps=80 runner.n_steps=240"
REPLAY = "sampler.batch_T=4 sampler.batch_B=2 algo.learn_from=20 algo.batch_size=8 algo.replay_ratio=1"
BATCHES = "sampler.batch_T=16 sampler.batch_B=4"
CASES = {
    "sac_gsde": f"algo=sac explore=gsde explore.interval=6 {REPLAY}",
    "td3_gsde": f"algo=td3 explore=gsde explore.interval=0 explore.sigma=linear(0.1,0.05) {REPLAY}",
    "ppo_gsde": f"algo=ppo algo.epochs=2 algo.minibatches=2 explore=gsde model.memory=gru {BATCHES}",
    "a2c_gsde": f"algo=a2c explore=gsde model.distribution=squashed_gaussian {BATCHES}",
    "ddpg_parameter_noise": f"algo=ddpg explore=parameter_noise explore.interval=9 {REPLAY}",
    "td3_parameter_noise": f"algo=td3 explore=parameter_noise explore.std_last=0.01 {REPLAY}",
}
FAST = ("sac_gsde", "ppo_gsde", "ddpg_parameter_noise")
SLOW = pytest.mark.slow
MARKED = [case if case in FAST else pytest.param(case, marks=SLOW) for case in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_a_resumed_run_equals_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"{CASES[case]} {PENDULUM} {SMALL} sampler=serial"
    assert launch.main(words(run, tmp_path / "whole")) == 0
    stopped_at(130, run, tmp_path / "parts", monkeypatch)
    assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "parts/run_0")
    policy, observation = load_policy(tmp_path / "whole/run_0"), np.zeros(3, np.float32)
    actions = []
    for explore in (False, False, True):
        policy.reset()  # of memory
        actions.append(policy.act(observation, explore=explore))
    assert np.array_equal(*actions[:2])
    assert not np.array_equal(*actions[1:])


@pytest.mark.parametrize(
    "case", ["td3_gsde", *(pytest.param(x, marks=pytest.mark.slow) for x in CASES if "td3_g" not in x)]
)
def test_acting_in_workers_changes_nothing(case: str, tmp_path: Path) -> None:
    states = []
    for sampler in ("serial", "cpu sampler.n_workers=2"):
        directory = tmp_path / sampler[:3]
        assert launch.main(words(f"{CASES[case]} {PENDULUM} {SMALL} sampler={sampler}", directory)) == 0
        states.append({key: last_state(directory / "run_0")[key] for key in ("agent", "algo")})
    assert count_equal(*states, "state") > 5
