"""Tests of the runners: when they evaluate, log and save, and what they count."""

import copy
import math
from pathlib import Path

import pytest
import torch

from rlframe.agents import make_policy_agent
from rlframe.algos import ppo
from rlframe.core.errors import ConfigError
from rlframe.core.files import read_json
from rlframe.envs import EnvConfig, EnvError, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.experiment.ranks import for_ranks
from rlframe.experiment.settings import from_flat
from rlframe.launch import main
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.rank_state import list_snapshots
from rlframe.record.snapshot import load_snapshot, read_meta, resolve_snapshot
from rlframe.runners import Callback, Clock, Learner, MinibatchRl, Runner, RunnerConfig
from rlframe.runners.learner import Diverged
from rlframe.samplers import SerialSampler
from tests.tables import read_csv

CONFIG = ppo.Config(minibatches=2, epochs=1)


def parts(env: EnvConfig, n_steps: int = 256):
    envs = make_envs(env, 4, [0, 1, 2, 3])
    agent = make_policy_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)))
    sampler = SerialSampler(envs, agent, batch_T=16)
    return sampler, agent, ppo.PPO(agent, sampler.batch_spec, n_steps, CONFIG)


def learning(parts):
    sampler, agent, algo = parts
    return sampler, Learner(agent, algo)


def test_env_steps_count_valid_rows_only():
    sampler, agent, algo = parts(EnvConfig("rlframe.envs.debug_envs:time_limit", {"length": 4}))
    row = MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=64, log_interval_steps=64)).train()
    batches = row["updates"] / CONFIG.minibatches
    assert row["env_steps"] == pytest.approx(batches * 64 * 4 / 5, abs=4)  # one row in five is an episode's end
    sampler.close()


def test_parts_with_different_agents_are_refused():
    """One would be trained, and another one act or be saved."""
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    other = copy.deepcopy(agent)
    with pytest.raises(ConfigError, match="the algorithm learns another agent than its Learner has"):
        MinibatchRl(sampler, Learner(other, algo), RunnerConfig(n_steps=64))
    with pytest.raises(TypeError, match=r"a learner is Learner\(agent, algo\), not Learner\(PPO, PolicyAgent\)"):
        MinibatchRl(sampler, Learner(algo, agent), RunnerConfig(n_steps=64))
    its = CONFIG.make_algorithm(other, sampler.batch_spec, 64, 0)
    with pytest.raises(ConfigError, match="SerialSampler acts with another agent"):
        MinibatchRl(sampler, Learner(other, its), RunnerConfig(n_steps=64))
    sampler.close()


def test_an_evaluator_of_another_agent_is_told_as_it_may_have_averaged_weights(caplog):
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    evaluator = Evaluator(EnvConfig("CartPole-v1"), copy.deepcopy(agent), EvalConfig(n_envs=1, n_episodes=1))
    with MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=64), evaluator):
        assert "the evaluator plays another agent than the Learner has" in caplog.text


@pytest.mark.parametrize(("n_steps", "warns"), [(64, True), (128, False), (1_280, True)])
def test_schedules_over_another_number_of_steps_than_the_run_s_are_told(n_steps, warns, caplog):
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"), n_steps)
    MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=128))
    line = f"of learning_rate go over {n_steps:,} env_steps, and the run has 128: make the algorithm with n_steps=128"
    assert (line in caplog.text) == warns
    sampler.close()


def test_a_runner_without_evaluation_scores_by_training_episodes():
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    runner = MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=512))
    row = runner.train()
    assert not any(name.startswith("eval/") for name in row)
    assert runner.log.return_mean == row["episode/return_mean"]


def test_an_error_in_an_environment_saves_what_was_learned_first(tmp_path):
    sampler, agent, algo = parts(EnvConfig("rlframe.envs.debug_envs:faulty", {"fault": "raise", "at": 40}))
    with pytest.raises(EnvError, match="step 40"), logger_context(tmp_path, console=False) as run:
        MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=10_000, log_interval_steps=10_000)).train()
    state, meta = load_snapshot(resolve_snapshot(run.directory))
    assert meta["env_steps"] == 128
    for name, value in agent.state_dict().items():
        assert (state["agent"][name] == value).all()


def test_a_loaded_runner_continues_counts_episodes_and_time():
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    runner = MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=256))
    runner.train()
    state = runner.state_dict()
    other = MinibatchRl(*learning(parts(EnvConfig("CartPole-v1"))), RunnerConfig(n_steps=512, log_interval_steps=256))
    other.load_state_dict(state)
    assert other.env_steps == runner.env_steps
    assert other.algo.progress.state_dict() == runner.algo.progress.state_dict()
    assert list(other.log.recent) == list(runner.log.recent)
    assert other.log.n_episodes == runner.log.n_episodes
    assert other.log.timers.elapsed_s() >= state["runner"]["elapsed_s"]
    assert not other.report_due(), "its last row is not logged again"


def test_interval_fractions_of_the_time_add_up_to_less_than_one():
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    row = MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=512)).train()
    fractions = [value for name, value in row.items() if name.startswith("time/fraction")]
    assert 0.5 < sum(fractions) <= 1.0
    assert row["time/env_steps_per_s"] > 0


def test_impossible_lengths_are_refused_with_their_numbers():
    with pytest.raises(ConfigError, match=r"runner\.n_steps=0 must be at least 1"):
        RunnerConfig(n_steps=0)


class Diverging(ppo.PPO):
    """PPO whose parameters are NaN from the fourth update on."""

    def update(self):
        metrics = super().update()
        if self.progress.updates >= 4:
            with torch.no_grad():
                next(self.agent.parameters()).fill_(math.nan)
        return metrics


@pytest.mark.parametrize(("env", "interval"), [("CartPole-v1", 64), ("Pendulum-v1", 10_000)], ids=["report", "env"])
def test_nan_parameters_end_the_run_and_are_never_saved(tmp_path, env, interval):
    sampler, agent, _ = parts(EnvConfig(env))
    diverging = Diverging(agent, sampler.batch_spec, 1_000, CONFIG)
    with pytest.raises(Diverged, match="learning rate"), logger_context(tmp_path, console=False) as run:
        MinibatchRl(
            sampler, Learner(agent, diverging), RunnerConfig(n_steps=100_000, log_interval_steps=interval)
        ).train()
    state, meta = load_snapshot(resolve_snapshot(run.directory))
    assert meta["env_steps"] < 128
    assert all(value.isfinite().all() for value in state["agent"].values())


def test_a_run_without_a_score_is_saved_with_snapshot_mode_best(tmp_path):
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    runner = MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=16, log_interval_steps=16))
    with logger_context(tmp_path, snapshot_mode="best", console=False) as run:
        runner.train()
    assert math.isnan(runner.log.return_mean)
    assert resolve_snapshot(run.directory).exists()
    config = read_json(run.directory / "params.json")["config"]
    assert config["snapshot_mode"] == "best", "so that resume= does not delete it"


class StopsAt1500(Callback):
    def on_batch(self, samples):
        if self.runner.env_steps >= 1500:
            self.stop("enough")


def test_a_snapshot_between_rows_has_no_score_of_older_parameters(tmp_path):
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    options = RunnerConfig(n_steps=9000, log_interval_steps=1000)
    with logger_context(tmp_path, snapshot_mode="all", console=False) as run:
        runner = MinibatchRl(sampler, Learner(agent, algo), options, callbacks=[StopsAt1500()])
        runner.train()
    at_row, stopped = (read_meta(each) for each in list_snapshots(run.directory / "snapshot")[-2:])
    assert stopped["env_steps"] >= 1500 > at_row["env_steps"]
    assert at_row["score"] == runner.log.return_mean
    assert stopped["score"] is None


class FromOneBatch(Runner):
    """Learns from one batch again and again, and counts updates."""

    clock = Clock.UPDATES

    def iterate(self):
        if not self.env_steps:
            self.samples = self.sampler.collect()
        self.receive([(self.learner, self.samples)])
        self.update(self.learner)


def test_a_runner_whose_clock_is_updates_counts_lengths_and_intervals_in_them(tmp_path):
    sampler, agent, algo = parts(EnvConfig("CartPole-v1"))
    with logger_context(tmp_path, snapshot_mode="none", console=False) as run:
        row = FromOneBatch(sampler, Learner(agent, algo), RunnerConfig(n_steps=12, log_interval_steps=6)).train()
    assert row["updates"] == 12
    assert [int(each["updates"]) for each in read_csv(run.directory / "progress.csv")[1]] == [0, 6, 12]


RUN = ["env=CartPole-v1", "runner.n_steps=64", "runner.log_interval_steps=64", "sampler=serial", "sampler.batch_T=16"]
RUN += ["sampler.batch_B=4", "algo.minibatches=1", "algo.epochs=2", "affinity=none", "eval.n_envs=2"]


@pytest.mark.parametrize(
    ("words", "evaluates"),
    [
        (["runner=minibatch_rl"], False),
        (["runner=minibatch_rl_eval", "eval.n_episodes=2"], True),
        (["runner=sync_rl", "eval.n_episodes=2"], True),
        (["runner=sync_rl", "eval.n_episodes=0"], False),
        (["runner=async_rl", "eval.n_episodes=2"], True),
        (["runner=async_rl", "eval.n_episodes=0"], False),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_config_says_whether_a_runner_evaluates(words: list[str], evaluates: bool, tmp_path: Path):
    assert main([*RUN, *words, f"log_dir={tmp_path}"]) == 0
    columns, rows = read_csv(tmp_path / "run_0/progress.csv")
    assert ("eval/return_mean" in columns) == evaluates
    assert len(rows) == 2


@pytest.mark.parametrize(("runner", "n_episodes"), [("minibatch_rl", 0), ("minibatch_rl_eval", 20), ("sync_rl", 20)])
def test_a_runner_in_ranks_evaluates_as_it_does_alone(runner: str, n_episodes: int):
    launch_ranks = for_ranks(from_flat({"runner": runner, "runner.n_steps": 77}), 2)
    assert type(launch_ranks.runner).__module__ == "rlframe.runners.sync_rl"
    assert (launch_ranks.world_size, launch_ranks.runner.n_steps, launch_ranks.eval.n_episodes) == (2, 77, n_episodes)


def test_a_state_that_is_loaded_takes_the_place_of_the_episodes_before():
    """Else a run that goes back to its own state has them twice in its means."""
    sampler, agent, algo = parts(EnvConfig("rlframe.envs.debug_envs:time_limit", {"length": 4}))
    with MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=64, log_interval_steps=64)) as runner:
        runner.train()
        n, state = len(runner.log.recent), runner.state_dict()
        runner.load_state_dict(state)
        assert len(runner.log.recent) == n > 0


@pytest.mark.parametrize(
    ("error", "ended", "reason"),
    [
        (AssertionError, "failed", "AssertionError"),
        (KeyboardInterrupt, "interrupted", "KeyboardInterrupt"),
        (GeneratorExit, "interrupted", "closed before its end"),
    ],
)
def test_the_result_says_which_error_without_a_message_ended_the_run(error, ended, reason, tmp_path, monkeypatch):
    def fail():
        raise error

    sampler, agent, algo = parts(EnvConfig("CartPole-v1"), 64)
    runner = MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=64))
    monkeypatch.setattr(sampler, "collect", fail)
    with runner, pytest.raises(error), logger_context(tmp_path, console=False) as run:
        list(runner.rows())
    result = read_json(run.directory / "result.json")
    assert (result["ended"], result["reason"]) == (ended, reason)


def test_a_runner_that_goes_back_to_its_beginning_trains_again() -> None:
    """Else the score of its abandoned future ends it."""
    sampler, agent, algo = parts(EnvConfig("rlframe.envs.debug_envs:time_limit", {"length": 4}))
    options = RunnerConfig(n_steps=64, log_interval_steps=32, target_return=4.0)
    with MinibatchRl(sampler, Learner(agent, algo), options) as runner:
        beginning = runner.state_dict()
        n = runner.train()["env_steps"]
        runner.load_state_dict(beginning)
        assert not runner.end_reason
        assert runner.train()["env_steps"] == n > 0
