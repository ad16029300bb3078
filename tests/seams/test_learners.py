"""Several learners on one source of samples: each has its metrics and its place in snapshots; resume is exact."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlframe.agents import Agent
from rlframe.algos import dqn, ppo
from rlframe.core.errors import ConfigError, Interrupted
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.replay import InMemory
from rlframe.runners import Callback, Learner, MinibatchRl, Runner, RunnerConfig
from rlframe.samplers import SerialSampler, Source
from tests.runners.resumed import count_equal, last_state, log
from tests.tables import read_csv

PPO = ppo.Config(minibatches=2, epochs=1)
DQN = dqn.Config(learning_starts=16, batch_size=8, replay_ratio=2.0, replay=InMemory(size=256))
OPTIONS = RunnerConfig(n_steps=192, log_interval_steps=64)


class TwoPlayers(Source):
    """A toy: each learner's agent plays environments of its own, side by side."""

    backend = "a toy"
    batch_spec = BatchSpec(8, 4)

    def __init__(self, samplers: Mapping[str, SerialSampler]) -> None:
        self.samplers = samplers

    def collect(self) -> dict[str, Samples]:
        return {name: sampler.collect() for name, sampler in self.samplers.items()}

    def trajectories(self) -> list[Trajectory]:
        return [replace(t, agent=name) for name, sampler in self.samplers.items() for t in sampler.trajectories()]

    def refresh(self, agent: Agent) -> None:
        """Nothing: each sampler has its learner's agent."""

    def state_dict(self) -> dict[str, Any]:
        return {name: sampler.state_dict() for name, sampler in self.samplers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        return [reason for name, each in self.samplers.items() for reason in each.load_state_dict(state[name])]

    def close(self) -> None:
        for sampler in self.samplers.values():
            sampler.close()


def two_learners(callbacks: tuple[Callback, ...] = (), stop: str = "") -> MinibatchRl:
    samplers, learners = {}, {}
    for name, config, seed in (("red", PPO, 1), ("blue", DQN, 2)):
        envs = make_envs(EnvConfig("CartPole-v1"), 4, [seed, 10 + seed, 20 + seed, 30 + seed])
        agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), seed)
        samplers[name] = SerialSampler(envs, agent, 8, seed)
        learners[name] = Learner(agent, config.make_algorithm(agent, BatchSpec(8, 4), OPTIONS.n_steps, seed))
    return MinibatchRl(TwoPlayers(samplers), learners, OPTIONS, callbacks=callbacks, stop=stop)


def test_each_learner_has_its_own_metrics(tmp_path: Path) -> None:
    with two_learners() as runner, logger_context(tmp_path, console=False) as run:
        row = runner.train()
    red, blue = runner.learners.values()
    assert row["env_steps"] == runner.env_steps == max(each.algo.progress.env_steps for each in (red, blue)) >= 192
    assert row["updates"] == runner.updates == max(each.algo.progress.updates for each in (red, blue))
    for name in ("algo/red/policy_loss", "algo/blue/loss", "algo/blue/epsilon", "replay/blue/ratio"):
        assert name in row
    assert "algo/loss" not in row
    assert row["episode/red/return_mean"] > 0 < row["episode/blue/return_mean"]
    players = {episode["agent"] for episode in read_csv(run.directory / "episodes.csv")[1]}
    assert players == {"red", "blue"}


def test_two_learners_have_their_places_in_a_snapshot_and_are_resumed_exactly(tmp_path: Path) -> None:
    with two_learners() as runner, logger_context(tmp_path / "whole", console=False) as whole:
        runner.train()
    with two_learners() as runner, logger_context(tmp_path / "parts", console=False) as parts:
        record = Runner.record_episodes
        runner.record_episodes = lambda: (_stop_at(runner, 100), record(runner))[1]  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            runner.train()
    state = load_snapshot(resolve_snapshot(parts.directory))[0]
    assert {"agent/red", "agent/blue", "algo/red", "algo/blue", "rewards/red", "rewards/blue"} < state.keys()
    assert "agent" not in state
    with two_learners() as again, logger_context(parts.directory, resume=True, console=False):
        again.resume(state)
        again.train()
    assert log(whole.directory) == log(parts.directory)
    assert count_equal(last_state(whole.directory), last_state(parts.directory), "state") > 30


def _stop_at(runner: Runner, env_steps: int) -> None:
    if runner.env_steps >= env_steps:
        os.kill(os.getpid(), signal.SIGTERM)


def test_callbacks_and_stop_rules_see_each_learner(tmp_path: Path) -> None:
    seen: set[str] = set()

    class Sees(Callback):
        def on_update(self, metrics: Any) -> None:
            seen.update(metrics)

    with two_learners((Sees(),), "algo/blue/epsilon <= 1 and env_steps > 60") as runner:
        runner.train()
    assert {"algo/red/policy_loss", "algo/blue/loss"} < seen
    assert runner.end_reason == "stop='algo/blue/epsilon <= 1 and env_steps > 60' holds"
    assert runner.env_steps < 192


def test_what_needs_one_learner_names_them_all() -> None:
    with closing(two_learners()) as runner, pytest.raises(ConfigError, match=r"learners red, blue.*runner\.learners"):
        _ = runner.agent


def test_a_batch_of_no_learner_is_an_error() -> None:
    with two_learners() as runner:
        runner.sampler.samplers["green"] = runner.sampler.samplers.pop("blue")  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="batches of red, green, and the learners of this run are red, blue"):
            runner.train()
