"""AsyncRl with a source of the user's own that collects ahead, by key and in a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chz
import pytest

from rlframe import launch
from rlframe.agents import Agent
from rlframe.core.types import Samples, Trajectory
from rlframe.samplers import SamplerConfig, SerialSampler, SourceAhead
from tests.runners.resumed import words
from tests.tables import read_csv

CASE = "algo=impala env=CartPole-v1 sampler.batch_T=8 sampler.batch_B=4 model.hidden=[8] eval.n_episodes=1 "
CASE += "eval.n_envs=1 runner=async_rl runner.n_steps=256 runner.log_interval_steps=128"


class OneBatchAhead(SourceAhead):
    """Collects each batch when the one before is taken, with the parameters of then."""

    backend = "one batch ahead"

    def __init__(self, sampler: SerialSampler) -> None:
        self.sampler, self.batch_spec = sampler, sampler.batch_spec
        self.env, self.seed = sampler.env, sampler.seed
        self.version = self.posted_version = 0
        self.checks = 0
        self.next: list[tuple[Samples, int]] = []

    @property
    def n_ready(self) -> int:
        return len(self.next)

    def collect(self) -> Samples:
        if not self.next:
            self.next.append(self._collected())
        samples, self.version = self.next.pop()
        self.next.append(self._collected())
        return samples

    def _collected(self) -> tuple[Samples, int]:
        return self.sampler.collect().map(lambda x: x.clone()), self.posted_version

    def trajectories(self) -> list[Trajectory]:
        return self.sampler.trajectories()

    def refresh(self, agent: Agent) -> None:
        self.posted_version += 1

    def check(self) -> None:
        self.checks += 1

    def close(self) -> None:
        self.sampler.close()


@chz.chz
class Config(SamplerConfig):
    """One batch ahead, in this process."""

    collects_ahead = True

    def make_sampler(self, envs: Any, agent: Agent, seed: int) -> OneBatchAhead:
        return OneBatchAhead(SerialSampler(envs, agent, self.batch_T, seed))


def test_async_rl_takes_any_source_that_collects_ahead(tmp_path: Path) -> None:
    assert launch.main(words(f"{CASE} sampler=tests.seams.test_ahead", tmp_path)) == 0
    row = read_csv(tmp_path / "run_0/progress.csv")[1][-1]
    assert int(row["env_steps"]) >= 256
    assert float(row["async/staleness_mean"]) == pytest.approx(1, abs=0.3)
    assert float(row["async/queue_mean"]) > 0.5
    assert launch.main([f"resume={tmp_path / 'run_0'}", "trust=true", "runner.n_steps=512"]) == 0
    assert int(read_csv(tmp_path / "run_0/progress.csv")[1][-1]["env_steps"]) >= 512


def test_a_source_that_always_has_a_batch_leaves_time_to_learn_and_log(tmp_path: Path) -> None:
    dqn = "algo=dqn algo.learning_starts=32 algo.batch_size=8 algo.replay_ratio=8 algo.replay.size=400"
    case = f"{CASE.replace('algo=impala', dqn)} runner.sampler_waits=false sampler=tests.seams.test_ahead"
    assert launch.main(words(case, tmp_path)) == 0
    rows = read_csv(tmp_path / "run_0/progress.csv")[1]
    assert len(rows) == 3
    assert int(rows[1]["updates"]) >= 2
