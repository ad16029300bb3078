"""Runs that a script composed: what is recorded of them, and where they may go on."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

import rlframe
from rlframe.algos import dqn
from rlframe.core.errors import ConfigError, Interrupted, SnapshotError
from rlframe.core.own_code import source_digest
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot
from rlframe.replay import InMemory, NStep, Replay, Transitions, make_replay
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler

OPTIONS = RunnerConfig(n_steps=64, log_interval_steps=64)
CONFIG = dqn.Config(learning_starts=16, batch_size=8, replay_ratio=4.0, replay=InMemory(size=256))
MINE = """
import gymnasium
from rlframe.envs.debug_envs import time_limit


def make(length):
    return time_limit(length=length)
"""


@dataclass
class Relabelled:
    """A replay whose returns are a tenth."""

    own: Replay[Transitions]

    @property
    def n_rows(self) -> int:
        return self.own.n_rows

    def append(self, samples: Samples) -> None:
        self.own.append(samples)

    def sample(self, n: int, beta: float = 0.0) -> Transitions:
        batch = self.own.sample(n, beta)
        return replace(batch, return_=batch.return_ / 10)

    def update_priorities(self, index: Any, priority: Any) -> None:
        self.own.update_priorities(index, priority)

    def state_dict(self) -> dict[str, Any]:
        return self.own.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own.load_state_dict(state)


def composed(env: Any = "rlframe.envs.debug_envs:time_limit", relabels: bool = False) -> MinibatchRl:
    envs = make_envs(EnvConfig(env, {"length": 5}, "python"), 4, [0, 1, 2, 3])
    agent = CONFIG.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    sampler, spec = SerialSampler(envs, agent, batch_T=8), BatchSpec(8, 4)
    replay = CONFIG.make_replay(agent, spec)
    algo = dqn.DQN(agent, Relabelled(replay) if relabels else replay, CONFIG.make_exploration(spec, 64), 64, CONFIG)
    return MinibatchRl(sampler, Learner(agent, algo), OPTIONS)


def test_a_replay_of_the_script_s_own_is_resumed_in_the_script_alone(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run, composed(relabels=True) as runner:
        runner.train()
    with pytest.raises(SnapshotError, match=r"with \S*:Relabelled as replay, and this run has rlframe's own replay; a"):
        rlframe.restore(run.directory, n_steps=128, trust=True)
    state, _ = load_snapshot(run.directory)
    with composed() as other, pytest.raises(ValueError, match="a run that a script composed continues in that script"):
        other.load_state_dict(state)
    with composed(relabels=True) as again:
        again.load_state_dict(state)
        assert again.env_steps == runner.env_steps
    state.pop("parts")  # as in a snapshot of an earlier version
    with composed() as unchecked:
        unchecked.load_state_dict(state)


def stop_at_an_update(runner: MinibatchRl) -> None:
    update = runner.algo.update

    def stopped() -> Any:
        if not runner.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return update()

    runner.algo.update = stopped  # type: ignore[method-assign]


def test_a_stop_says_whether_its_snapshot_is_written(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run, composed() as runner:
        runner.train()
    with logger_context(run.directory, resume=True, console=False, snapshot_mode="none"), composed() as again:
        again.resume(load_snapshot(run.directory)[0])
        again.n_steps = 1_000
        stop_at_an_update(again)
        with pytest.raises(Interrupted, match=r"no snapshot written; the last is of step \d+$"):
            again.train()
    with composed() as unrecorded:
        stop_at_an_update(unrecorded)
        with pytest.raises(Interrupted, match=r"of 64, no snapshot written$"):
            unrecorded.train()


def test_code_of_an_environment_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_a_script.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    name = "mine_of_a_script:make"
    with logger_context(tmp_path, console=False) as run, composed(name) as runner:
        runner.train()
    monkeypatch.delitem(sys.modules, "mine_of_a_script")
    code = json.loads((run.directory / "params.json").read_text())["code"]
    assert code == {"mine_of_a_script": source_digest("mine_of_a_script")}
    assert all(code.values())


def test_a_record_is_of_one_runner(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run, composed() as runner:
        runner.train()
        rows = (run.directory / "progress.csv").read_text()
        with composed() as other, pytest.raises(ConfigError, match=r"run_0 is another runner's; train this one in a"):
            other.train()
    assert (run.directory / "progress.csv").read_text() == rows


def test_a_replay_is_made_by_the_name_of_its_kind() -> None:
    numbers = spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2), BatchSpec(8, 4), NStep(0.99, 3)
    with pytest.raises(ConfigError, match="memori"):
        make_replay("memori", *numbers)
    assert str(make_replay("memory", *numbers, alpha=0.5)) == str(make_replay(InMemory(), *numbers, alpha=0.5))
