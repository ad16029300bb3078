"""Rows that do not count change nothing; one seed gives one result; a saved algorithm goes on as if never stopped."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.algos import a2c, pg, ppo
from rlframe.algos.base import Algorithm, observed
from rlframe.core.types import Samples
from rlframe.envs import debug_envs
from tests.samplers.made import assert_equal, copied, sampler_for

SETTINGS: list[tuple[Any, dict[str, Any]]] = [(ppo, {"epochs": 2, "minibatches": 2}), (a2c, {}), (pg, {})]
ALL = pytest.mark.parametrize(("module", "settings"), SETTINGS, ids=["ppo", "a2c", "pg"])
SLOW = pytest.mark.slow
MEMORY = pytest.mark.parametrize("memory", ["none", "lstm"])


def made(module: Any, settings: dict[str, Any], seed: int = 0, **kwargs: Any) -> tuple[Any, Any, Algorithm]:
    sampler, agent = sampler_for(T=12, B=4, seed=seed, **kwargs)
    config = module.Config(**settings)
    return sampler, agent, config.make_algorithm(agent, sampler.batch_spec, 10_000, seed)


def learn(algo: Algorithm, samples: Samples) -> dict[str, Any]:
    algo.receive(samples)
    assert algo.updates_due() == 1
    return dict(algo.update())


def spoiled(samples: Samples, extreme: bool) -> Samples:
    """What a row that is not valid holds, changed: action, log-probability, reward, value after a termination."""
    other = copied(samples)
    action, info = other.action, other.info
    ended = ~other.valid
    assert ended.any()
    # The action is also the next row's previous one; there `first` makes it null.
    action[ended] = 1e4 if extreme else action[ended] + 0.5
    info.log_prob[ended] = -1e30 if extreme else -0.3  # type: ignore[attr-defined]
    info.value[ended] = 1e4 if extreme else 7.0  # type: ignore[attr-defined]
    other.reward[ended] = 1e4 if extreme else 3.0
    return other


@pytest.mark.parametrize(
    ("normalize", "extreme"),
    [(False, False), (True, True), *(pytest.param(*each, marks=SLOW) for each in ((False, True), (True, False)))],
)
@MEMORY
@ALL
def test_rows_that_are_not_valid_change_nothing(
    module: Any, settings: dict[str, Any], memory: str, normalize: bool, extreme: bool
) -> None:
    def after(spoil: bool) -> Any:
        sampler, agent, algo = made(
            module,
            {**settings, "normalize_advantage": normalize},
            env=debug_envs.identity,
            action="box",
            length=4,
            model_memory=memory,
            model_feed_back=True,
        )
        samples = copied(sampler.collect())
        learn(algo, spoiled(samples, extreme) if spoil else samples)
        return dict(agent.state_dict())

    changed, plain = after(True), after(False)
    assert all(torch.isfinite(value).all() for value in changed.values())
    assert_equal(changed, plain)


@MEMORY
@ALL
def test_a_batch_without_any_valid_row_does_no_harm(module: Any, settings: dict[str, Any], memory: str) -> None:
    sampler, agent, algo = made(module, settings, env=debug_envs.memory, model_memory=memory)
    samples = replace(copied(sampler.collect()), n_env_steps=0)
    samples.valid[...] = False
    metrics = learn(algo, samples)
    assert algo.progress.env_steps == 0
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert all(torch.isfinite(value).all() for value in agent.state_dict().values())


@ALL
def test_metrics_are_numbers_without_gradient(module: Any, settings: dict[str, Any]) -> None:
    sampler, _, algo = made(module, settings, env=debug_envs.memory)
    metrics = learn(algo, sampler.collect())
    expected = {"policy_loss", "value_loss", "entropy", "grad_norm", "explained_variance", "learning_rate"}
    assert expected <= set(metrics)
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in metrics.values())


def run(module: Any, settings: dict[str, Any], seed: int, memory: str) -> Any:
    sampler, agent, algo = made(
        module, settings, seed, env="Pendulum-v1", model_memory=memory, model_normalize_observation=True
    )
    for _ in range(2):
        learn(algo, sampler.collect())
    return dict(agent.state_dict())


@MEMORY
@ALL
def test_one_seed_gives_one_result_and_another_another(module: Any, settings: dict[str, Any], memory: str) -> None:
    one = run(module, settings, 0, memory)
    torch.manual_seed(123)  # nobody draws from the default generator
    np.random.seed(123)  # noqa: NPY002  # nor from NumPy's
    same, other = run(module, settings, 0, memory), run(module, settings, 1, memory)
    assert_equal(one, same)
    assert all(not torch.equal(one[key], other[key]) for key in one if "weight" in key)


def test_the_seed_of_ppo_orders_its_minibatches() -> None:
    def after(seed: int) -> Any:
        sampler, agent = sampler_for(debug_envs.memory, T=12, B=4)
        algo = ppo.PPO(agent, sampler.batch_spec, 1000, ppo.Config(epochs=2, minibatches=2), seed)
        learn(algo, sampler.collect())
        return agent.state_dict()["model.policy_head.weight"]

    assert torch.equal(after(0), after(0))
    assert not torch.equal(after(0), after(1))


@MEMORY
@ALL
def test_a_saved_algorithm_goes_on_as_if_never_stopped(module: Any, settings: dict[str, Any], memory: str) -> None:
    settings = {**settings, "learning_rate": "linear(1e-3,0)"}
    sampler, agent, algo = made(module, settings, env=debug_envs.memory, model_memory=memory)
    batches = [copied(sampler.collect()) for _ in range(4)]
    for samples in batches[:2]:
        learn(algo, samples)
    saved = copy.deepcopy((agent.state_dict(), algo.state_dict()))
    straight = [learn(algo, samples) for samples in batches[2:]]

    _, other_agent, other = made(module, settings, seed=5, env=debug_envs.memory, model_memory=memory)
    other_agent.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed = [learn(other, samples) for samples in batches[2:]]

    assert_equal(dict(other_agent.state_dict()), dict(agent.state_dict()))
    assert other.progress == algo.progress
    assert [{name: float(value) for name, value in metrics.items()} for metrics in resumed] == [
        {name: float(value) for name, value in metrics.items()} for metrics in straight
    ]


@ALL
def test_statistics_move_once_a_batch_after_learning_and_count_every_row_once(
    module: Any, settings: dict[str, Any]
) -> None:
    sampler, agent, algo = made(module, settings, env="Pendulum-v1", model_normalize_observation=True)
    seen = []
    for n in range(1, 4):
        samples = sampler.collect()
        with torch.no_grad():
            value = agent(samples.inputs[:-1], samples.state)[1]
        torch.testing.assert_close(value, samples.info.value, rtol=1e-5, atol=1e-5)  # acting = learning statistics
        seen.append(samples.inputs.observation[:-1].double().reshape(-1, 3).numpy().copy())
        learn(algo, samples)
        norm = agent.model.observation_norm.parts[0]
        assert int(norm.count) == 48 * n
        np.testing.assert_allclose(norm.mean, np.concatenate(seen).mean(0), rtol=1e-10, atol=1e-12)


def test_statistics_count_the_first_row_of_an_episode_once_although_its_environment_waits() -> None:
    sampler, _, _ = made(a2c, {})
    samples = copied(sampler.collect())
    samples.valid[:], samples.inputs.first[:] = True, False
    samples.valid[2:5, 1] = False  # the last observation, and the first of the next episode, for which nobody acted yet
    samples.inputs.first[3:6, 1], samples.truncated[1, 1] = True, True
    samples = replace(samples, n_env_steps=int(samples.valid.sum()))
    seen, expected = observed(samples), samples.valid.clone()
    expected[2, 1] = True
    assert torch.equal(seen, samples.observation[expected])
