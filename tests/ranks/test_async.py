"""AsyncRl in several ranks: learners of one replay, or with samplers of their own; they learn the same and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframe import launch
from tests.runners.resumed import log, stopped_at, words
from tests.tables import read_csv

CASE = (
    "env=CartPole-v1 runner=async_rl sampler=serial sampler.batch_B=8 model.hidden=[8] eval.n_episodes=2 eval.n_envs=2 "
    "eval.n_workers=0"
)
SHORTER = "runner.n_steps=640 runner.log_interval_steps=160 sampler.batch_T=4"
DQN = f"{SHORTER} algo=dqn algo.learning_starts=100 algo.replay_ratio=2 algo.batch_size=16"
LONGER = "runner.n_steps=1_280 runner.log_interval_steps=320 sampler.batch_T=16"
PPO = f"{LONGER} algo=ppo algo.minibatches=2"

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.parametrize(
    "algo",
    [
        f"{DQN} runner.n_samplers=2 runner.sampler_waits=true",
        pytest.param(f"{DQN} algo.prioritized=true", marks=pytest.mark.slow),
        pytest.param(f"{PPO} runner.n_samplers=2", marks=pytest.mark.slow),
        pytest.param(f"{LONGER} algo=impala", marks=pytest.mark.slow),
    ],
)
def test_two_learners_learn_the_same_and_a_stopped_run_goes_on(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That parameters are equal is checked at each row of the log."""
    stopped_at(200, f"{CASE} learners=2 {algo}", tmp_path, monkeypatch)
    run = tmp_path / "run_0"
    row = log(run)[-1]
    assert int(row["env_steps"]) >= 640
    assert int(row["updates"]) > 10
    assert 0 <= float(row["async/staleness_mean"]) < 50
    played = {int(episode["env"]) for episode in read_csv(run / "episodes.csv")[1]}
    assert played == set(range(8)), "each environment has its own number over all ranks and samplers"


@pytest.mark.slow
def test_the_seeds_of_environments_are_those_of_one_sampler(tmp_path: Path) -> None:
    found = []
    for name, given in {"two": "learners=2 runner.n_samplers=2", "one": ""}.items():
        assert launch.main(words(f"{CASE} {PPO} {given}", tmp_path / name)) == 0
        rows = read_csv(tmp_path / name / "run_0/episodes.csv")[1]
        found.append({row["env"]: row["seed"] for row in rows})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 8
