"""NormalizedRewards: the deviation of the discounted return, over all environments, ranks and samplers."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import rlframe
from rlframe import launch
from rlframe.algos import ppo, r2d1
from rlframe.algos.running_deviation import RunningDeviation
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, EnvOptions, make_envs
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.rewards import RNDConfig
from rlframe.rewards.base import UNCHANGED
from rlframe.rewards.normalize import NormalizedRewards, rewards_for
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler
from tests.runners.test_async_rl import runner_for
from tests.tables import read_csv

NORMALIZED = EnvOptions(normalize_reward=True)
SMALL = "sampler.batch_T=16 sampler.batch_B=4 model.hidden=[8] runner.n_steps=128 runner.log_interval_steps=64"
SMALL += " algo.epochs=1 algo.minibatches=1"
PPO, MODEL = ppo.Config(), ModelConfig(hidden=(8,))


def sampled(env: str, B: int, T: int, algo: Any = PPO, model: ModelConfig = MODEL, **options: Any) -> SerialSampler:
    config = EnvConfig(env, options=EnvOptions(**options))
    envs = make_envs(config, B, range(B))
    agent = algo.make_agent(envs.observation_space, envs.action_space, model, 0)
    return SerialSampler(envs, agent, T)


def test_rewards_are_divided_by_the_deviation_of_all_discounted_returns() -> None:
    rewards, returns, running = NormalizedRewards(0.9, NORMALIZED), [0.0], np.zeros(3)
    with closing(sampled("Pendulum-v1", 3, 5, max_episode_steps=7)) as sampler:
        for _ in range(4):
            samples = sampler.collect()
            raw = samples.reward.clone()
            found = rewards(samples)
            for t in range(5):
                running = 0.9 * running + raw[t].numpy()
                returns += running[samples.valid[t].numpy()].tolist()
                running[samples.truncated[t].numpy()] = 0.0
            np.testing.assert_allclose(found.reward, raw / np.sqrt(np.var(returns) + 1e-8), rtol=1e-5)
            assert torch.equal(samples.inputs.prev_reward[1:], raw), "the agent's own input stays as it acted on it"
    assert len(returns) > 50


def test_each_policy_of_several_agents_has_a_deviation_of_its_own() -> None:
    pytest.importorskip("pettingzoo")
    words = {"agents.map": {"even_*": "even", "odd_*": "odd"}, "env_kwargs": {"kinds": 2}, "env.reward_scale": 3.0}
    sizes = {"sampler.batch_T": 32, "sampler.batch_B": 2, "algo.minibatches": 1, "model.hidden": (8,), "n_steps": 99}
    batches = []
    for normalized in (False, True):
        words["env.normalize_reward"] = normalized
        with rlframe.build("ppo", "tests.agents_envs:Crowd", sampler="serial", **words, **sizes) as run:
            found = run.runner.learners.batches(run.runner.sampler.collect())
            batches.append({each.name: each.rewards(samples).map(torch.clone) for each, samples in found})
    scaled, normal = batches
    for name, samples in normal.items():
        alone = NormalizedRewards(0.99, EnvOptions(normalize_reward=True, reward_scale=3.0))
        assert scaled[name].reward.max() == 3 * 4
        torch.testing.assert_close(samples.reward, alone(replace(scaled[name], reward=scaled[name].reward / 3)).reward)


@pytest.mark.parametrize(("over_ends", "sums"), [(False, [3.5, 1.5, 1.0, 1.0]), (True, [3.5, 3.5, 5.0, 3.5])])
def test_a_sum_begins_at_0_where_an_episode_does_whatever_came_before(over_ends: bool, sums: list[float]) -> None:
    """Of an episode that goes on, one that begins, one that nobody acts in at first, and one whose team has ended."""
    deviation = RunningDeviation(0.5)
    deviation.load_state_dict({**deviation.state_dict(), "sums": {0: [8.0] * 4}})
    with closing(sampled("CartPole-v1", 4, 2)) as sampler:
        sample = sampler.collect()
        sample.reward[:], sample.valid[:] = 1.0, torch.tensor([[True, True, False, True], [True] * 4])
        sample.inputs.first[:2] = torch.tensor([[False, True, True, False], [False] * 4])
        sample.terminated[:] = torch.tensor([[False, False, False, True], [False] * 4])
        deviation.update(sample.reward, sample, over_ends)
    assert deviation.sums[0].tolist() == sums


@pytest.mark.parametrize("moments", ["_moments_on_host", "_moments_on_device"])
def test_sums_of_a_run_that_is_resumed_with_other_samplers_begin_anew(moments: str) -> None:
    """One process had four environments; with runner.n_samplers=2 each has two."""
    deviation = RunningDeviation(0.5)
    deviation.load_state_dict({**deviation.state_dict(), "sums": {0: [8.0] * 4}})
    with closing(sampled("CartPole-v1", 2, 1)) as sampler:
        sample = sampler.collect()
        getattr(deviation, moments)(sample.reward, sample, True)
    assert deviation.sums[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("moments", ["_moments_on_host", "_moments_on_device"])
@pytest.mark.parametrize("over_ends", [False, True])
def test_a_number_that_is_not_finite_costs_its_batch_alone(over_ends: bool, moments: str) -> None:
    deviation = RunningDeviation(0.5)
    with closing(sampled("CartPole-v1", 2, 3)) as sampler:
        counts = []
        for k in range(3):
            sample = sampler.collect()
            sample.reward[1, 1] = math.inf if k == 1 else 1.0
            found = getattr(deviation, moments)(sample.reward, sample, over_ends)
            deviation._merge(*found)
            counts.append(float(deviation.count))
    assert counts == [7, 7, 13], "it begins with one"


def test_the_deviation_is_gymnasiums() -> None:
    env = gymnasium.wrappers.NormalizeReward(gymnasium.make("CartPole-v1"), gamma=0.99)
    env.action_space.seed(3)
    rewards, ended = NormalizedRewards(0.99, NORMALIZED), True
    with closing(sampled("CartPole-v1", 1, 1)) as sampler:
        sample = sampler.collect()
        for _ in range(4000):
            if ended:
                env.reset(seed=3)
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = terminated or truncated
            sample.reward[:], sample.valid[:] = 1.0, True
            rewards(sample)
            sample.inputs.first[0] = ended
    assert float(rewards.deviation.value) == pytest.approx(float(np.sqrt(env.return_rms.var)), rel=0.05)


@pytest.mark.parametrize(
    ("reward", "expected"), [(0.0, 0.0), (1e-3, 2.0), (1e6, 2.0), (-1e30, -2.0)], ids=["zero", "small", "large", "huge"]
)
def test_the_first_reward_of_all_is_of_order_one(reward: float, expected: float) -> None:
    with closing(sampled("CartPole-v1", 1, 1)) as sampler:
        sample = sampler.collect()
    sample.reward[:] = reward
    found = NormalizedRewards(0.99, NORMALIZED)(sample)
    assert float(found.reward) == pytest.approx(expected, rel=0.05)


def test_scale_and_clip_come_after_the_division() -> None:
    options = EnvOptions(normalize_reward=True, reward_scale=3.0, reward_clip="[-1,4]")
    with closing(sampled("Pendulum-v1", 2, 8)) as sampler:
        sample = sampler.collect()
        plain, scaled = (NormalizedRewards(0.9, each)(sample).reward for each in (NORMALIZED, options))
    np.testing.assert_allclose(scaled, (3 * plain).clip(-1, 4), rtol=1e-6)
    assert (scaled == -1).any()


@pytest.mark.slow
def test_reported_returns_are_the_environments_own(tmp_path: Path) -> None:
    words = f"algo=ppo env=Pendulum-v1 env.max_episode_steps=5 sampler=serial {SMALL} eval.n_episodes=2 affinity=none"
    still = "algo.learning_rate=1e-30"
    runs = {"raw": "env.normalize_reward=false", "normalized": "", "clipped": "env.reward_clip=sign"}
    for name, own in runs.items():
        assert launch.main([*words.split(), still, *own.split(), f"log_dir={tmp_path / name}"]) == 0
    logs = {name: read_csv(tmp_path / name / "run_0/progress.csv")[1] for name in runs}
    for metric in ("episode/return_mean", "eval/return_mean"):
        raw = [row[metric] for row in logs["raw"]]
        assert raw == [row[metric] for row in logs["normalized"]] == [row[metric] for row in logs["clipped"]]
        assert float(raw[-1]) < -10
    losses = [logs[name][-1]["algo/value_loss"] for name in ("raw", "normalized")]
    assert float(losses[1]) < 0.1 * float(losses[0])


def test_the_learner_of_an_async_run_has_the_statistics() -> None:
    env = EnvConfig("Pendulum-v1", backend="python", options=NORMALIZED)
    with runner_for(ppo.Config(epochs=1), env, n_steps=128) as runner:
        runner.train()
        state = runner.state_dict()["rewards"]["statistics"]
    assert state["count"] == 1 + runner.env_steps
    assert state["variance"] > 0


def test_a_learner_without_the_rewards_that_its_environments_ask_for_is_refused() -> None:
    with closing(sampled("CartPole-v1", 1, 8, normalize_reward=True)) as sampler:
        algo = ppo.Config(minibatches=1).make_algorithm(sampler.agent, sampler.batch_spec, 100, 0)
        in_spaces = sampler.envs.observation_space, sampler.envs.action_space
        for given in (UNCHANGED, RNDConfig().add_to(UNCHANGED, algo, in_spaces, 100)):
            with pytest.raises(ConfigError, match=r"give the learner its rewards, .*rewards_for\(sampler, algo\)"):
                MinibatchRl(sampler, Learner(sampler.agent, algo, given), RunnerConfig(n_steps=100))


@pytest.mark.parametrize("discount", [0.9, "linear(0.5,0.9)"])
def test_a_discount_with_a_schedule_counts_as_its_last_number(discount: Any) -> None:
    config = ppo.Config(minibatches=1, discount=discount)
    with closing(sampled("Pendulum-v1", 2, 4, normalize_reward=True)) as sampler:
        rewards: Any = rewards_for(sampler, config.make_algorithm(sampler.agent, sampler.batch_spec, 100, 0))
        reward = rewards(sample := sampler.collect()).reward
        expected = NormalizedRewards(0.9, NORMALIZED)(sample).reward
    torch.testing.assert_close(reward, expected)


@pytest.mark.parametrize("feed_back", [True, False])
def test_a_replay_is_refused_if_the_network_sees_previous_rewards(feed_back: bool) -> None:
    config = r2d1.Config(replay=InMemory(size=400))
    model = ModelConfig(hidden=(8,), memory="lstm", memory_size=8, feed_back=feed_back)
    refused = pytest.raises(ConfigError, match=r"env.normalize_reward=true does not work .*env.reward_scale")
    with closing(sampled("CartPole-v1", 1, 1, config, model, normalize_reward=True)) as sampler:
        algo = config.make_algorithm(sampler.agent, sampler.batch_spec, 100_000, 0)
        learner = Learner(sampler.agent, algo, rewards_for(sampler, algo))
        with refused if feed_back else nullcontext():
            MinibatchRl(sampler, learner, RunnerConfig(n_steps=100_000))
