"""Stopping by signals and by the time limit, in every part of the loop, and exact resume afterwards."""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlframe import launch
from rlframe.agents import Agent
from rlframe.algos import Algorithm, dqn, ppo
from rlframe.core.errors import ConfigError, Interrupted
from rlframe.core.types import Trajectory
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.replay import InMemory
from rlframe.runners import Learner, MinibatchRl, Runner, RunnerConfig
from rlframe.samplers import Sampler, SerialSampler
from tests.tables import read_csv

ENV = EnvConfig("rlframe.envs.debug_envs:time_limit", {"length": 5})
DQN = dqn.Config(learning_starts=16, batch_size=8, replay_ratio=16.0, replay=InMemory(size=256))


def parts(config: Any = DQN, n_steps: int = 64) -> tuple[Sampler, Agent, Algorithm]:
    envs = make_envs(ENV, 4, [0, 1, 2, 3])
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    sampler = SerialSampler(envs, agent, batch_T=8)
    return sampler, agent, config.make_algorithm(agent, sampler.batch_spec, n_steps, 0)


def learning(parts: tuple[Sampler, Agent, Algorithm]) -> tuple[Sampler, Learner]:
    sampler, agent, algo = parts
    return sampler, Learner(agent, algo)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def sending_at_update(algo: Algorithm, which: int) -> None:
    """Send SIGTERM to this process during the update with this number."""
    update = algo.update

    def interrupted() -> Any:
        if algo.progress.updates == which:
            send(signal.SIGTERM)
        return update()

    algo.update = interrupted  # type: ignore[method-assign]


def test_a_stop_between_updates_leaves_the_rest_for_the_resumed_run(tmp_path: Path) -> None:
    sampler, agent, algo = parts()
    sending_at_update(algo, 9)
    with (
        pytest.raises(Interrupted, match="snapshot written") as error,
        logger_context(tmp_path, console=False) as run,
    ):
        MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=64, log_interval_steps=64)).train()
    assert error.value.directory == run.directory, "for the command that continues it"
    assert algo.progress.updates < 9 + 9
    assert algo.updates_due() > 0
    state, _ = load_snapshot(resolve_snapshot(run.directory))
    again = MinibatchRl(*learning(parts()), RunnerConfig(n_steps=64, log_interval_steps=64))
    with logger_context(run.directory, resume=True, console=False):
        again.resume(state)
        assert again.updates_left
        before = again.env_steps
        again.iterate()
    assert again.env_steps == before, "the updates left are made before another batch is collected"
    assert not again.algo.updates_due()


def test_updates_made_after_a_resume_give_the_same_parameters(tmp_path: Path) -> None:
    whole = parts()
    MinibatchRl(*learning(whole), RunnerConfig(n_steps=28, log_interval_steps=28)).train()
    sampler, agent, algo = parts()
    sending_at_update(algo, 9)
    with pytest.raises(Interrupted), logger_context(tmp_path, console=False) as run:
        MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=28, log_interval_steps=28)).train()
    again = MinibatchRl(*learning(parts()), RunnerConfig(n_steps=28, log_interval_steps=28))
    again.load_state_dict(load_snapshot(resolve_snapshot(run.directory))[0])
    again.train()
    assert again.env_steps == whole[2].progress.env_steps
    assert again.algo.progress.updates == whole[2].progress.updates > algo.progress.updates
    for name, value in whole[1].state_dict().items():
        assert torch.equal(again.agent.state_dict()[name], value), name


class Asking(Evaluator):
    """Sends SIGINT to this process during an evaluation."""

    def play(self, number: int = 0, stop: Callable[[], bool] = lambda: False, **kwargs: Any) -> list[Trajectory]:
        looks = count()

        def stop_later() -> bool:
            if next(looks) == 1:
                send(signal.SIGINT)
            return stop()

        return super().play(number, stop_later, **kwargs)


def test_a_stopped_evaluation_is_repeated_by_the_resumed_run(tmp_path: Path) -> None:
    sampler, agent, algo = parts(ppo.Config(minibatches=1, epochs=1))
    config = EvalConfig(n_envs=2, n_episodes=40)  # several chunks
    with pytest.raises(Interrupted) as caught, logger_context(tmp_path, console=False) as run:
        MinibatchRl(
            sampler, Learner(agent, algo), RunnerConfig(n_steps=64, log_interval_steps=32), Asking(ENV, agent, config)
        ).train()
    assert caught.value.exit_status == 130
    assert not (run.directory / "progress.csv").exists() or not (run.directory / "progress.csv").read_text()
    sampler, agent, algo = parts(ppo.Config(minibatches=1, epochs=1))
    again = MinibatchRl(
        sampler, Learner(agent, algo), RunnerConfig(n_steps=64, log_interval_steps=32), Evaluator(ENV, agent, config)
    )
    with logger_context(run.directory, resume=True, console=False):
        again.resume(load_snapshot(resolve_snapshot(run.directory))[0])
        again.train()
    first = read_csv(run.directory / "progress.csv")[1][0]
    assert (first["env_steps"], first["eval/n_episodes"]) == ("0", "40"), "the evaluation before training"


class AskingLater(Asking):
    """Not in the evaluation before training."""

    def play(self, number: int = 0, *args: Any, **kwargs: Any) -> list[Trajectory]:
        return (super() if number else super(Asking, self)).play(number, *args, **kwargs)


def test_a_stopped_evaluation_at_an_end_that_its_row_brought_about_is_repeated_too(tmp_path: Path) -> None:
    config = EvalConfig(n_envs=2, n_episodes=40, interval_steps=10**6)
    options, stop = RunnerConfig(n_steps=320, log_interval_steps=32), "env_steps >= 64"
    sampler, agent, algo = parts(ppo.Config(minibatches=1, epochs=1), 320)
    with pytest.raises(Interrupted), logger_context(tmp_path, console=False) as run:
        MinibatchRl(sampler, Learner(agent, algo), options, AskingLater(ENV, agent, config), stop=stop).train()
    sampler, agent, algo = parts(ppo.Config(minibatches=1, epochs=1), 320)
    again = MinibatchRl(sampler, Learner(agent, algo), options, Evaluator(ENV, agent, config), stop=stop)
    with logger_context(run.directory, resume=True, console=False):
        again.resume(load_snapshot(resolve_snapshot(run.directory))[0])
        last = again.train()
    assert last["eval/return_mean"]
    rows = [json.loads(line) for line in (run.directory / "progress.jsonl").read_text().splitlines()]
    assert [row["env_steps"] for row in rows if "eval/return_mean" in row] == [0, again.env_steps]
    steps = [row["env_steps"] for row in rows if "updates" in row]
    assert steps == sorted({*steps, again.env_steps}), "no row is doubled"


def test_a_run_ends_after_the_first_row_that_reaches_the_target(tmp_path: Path) -> None:
    sampler, agent, algo = parts(ppo.Config(minibatches=1, epochs=1), 10**9)
    evaluator = Evaluator(ENV, agent, EvalConfig(n_envs=2, n_episodes=4))
    returns = iter([1.0, 9.0, 10 * float(np.float32(0.7)) / 0.7, 11.0])  # rewards are float32: 9.9999998
    evaluator.evaluate = lambda *_: {"eval/return_mean": next(returns)}  # type: ignore[method-assign]
    with logger_context(tmp_path, console=False) as run:
        MinibatchRl(
            sampler,
            Learner(agent, algo),
            RunnerConfig(n_steps=10**9, log_interval_steps=32, target_return=10.0),
            evaluator,
        ).train()
    assert 64 <= algo.progress.env_steps < 96
    assert load_snapshot(resolve_snapshot(run.directory))[1]["env_steps"] == algo.progress.env_steps
    said = "eval/return_mean 10 is at least runner.target_return=10"
    assert f"ended at env_steps {algo.progress.env_steps}: {said}" in (run.directory / "debug.log").read_text()
    sampler, agent, algo = parts(ppo.Config(minibatches=1, epochs=1), 10**9)
    evaluator = Evaluator(ENV, agent, EvalConfig(n_envs=2, n_episodes=4))
    again = MinibatchRl(
        sampler, Learner(agent, algo), RunnerConfig(n_steps=10**9, log_interval_steps=32, target_return=10.0), evaluator
    )
    with logger_context(run.directory, resume=True, console=False):
        again.resume(load_snapshot(resolve_snapshot(run.directory))[0])
        assert again.end_reason == said
        again.train()
    assert next(returns) == 11, "there is no further evaluation"


def test_impossible_limits_are_refused_with_their_numbers() -> None:
    with pytest.raises(ConfigError, match=r"runner.target_return=nan"):
        RunnerConfig(target_return=math.nan)
    with pytest.raises(ConfigError, match=r"runner.max_time_s=-1"):
        RunnerConfig(max_time_s=-1)
    with pytest.raises(ConfigError, match=r"runner.nonfinite='ignore' is not one of stop, skip"):
        RunnerConfig(nonfinite="ignore")


def test_sys_exit_in_an_environment_is_an_error_and_a_snapshot_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaves_halfway.py").write_text(
        "import sys, gymnasium\n\n\nclass Leaves(gymnasium.Wrapper):\n    n = 0\n\n    def step(self, action):\n"
        "        self.n += 1\n        return sys.exit(0) if self.n == 40 else super().step(action)\n\n\n"
        "def make():\n    return Leaves(gymnasium.make('CartPole-v1'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = "env=leaves_halfway:make runner=minibatch_rl sampler=serial affinity=none algo.minibatches=1"
    sizes = ["sampler.batch_B=1", "sampler.batch_T=16"]
    assert launch.main([*words.split(), *sizes, "runner.n_steps=400", f"log_dir={tmp_path / 'runs'}"]) == 1
    assert re.search(r"environment 0 called sys.exit\(0\) \(seed \d+, episode \d, step \d+,", capsys.readouterr().err)
    assert load_snapshot(resolve_snapshot(tmp_path / "runs/run_0"))[1]["env_steps"] == 32


@pytest.mark.parametrize(("cls", "where"), [(ppo.PPO, "loss"), (dqn.DQN, "loss"), (dqn.DQN, "receive")])
def test_an_error_within_an_update_or_a_batch_makes_the_resume_no_exact_one(
    cls: type[Algorithm], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = DQN if cls is dqn.DQN else ppo.Config(epochs=2, minibatches=4)
    calls, method = count(), getattr(cls, where)

    def failing(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise ArithmeticError("the second call")
        return method(*arguments)

    with monkeypatch.context() as patch, logger_context(tmp_path, console=False) as run:
        patch.setattr(cls, where, failing)
        with MinibatchRl(*learning(parts(config)), RunnerConfig(n_steps=64)) as runner, pytest.raises(ArithmeticError):
            runner.train()
    with (
        logger_context(tmp_path, console=False, resume=True),
        MinibatchRl(*learning(parts(config)), RunnerConfig(n_steps=64)) as runner,
    ):
        runner.resume(load_snapshot(run.directory)[0])
    assert "the batch or update that an error interrupted is lost" in caplog.text


class OneUpdate(Runner):
    """Makes one update after each batch, of several that are due, and knows nothing of those that are left."""

    def iterate(self) -> None:
        assert self.env_steps < 200, "the second run has no end"
        self.receive(self.collect())
        if self.algo.updates_due():
            self.update(self.learner)


def test_a_runner_of_your_own_that_leaves_updates_ends_also_when_it_is_resumed(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run, OneUpdate(*learning(parts()), RunnerConfig(n_steps=64)) as one:
        one.train()
        assert one.algo.updates_due()
    with (
        logger_context(tmp_path, console=False, resume=True),
        OneUpdate(*learning(parts()), RunnerConfig(n_steps=128, log_interval_steps=32)) as one,
    ):
        one.resume(load_snapshot(run.directory)[0])
        row = one.train()
    assert 128 <= row["env_steps"] < 200
