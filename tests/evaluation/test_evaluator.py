"""Evaluator: a fixed number of episodes of each environment, separate from training."""

import logging
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.core.errors import ConfigError, warn_once
from rlframe.core.struct import map_tree
from rlframe.core.types import Trajectory
from rlframe.envs import EnvConfig, debug_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.evaluation.report import evaluated, metric_of, summarize
from rlframe.experiment.settings import from_flat
from rlframe.experiment.several import check_agents
from rlframe.record import logger_context
from tests.samplers.made import agent_for, assert_equal, copied, sampler_for


class Lengths(gymnasium.Env):
    """Episodes of 1 or 40 steps at random; the return is the length."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.choice([1, 40]))
        return 0, {}

    def step(self, action: int) -> Any:
        self.left -= 1
        return 0, 1.0, self.left == 0, False, {}


def evaluator_for(env: Any, config: EvalConfig, seed: int = 0, **kwargs: Any) -> Evaluator:
    made = env(**kwargs)
    agent = agent_for(made.observation_space, made.action_space)
    return Evaluator(EnvConfig(env, kwargs, "python"), agent, config, seed)


@pytest.mark.parametrize(("n_envs", "n_episodes", "quota"), [(3, 7, [3, 2, 2]), (8, 3, [1, 1, 1]), (2, 4, [2, 2])])
def test_every_environment_plays_its_share(n_envs: int, n_episodes: int, quota: list[int]) -> None:
    evaluator = evaluator_for(Lengths, EvalConfig(n_envs=n_envs, n_episodes=n_episodes))
    for _ in range(2):
        played = evaluator.play()
        assert [t.env for t in played] == [env for env, n in enumerate(quota) for _ in range(n)]


def test_short_episodes_get_no_more_weight_than_long_ones() -> None:
    evaluator = evaluator_for(Lengths, EvalConfig(n_envs=20, n_episodes=200))
    share = np.mean([t.length == 40 for t in evaluator.play()])
    assert share == pytest.approx(0.5, abs=0.12)  # the first 200 to end would be 40 long in 1 of 40 at most


def test_episodes_of_a_number_of_steps_are_those_that_start_before_the_share_is_played() -> None:
    played = evaluator_for(Lengths, EvalConfig(n_envs=20, n_episodes=1, env_steps=4000)).play()
    for env in range(20):
        lengths = [t.length for t in played if t.env == env]
        assert sum(lengths) >= 200 > sum(lengths[:-1])
    share = np.mean([t.length == 40 for t in played])
    assert share == pytest.approx(0.5, abs=0.12)  # without the last episodes about 0.47


def test_a_cut_episode_is_the_last_of_its_environment_also_with_a_number_of_steps() -> None:
    config = EvalConfig(n_envs=2, env_steps=1000, max_length=30)
    found = evaluator_for(debug_envs.time_limit, config, length=1000).play()
    assert [each.env for each in found] == [0, 1]


def test_every_episode_is_reported_when_it_ends() -> None:
    told: list[Trajectory] = []
    played = evaluator_for(Lengths, EvalConfig(n_envs=3, n_episodes=7)).play(on_episode=told.append)
    assert sorted(map(str, told)) == sorted(map(str, played))


def test_epsilon_of_an_agent_without_one_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"epsilon=0\.1 is for agents that act at random at that rate"):
        evaluator_for(Lengths, EvalConfig(explore=True, epsilon=0.1))


@pytest.mark.parametrize(("epsilon", "explore"), [(1.5, True), (0.1, False)])
def test_an_epsilon_that_cannot_be_is_an_error(epsilon: float, explore: bool) -> None:
    with pytest.raises(ConfigError, match=r"eval\.epsilon="):
        EvalConfig(explore=explore, epsilon=epsilon)


def test_the_episodes_that_count_are_the_first_of_each_environment() -> None:
    many = evaluator_for(Lengths, EvalConfig(n_envs=4, n_episodes=12)).play()
    few = evaluator_for(Lengths, EvalConfig(n_envs=4, n_episodes=4)).play()
    assert few == [next(t for t in many if t.env == env) for env in range(4)]


def test_evaluation_does_not_disturb_sampling() -> None:
    def history(evaluates: bool) -> list[Any]:
        sampler, agent = sampler_for(debug_envs.memory, T=7, B=3, model_memory="lstm", model_normalize_observation=True)
        evaluator = Evaluator(EnvConfig(debug_envs.memory, {}, "python"), agent, EvalConfig(n_episodes=5, explore=True))
        found = []
        for _ in range(3):
            found.append(copied(sampler.collect()))
            before = map_tree(torch.clone, dict(agent.state_dict()))
            if evaluates:
                evaluator.play()
            assert_equal(dict(agent.state_dict()), before)
        assert sampler.trajectories()
        return found

    for a, b in zip(history(True), history(False), strict=True):
        assert_equal(a, b)


def test_greedy_evaluation_takes_the_mode_and_exploring_does_not() -> None:
    kwargs = {"action": "discrete", "length": 50}
    greedy = evaluator_for(debug_envs.identity, EvalConfig(n_envs=2, n_episodes=2), **kwargs)
    exploring = evaluator_for(debug_envs.identity, EvalConfig(n_envs=2, n_episodes=2, explore=True), **kwargs)
    greedy.play()
    samples = greedy.collector.samples
    with torch.no_grad():
        params = greedy.collector.inferences[0].agent(samples.inputs[:-1], ())[0]
    assert torch.equal(samples.action, params.argmax(-1))
    exploring.play()
    samples = exploring.collector.samples
    assert (samples.action != params.argmax(-1)).any()


@pytest.mark.parametrize("explore", [False, True])
def test_one_seed_gives_one_evaluation(explore: bool) -> None:
    config = EvalConfig(n_envs=3, n_episodes=6, explore=explore)
    one, same, other = (evaluator_for(debug_envs.identity, config, seed) for seed in (1, 1, 2))
    first = one.play()
    assert same.play() == first
    assert other.play() != first
    second = one.play(1)
    assert second != first, "evaluations of other numbers play other episodes"
    assert one.play() == first, "whatever was evaluated before"
    assert other.play(1) != second


def test_every_evaluation_resets_episodes_and_memory() -> None:
    env = debug_envs.time_limit(length=5)
    agent = agent_for(env.observation_space, env.action_space, memory="gru", memory_size=4)
    config = EnvConfig(debug_envs.time_limit, {"length": 5}, "python")
    evaluator = Evaluator(config, agent, EvalConfig(n_envs=1, n_episodes=1))
    evaluator.play()
    values = evaluator.collector.samples.info.value[:6].clone()  # type: ignore[attr-defined]
    evaluator.play()
    assert_equal(evaluator.collector.samples.info.value[:6], values)  # type: ignore[attr-defined]


def test_an_episode_without_end_is_cut_and_told_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    evaluator = evaluator_for(debug_envs.time_limit, EvalConfig(n_envs=2, n_episodes=4, max_length=30), length=1000)
    warn_once.cache_clear()
    found = evaluator.play()
    assert [(each.env, each.terminated, each.length > 30) for each in found] == [(0, False, True), (1, False, True)]
    assert all(each.return_ == each.length for each in found), "the environment gives 1 a step"
    assert "episodes of 2 of 2 environments had no end after eval.max_length=30 env steps" in caplog.text
    assert len(evaluator.play(1)) == 2
    assert len(caplog.records) == 1, "the same line is not repeated"


def test_a_long_episode_is_told_once_long_before_it_is_cut(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframe.evaluation.evaluator._LONG", 20)
    evaluator = evaluator_for(debug_envs.time_limit, EvalConfig(n_envs=2, n_episodes=2), length=50)
    with caplog.at_level(logging.INFO, "rlframe"):
        evaluator.play()
        evaluator.play(1)
    hint = "evaluation: an episode has run 20 steps; without an end it is cut after eval.max_length=200,000"
    assert [hint in record.message for record in caplog.records] == [True]


def test_an_evaluation_without_episodes_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"eval\.n_episodes=0 must be at least 1"):
        evaluator_for(Lengths, EvalConfig(n_episodes=0))


def test_a_summary_is_over_episodes() -> None:
    summary = summarize([Trajectory(1.0, 10, True, 0), Trajectory(4.0, 30, False, 1)], "eval")
    assert summary == {
        "eval/return_mean": 2.5,
        "eval/return_std": 1.5,
        "eval/return_min": 1.0,
        "eval/return_max": 4.0,
        "eval/length_mean": 20.0,
        "eval/length_min": 10,
        "eval/length_max": 30,
    }
    assert summarize([], "eval") == {}


def test_numbers_of_infos_are_metrics_of_an_evaluation(tmp_path: Path) -> None:
    infos = [{"success_last": 1.0, "episode/red/return": 5.0}, {"success_last": 0.0, "x": 2.0}]
    found = evaluated([Trajectory(1.0, 9, True, env, info) for env, info in enumerate(infos)])
    own = {name: value for name, value in found.items() if name.count("/") == 2}
    assert own == {"eval/red/return_mean": 5.0, "eval/env/success_last": 0.5, "eval/env/x": 2.0}
    infinite = [Trajectory(1.0, 9, True, 0, {"x": x}) for x in (math.inf, -math.inf)]
    assert math.isnan(evaluated(infinite)["eval/env/x"])
    check_agents(from_flat({"stop": "eval/env/success_last > 0.4"}), spaces.Discrete(2))
    with logger_context(tmp_path, snapshot_mode="best", snapshot_best="eval/env/x", console=False) as run:
        run.log({"env_steps": 0, "eval/return_mean": 1.0})
        run.log({"env_steps": 9, **found})
        assert run.snapshot(dict, 9) is not None
        assert (run.directory / "snapshot/best").exists()


def test_the_name_of_a_metric_keeps_a_row_of_a_log_on_one_line() -> None:
    assert metric_of("gold") == "env/gold"
    assert metric_of("new\nline\r") == r"env/new\nline\r"
