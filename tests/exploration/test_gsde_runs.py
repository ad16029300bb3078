"""Whole runs with state-dependent exploration and parameter noise: resumed exactly, equal in worker processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlframe import launch
from rlframe.deploy.load import load_policy
from tests.runners.resumed import assert_resumed_exactly, count_equal, last_state, words
from tests.runners.resumed_cases import PENDULUM, SMALL
from tests.variants import variants

REPLAY = f"{PENDULUM} sampler.batch_T=4 sampler.batch_B=2 algo.learning_starts=20 algo.batch_size=8 algo.replay_ratio=1"
BATCHES = f"{PENDULUM} sampler.batch_T=16 sampler.batch_B=4"
REWARDS = "env.normalize_reward=true env.reward_clip=[-5,5]"
CASES = {
    "sac_gsde": f"algo=sac explore=gsde explore.interval=6 {REPLAY}",
    "td3_gsde": f"algo=td3 explore=gsde explore.interval=0 explore.sigma=linear(0.1,0.05) {REPLAY}",
    "ppo_gsde": f"algo=ppo algo.epochs=2 algo.minibatches=2 explore=gsde model.memory=gru {BATCHES} {REWARDS}",
    "a2c_gsde": f"algo=a2c explore=gsde model.distribution=squashed_gaussian {BATCHES}",
    "ddpg_parameter_noise": f"algo=ddpg explore=parameter_noise explore.interval=9 {REPLAY}",
    "td3_parameter_noise": f"algo=td3 explore=parameter_noise explore.std_last=0.01 {REPLAY}",
}
FAST = ("sac_gsde", "ppo_gsde", "ddpg_parameter_noise")


@pytest.mark.parametrize("case", variants(CASES, FAST))
def test_a_resumed_run_equals_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"{CASES[case]} {SMALL} sampler=serial"
    policy, observation = load_policy(assert_resumed_exactly(run, tmp_path, monkeypatch)), np.zeros(3, np.float32)
    actions = []
    for explore in (False, False, True):
        policy.reset()  # of memory
        actions.append(policy.act(observation, explore=explore))
    assert np.array_equal(*actions[:2])
    assert not np.array_equal(*actions[1:])


@pytest.mark.slow  # test_runs.py compares their actions
@pytest.mark.parametrize("case", CASES)
def test_acting_in_workers_changes_nothing(case: str, tmp_path: Path) -> None:
    states = []
    for sampler in ("serial", "cpu sampler.n_workers=2"):
        directory = tmp_path / sampler[:3]
        assert launch.main(words(f"{CASES[case]} {SMALL} sampler={sampler}", directory)) == 0
        states.append({key: last_state(directory / "run_0")[key] for key in ("agent", "algo")})
    assert count_equal(*states, "state") > 5
