"""A learner without a source of samples: it trains from data on the clock of updates, with all that a run has."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlframe import launch
from rlframe.algos import dqn, iql, ppo, sac
from rlframe.core.errors import ConfigError, Interrupted
from rlframe.core.types import BatchSpec
from rlframe.deploy.load import load_policy
from rlframe.envs import EnvConfig, make_envs
from rlframe.envs.options import EnvOptions
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import list_snapshots, load_snapshot, resolve_snapshot
from rlframe.replay import InMemory
from rlframe.rewards.normalize import NormalizedRewards
from rlframe.runners import Callback, Learner, MinibatchRl, OfflineRl, RunnerConfig
from rlframe.samplers import SerialSampler
from tests.runners.resumed import count_equal, last_state, log
from tests.tables import read_csv

ENV = EnvConfig("CartPole-v1")
DQN = dqn.Config(learning_starts=16, batch_size=8, replay=InMemory(size=256), learning_rate="linear(1e-2,0)")
OPTIONS = RunnerConfig(n_steps=60, log_interval_steps=20)


def offline(options: RunnerConfig = OPTIONS, filled: bool = True, **others: Any) -> OfflineRl:
    """A runner of DQN on 128 rows of random play."""
    envs = make_envs(ENV, 4, [0, 1, 2, 3])
    agent = DQN.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    algo = DQN.make_algorithm(agent, BatchSpec(32, 4), options.n_steps, 0)
    sampler = SerialSampler(envs, agent, 32)
    if filled:
        algo.replay.append(sampler.collect())
    sampler.close()
    evaluator = Evaluator(ENV, agent, EvalConfig(n_envs=2, n_episodes=2))
    return OfflineRl(Learner(agent, algo), options, evaluator, **others)


def test_it_trains_logs_and_evaluates_in_updates(tmp_path: Path) -> None:
    with offline() as runner, logger_context(tmp_path, console=False, snapshot_mode="all") as run:
        row = runner.train()
    rows = read_csv(run.directory / "progress.csv")[1]
    assert [int(each["updates"]) for each in rows] == [0, 20, 40, 60]
    assert all(float(each["eval/return_mean"]) > 0 for each in rows)
    assert {each["env_steps"] for each in rows} == {"0"}
    assert row["algo/loss"] > 0
    assert [float(each["algo/epsilon"]) for each in rows] == pytest.approx([1, 0.1, 0.1, 0.1])
    rates = [float(each["algo/learning_rate"]) for each in rows]
    assert rates == pytest.approx([1e-2 * (1 - n / 60) for n in (0, 9.5, 29.5, 49.5)])
    snapshots = list_snapshots(run.directory / "snapshot")
    assert [int(path.name.removeprefix("step_")) for path in snapshots] == [0, 20, 40, 60]
    assert load_policy(run.directory).act(np.zeros(4, np.float32)) in (0, 1)


class StopsAfter(Callback):
    """Stops the run, or ends this process's training by a signal, after so many updates."""

    def __init__(self, updates: int, by_signal: bool = False) -> None:
        self.updates, self.by_signal = updates, by_signal

    def on_update(self, metrics: Mapping[str, Any]) -> None:
        if self.runner.updates == self.updates and self.by_signal:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.runner.updates == self.updates:
            self.stop("enough")


def test_actions_are_not_random_once_something_was_learned_from_data() -> None:
    config = sac.Config(batch_size=8, replay=InMemory(size=256))
    envs = make_envs(EnvConfig("Pendulum-v1"), 4, [0, 1, 2, 3])
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    algo = config.make_algorithm(agent, BatchSpec(32, 4), 60, 0)
    sampler = SerialSampler(envs, agent, 32)
    algo.replay.append(sampler.collect())
    sampler.close()
    assert agent.random == 1
    with OfflineRl(Learner(agent, algo), OPTIONS) as runner:
        runner.train()
    assert agent.random == 0


@pytest.mark.parametrize("by_signal", [True, False])
def test_it_is_stopped_and_resumed_exactly(tmp_path: Path, by_signal: bool) -> None:
    with offline(callbacks=[StopsAfter(-1)]) as runner, logger_context(tmp_path / "whole", console=False) as whole:
        runner.train()
    stops = pytest.raises(Interrupted, match="at updates 33 of 60") if by_signal else nullcontext()
    stopping, parts = offline(callbacks=[StopsAfter(33, by_signal)]), tmp_path / "parts"
    with stopping as runner, stops, logger_context(parts, console=False):
        runner.train()
    run = next(parts.rglob("run_*"))
    state, meta = load_snapshot(resolve_snapshot(run))
    assert (meta["env_steps"], meta["updates"]) == (0, 33)
    with offline(callbacks=[StopsAfter(-1)]) as again, logger_context(run, resume=True, console=False):
        again.resume(state)
        again.train()
    assert log(whole.directory) == log(run)
    assert count_equal(last_state(whole.directory), last_state(run), "state") > 10


@pytest.mark.parametrize(
    ("options", "stop", "reason"),
    [
        (OPTIONS, "updates >= 40", "stop='updates >= 40' holds"),
        (RunnerConfig(n_steps=60, log_interval_steps=20, target_return=1.0), "", "eval/return_mean"),
    ],
)
def test_it_ends_by_rules_and_targets(options: RunnerConfig, stop: str, reason: str) -> None:
    with offline(options, stop=stop) as runner:
        runner.train()
    assert runner.updates == (40 if stop else 0)
    assert reason in runner.end_reason


def test_a_log_that_goes_on_after_a_resume_has_no_row_twice(tmp_path: Path) -> None:
    with offline() as runner, logger_context(tmp_path, console=False, snapshot_mode="all") as run:
        runner.train()
    state = load_snapshot(list_snapshots(run.directory / "snapshot")[1])[0]
    with offline() as again, logger_context(run.directory, resume=True, console=False, snapshot_mode="all"):
        again.resume(state)
        assert len(read_csv(run.directory / "progress.csv")[1]) == 2, "rows after the snapshot are dropped"
        again.train()
    assert [int(each["updates"]) for each in read_csv(run.directory / "progress.csv")[1]] == [0, 20, 40, 60]


def test_statistics_of_observations_are_those_of_the_data_and_a_sampler_goes_on() -> None:
    envs = make_envs(ENV, 4, [0, 1, 2, 3])
    config = iql.Config(batch_size=8, replay_ratio=1.0, replay=InMemory(size=4000))
    network = ModelConfig(hidden=(8,), normalize_observation=True)
    agent = config.make_agent(envs.observation_space, envs.action_space, network, 0)
    algo, sampler = config.make_algorithm(agent, BatchSpec(32, 4), 60, 0), SerialSampler(envs, agent, 32)
    data = [sampler.collect().map(torch.clone) for _ in range(8)]
    for samples in data:
        algo.replay.append(samples)
    with OfflineRl(Learner(agent, algo), OPTIONS) as runner:
        runner.train()
    speed = torch.cat([samples.observation[samples.valid] for samples in data])[:, 1]
    (norm,) = agent.model.observation_norm.parts
    assert norm.mean[1].item() == pytest.approx(speed.mean().item(), abs=0.15 * speed.std().item())
    assert norm.variance[1].sqrt().item() == pytest.approx(speed.std().item(), rel=0.15)
    before = norm.count.item()
    with MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=256, log_interval_steps=128)) as runner:
        row = runner.train()
    assert (row["env_steps"], row["updates"]) == (algo.progress.env_steps, 60 + algo.progress.env_steps // 8)
    assert norm.count.item() > before


def test_an_algorithm_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DQN has no rows to learn from.*algo\.replay\.append"):
        offline(filled=False)
    envs = make_envs(ENV, 1, [0])
    agent = ppo.Config().make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    algo = ppo.Config().make_algorithm(agent, BatchSpec(8, 4), 60, 0)
    with pytest.raises(ConfigError, match="PPO has no rows to learn from"):
        OfflineRl(Learner(agent, algo), OPTIONS)
    envs.close()


def test_rewards_that_would_be_ignored_are_refused() -> None:
    with offline() as runner, pytest.raises(ConfigError, match="the learner has NormalizedRewards"):
        OfflineRl(replace(runner.learner, rewards=NormalizedRewards(0.99, EnvOptions())), OPTIONS)


def test_the_command_line_says_that_no_replay_is_a_data_set_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["runner=offline_rl", "algo=dqn", "env=CartPole-v1", f"log_dir={tmp_path / 'runs'}"]) == 2
    assert "runner=offline_rl learns from data" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_ends_although_rows_that_the_algorithm_received_have_more_updates_due() -> None:
    sampler = SerialSampler(make_envs(ENV, 4, [0, 1, 2, 3]), offline().agent, 32)
    with offline(callbacks=[StopsAfter(70)]) as runner:
        runner.algo.receive(sampler.collect())
        runner.train()
        state = runner.state_dict()
        assert runner.algo.updates_due()
    sampler.close()
    with offline(callbacks=[StopsAfter(70)]) as again:
        again.load_state_dict(state)
        again.train()
    assert again.updates == 60
