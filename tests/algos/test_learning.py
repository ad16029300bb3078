"""Each algorithm learns, in seconds, what a probe isolates; and values bootstrap as they should."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.algos import a2c, appo, impala, pg, ppo
from rlframe.core.types import AgentInputs
from rlframe.envs import EnvConfig, debug_envs
from rlframe.evaluation import EvalConfig, Evaluator
from tests.samplers.made import sampler_for
from tests.variants import variants

PPO: dict[str, Any] = {"learning_rate": 1e-2, "epochs": 4, "minibatches": 2, "clip": 0.2, "entropy_coef": 0.0}
A2C: dict[str, Any] = {"learning_rate": 1e-2, "entropy_coef": 0.0, "optimizer": "adam", "normalize_advantage": True}
PG: dict[str, Any] = {"learning_rate": 2e-2}
IMPALA: dict[str, Any] = {"learning_rate": 1e-2, "entropy_coef": 0.0, "optimizer": "adam"}
APPO: dict[str, Any] = {"learning_rate": 1e-2, "epochs": 4, "minibatches": 2, "entropy_coef": 0.0}
ALGOS = [(ppo, PPO), (a2c, A2C), (pg, PG), (impala, IMPALA), (appo, APPO)]
NAMES = ["ppo", "a2c", "pg", "impala", "appo"]
SLOW = pytest.mark.slow


def trained(
    module: Any, settings: dict[str, Any], env: Any, n_batches: int, T: int = 16, B: int = 16, **kwargs: Any
) -> tuple[Any, float]:
    """The agent after some batches, and its mean greedy return over 40 episodes."""
    sampler, agent = sampler_for(env, T=T, B=B, **kwargs)
    n_steps = n_batches * T * B
    config = module.Config(**settings | {"learning_rate": f"linear({settings['learning_rate']},0)"})
    algo = config.make_algorithm(agent, sampler.batch_spec, n_steps, 0)
    for _ in range(n_batches):
        algo.receive(sampler.collect())
        while algo.updates_due():
            algo.update()
    of_env = {key: value for key, value in kwargs.items() if not key.startswith("model_")}
    evaluator = Evaluator(EnvConfig(env, of_env, "python"), agent, EvalConfig(n_envs=20, n_episodes=40))
    return agent, float(np.mean([t.return_ for t in evaluator.play()]))


ACTIONS = ["discrete", "discrete_start", "multi_discrete", "multi_binary", "box", "dict", "tuple"]


@pytest.mark.parametrize("action", variants(ACTIONS, ("dict",)))
def test_ppo_names_what_it_sees_in_every_action_space(action: str) -> None:
    _, score = trained(ppo, {**PPO, "discount": 0.0}, debug_envs.identity, 28, action=action, length=8)
    assert score > 0.9 * 8  # chance is at most 4


@pytest.mark.parametrize(
    ("module", "settings", "action"),
    [
        (a2c, A2C, "discrete_start"),
        pytest.param(pg, PG, "dict", marks=SLOW),
        (impala, IMPALA, "discrete_start"),
        pytest.param(appo, APPO, "dict", marks=SLOW),
    ],
    ids=NAMES[1:],
)
def test_the_others_name_what_they_see(module: Any, settings: dict[str, Any], action: str) -> None:
    _, score = trained(module, {**settings, "discount": 0.0}, debug_envs.identity, 16, action=action, length=8)
    assert score > 0.8 * 8  # chance is at most 4


@pytest.mark.slow
@pytest.mark.parametrize(("distribution", "n_batches"), [("squashed_gaussian", 30), ("beta", 60)])
def test_policies_with_other_distributions_learn_too(distribution: str, n_batches: int) -> None:
    kwargs = {"action": "box", "length": 8, "model_distribution": distribution}
    _, score = trained(ppo, {**PPO, "discount": 0.0}, debug_envs.identity, n_batches, **kwargs)
    assert score > 0.85 * 8


@pytest.mark.parametrize("memory", [pytest.param("lstm", marks=SLOW), "gru", pytest.param("transformer", marks=SLOW)])
def test_ppo_with_memory_remembers(memory: str) -> None:
    _, score = trained(ppo, PPO, debug_envs.memory, 14, T=15, delay=4, model_memory=memory, model_memory_size=16)
    assert score > 0.95


@pytest.mark.parametrize(
    ("module", "settings"),
    [(a2c, A2C), pytest.param(pg, PG, marks=SLOW), (impala, IMPALA), pytest.param(appo, APPO, marks=SLOW)],
    ids=NAMES[1:],
)
def test_the_others_remember_with_memory(module: Any, settings: dict[str, Any]) -> None:
    model = {"model_memory": "gru", "model_memory_size": 16}
    _, score = trained(module, settings, debug_envs.memory, 35, T=12, delay=2, **model)
    assert score > 0.95


@pytest.mark.slow
def test_ppo_without_memory_stays_at_chance() -> None:
    _, score = trained(ppo, PPO, debug_envs.memory, 25, T=15, delay=4)
    assert 0.2 < score < 0.8


@pytest.mark.parametrize(("module", "settings"), ALGOS, ids=NAMES)
def test_a_reward_that_comes_late_reaches_the_action_that_earned_it(module: Any, settings: dict[str, Any]) -> None:
    _, score = trained(module, settings, debug_envs.delayed_reward, 15, T=15, delay=4)
    assert score == 1.0  # chance is 1/3


class Blind(gymnasium.ObservationWrapper):
    """Sees nothing, and so not the time either: the value of the last observation is that of every other."""

    observation_space = spaces.Discrete(1)

    def observation(self, observation: Any) -> int:
        return 0


def blind_time_limit(ends: str) -> gymnasium.Env:
    return Blind(debug_envs.time_limit(ends, 5))


def state_values(agent: Any, n: int) -> list[float]:
    inputs = AgentInputs(
        torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    )
    with torch.no_grad():
        return agent(inputs, ())[1].tolist()


VALUE = {"discount": 0.8, "value_coef": 1.0, "max_grad_norm": 10.0}
LENGTHS: dict[Any, tuple[int, float]] = {ppo: (18, 4e-2), a2c: (80, 2e-2), pg: (80, 2e-2)}  # batches, learning rate
VALUED = [(ppo, PPO), (a2c, A2C), pytest.param(pg, PG, marks=SLOW)]  # pg learns the same values as a2c


def values_learned(module: Any, settings: dict[str, Any], env: Any, **kwargs: Any) -> Any:
    """The agent."""
    n_batches, rate = LENGTHS[module]
    return trained(module, {**settings, **VALUE, "learning_rate": rate}, env, n_batches, T=12, B=4, **kwargs)[0]


@pytest.mark.parametrize(("module", "settings"), VALUED, ids=NAMES[:3])
def test_truncation_bootstraps_to_the_endless_sum(module: Any, settings: dict[str, Any]) -> None:
    agent = values_learned(module, settings, blind_time_limit, ends="truncated")
    assert state_values(agent, 1)[0] == pytest.approx(1 / (1 - 0.8), rel=0.03)


@pytest.mark.parametrize(("module", "settings"), VALUED, ids=NAMES[:3])
def test_termination_ends_the_sum(module: Any, settings: dict[str, Any]) -> None:
    agent = values_learned(module, settings, debug_envs.time_limit, ends="terminated", length=5)
    expected = [(1 - 0.8 ** (5 - k)) / (1 - 0.8) for k in range(5)]  # 3.36, 2.95, 2.44, 1.8, 1
    assert state_values(agent, 6)[:5] == pytest.approx(expected, rel=0.03)
