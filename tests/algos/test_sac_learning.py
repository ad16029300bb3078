"""DDPG, TD3 and SAC learn, in seconds, what a probe isolates; and values bootstrap as they should."""

from typing import Any

import numpy as np
import pytest
import torch

from rlframe.algos import ddpg, sac, td3
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.types import BatchSpec
from rlframe.envs import EnvConfig, debug_envs, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.exploration import GaussianConfig
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.samplers import SerialSampler
from tests.algos.test_learning import blind_time_limit

FAST: dict[str, Any] = {"learning_rate": 3e-3, "critic_learning_rate": 3e-3, "batch_size": 32, "replay_ratio": 20.0}
NOISY: dict[str, Any] = {"explore": GaussianConfig(std=0.3)}


def trained(module: Any, settings: dict[str, Any], env: Any, n_steps: int, **kwargs: Any) -> tuple[Any, float]:
    """The algorithm after some env steps, and its mean greedy return over 40 episodes."""
    T, B = 4, 4
    envs = make_envs(EnvConfig(env, kwargs, "python"), B, env_seeds(0, Role.ENV, B))
    given = {"learning_starts": 200, "tau": 0.02, **FAST, **settings}
    config = module.Config(replay=InMemory(size=10_000), **given)
    agent = config.make_agent(
        envs.observation_space, envs.action_space, ModelConfig(hidden=(32, 32), activation="relu"), 0
    )
    sampler = SerialSampler(envs, agent, T)
    algo = config.make_algorithm(agent, BatchSpec(T, B), n_steps, 0)
    while algo.progress.env_steps < n_steps:
        algo.receive(sampler.collect())
        while algo.updates_due():
            algo.update()
        sampler.refresh(agent)
    evaluator = Evaluator(EnvConfig(env, kwargs, "python"), agent, EvalConfig(n_envs=20, n_episodes=40))
    return algo, float(np.mean([t.return_ for t in evaluator.play()]))


@pytest.mark.parametrize(
    ("module", "settings"),
    [(ddpg, NOISY), pytest.param(td3, NOISY, marks=pytest.mark.slow), (sac, {"temperature": 0.1})],
    ids=["ddpg", "td3", "sac"],
)
def test_a_level_is_named(module: Any, settings: dict[str, Any]) -> None:
    _, score = trained(module, {**settings, "discount": 0.0}, debug_envs.identity, 500, action="box", length=8)
    assert score > 0.85 * 8  # chance is below 4


def test_discrete_sac_names_what_it_sees() -> None:
    settings = {"discount": 0.0, "temperature": 0.1, "target_entropy_fraction": 0.2}
    _, score = trained(sac, settings, debug_envs.identity, 500, action="discrete", length=8)
    assert score > 0.9 * 8  # chance is 2.7


COLD: dict[str, Any] = {"discount": 0.8, "temperature": 1e-6, "learn_temperature": False, "tau": 0.1}
COLD |= {"replay_ratio": 32.0, "learning_rate": 6e-3, "critic_learning_rate": 6e-3}


def state_values(algo: Any, n: int) -> list[float]:
    with torch.no_grad():
        return algo.critic.q(torch.arange(n)).mean((0, 2)).tolist()


def test_truncation_bootstraps_to_the_endless_sum() -> None:
    algo, _ = trained(sac, {**COLD, "n_step": 3}, blind_time_limit, 400, ends="truncated")
    assert state_values(algo, 1)[0] == pytest.approx(1 / (1 - 0.8), rel=0.03)


def test_termination_ends_the_sum() -> None:
    algo, _ = trained(sac, {**COLD, "n_step": 3}, debug_envs.time_limit, 400, ends="terminated", length=5)
    expected = [(1 - 0.8 ** (5 - k)) / (1 - 0.8) for k in range(5)]  # 3.36, 2.95, 2.44, 1.8, 1
    assert state_values(algo, 6)[:5] == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_returns_of_n_steps_carry_a_late_reward_past_states_that_do_not_tell() -> None:
    settings = {"discount": 0.99, "temperature": 0.1, "learn_temperature": False, "n_step": 4}
    _, score = trained(sac, settings, debug_envs.delayed_reward, 700, delay=3)
    assert score == 1.0  # chance is 1/3


BLOCKS: dict[str, dict[str, Any]] = {
    "flashsac": {"norm": "batch", "norm_input": True, "unit_gains": True},
    "simbav2": {"block": "sphere", "normalize_observation": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_small_residual_networks_learn_to_swing_up_a_pendulum(kind: str) -> None:
    """Random actions reach about -1200; at 6,000 env_steps of seed 0 these had -156 and -153."""
    settings: dict[str, Any] = {"value": "categorical", "v_min": -5.0, "v_max": 5.0, "normalize_return": True}
    settings |= {"return_limit": 5.0, "policy_first": True, "explore": "sample_hold", "temperature": 0.05}
    settings |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "batch_size": 128, "replay_ratio": 128.0}
    envs = make_envs(EnvConfig("Pendulum-v1", {}, "python"), 1, env_seeds(0, Role.ENV, 1))
    config = sac.Config(replay=InMemory(size=20_000), learning_starts=500, discount=0.975, tau=0.01, **settings)
    small = {"hidden": (32,), "blocks": 1, "expansion": 2, "activation": "relu", "unit_rows": True}
    model = ModelConfig(**small, log_std_bound="tanh", least_log_std=-5.0, **BLOCKS[kind])
    agent = config.make_agent(envs.observation_space, envs.action_space, model, 0)
    sampler, algo = SerialSampler(envs, agent, 1), config.make_algorithm(agent, BatchSpec(1, 1), 6_000, 0)
    while algo.progress.env_steps < 6_000:
        algo.receive(sampler.collect())
        while algo.updates_due():
            algo.update()
        sampler.refresh(agent)
    evaluator = Evaluator(EnvConfig("Pendulum-v1", {}, "python"), agent, EvalConfig(n_envs=10, n_episodes=20))
    assert np.mean([each.return_ for each in evaluator.play()]) > -350
