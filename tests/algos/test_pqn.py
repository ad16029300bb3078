"""PQN: its loss and targets by hand, what it learns, invalid rows, noise, schedules, and a saved one that goes on."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.agents import QInfo
from rlframe.agents.base import AgentState
from rlframe.algos import pqn
from rlframe.core.errors import ConfigError
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.envs import EnvConfig, debug_envs, make_envs
from rlframe.exploration import EpsilonConfig, ExploreState
from rlframe.models import ModelConfig
from rlframe.ops.returns import lambda_return
from rlframe.optimizers import SGDConfig
from rlframe.samplers import SerialSampler
from tests.algos.q_table import table_agent
from tests.algos.test_dqn import score
from tests.samplers.made import assert_equal, copied
from tests.variants import variants

SLOW = pytest.mark.slow
QUICK: dict[str, Any] = {"learning_rate": "linear(1e-2,0)", "epochs": 4, "minibatches": 4, "q_lambda": 0.9}
GRU = {"memory": "gru", "memory_size": 16}
NOTHING = AgentState(ExploreState((), ()), ())


def made(
    env: Any, T: int, B: int, n_batches: int, model: dict[str, Any] | None = None, seed: int = 0, **settings: Any
) -> tuple[SerialSampler, Any]:
    """A sampler and PQN, for a run of so many batches; settings that start with `env_` are the environment's."""
    kwargs = {key.removeprefix("env_"): settings.pop(key) for key in list(settings) if key.startswith("env_")}
    config = pqn.Config(**{"explore": EpsilonConfig(epsilon="linear(1,0.05,0.5)")} | settings)
    envs = make_envs(EnvConfig(env, kwargs, "python"), B, list(range(seed, seed + B)))
    network = ModelConfig(**{"hidden": (16,), "activation": "relu", "norm": "layer"} | (model or {}))
    agent = config.make_agent(envs.observation_space, envs.action_space, network, seed)
    sampler = SerialSampler(envs, agent, T, seed)
    return sampler, config.make_algorithm(agent, sampler.batch_spec, n_batches * T * B, seed)


def learn(algo: Any, samples: Samples) -> dict[str, float]:
    algo.receive(samples)
    assert algo.updates_due() == 1
    return {name: float(value) for name, value in algo.update().items()}


def trained(env: Any, n_batches: int, T: int = 16, B: int = 16, **more: Any) -> Any:
    """The agent after so many batches."""
    sampler, algo = made(env, T, B, n_batches, **QUICK | more)
    for _ in range(n_batches):
        learn(algo, sampler.collect())
    return algo.agent


def by_hand(q: list[list[float]], reward: list[float], terminated: list[bool], valid: list[bool]) -> Samples:
    """One environment: row t is in state t, where acting saw Q(t, .) = q[t], and takes action 0."""
    T = len(reward)
    flags = torch.zeros(T + 1, 1, dtype=torch.bool)
    inputs = AgentInputs(torch.arange(T + 1)[:, None], flags.long(), flags.float(), flags)
    return Samples(
        inputs=inputs,
        action=torch.zeros(T, 1, dtype=torch.int64),
        reward=torch.tensor(reward)[:, None],
        terminated=torch.tensor(terminated)[:, None],
        truncated=flags[:-1],
        valid=torch.tensor(valid)[:, None],
        info=QInfo(torch.tensor(q)[:, None]),
        state=NOTHING,
        final_state=NOTHING,
        n_env_steps=sum(valid),
        start=0,
    )


def test_a_step_is_the_gradient_of_half_the_squared_error_to_the_q_lambda_return() -> None:
    agent = table_agent(4)
    with torch.no_grad():
        agent.model.table.copy_(torch.tensor([[1.0, 2.0], [5.0, 4.0], [0.0, 0.0], [3.0, 8.0]])[..., None])
    one = {"epochs": 1, "minibatches": 1, "optimizer": SGDConfig(), "max_grad_norm": float("inf")}
    config = pqn.Config(**one, learning_rate=1.0, discount=0.5, q_lambda=0.5, explore="none")
    agent.exploration.kind = "none"
    algo = config.make_algorithm(agent, BatchSpec(3, 1), 3)
    q = [[1.0, 2.0], [5.0, 4.0], [0.0, 0.0]]
    metrics = learn(algo, by_hand(q, [1.0, 2.0, 3.0], [False, False, False], [True, True, True]))
    # G2 = 3 + 8/2 = 7;  G1 = 2 + (0/2 + 7/2)/2 = 3.75;  G0 = 1 + (5/2 + 3.75/2)/2 = 3.1875
    expected = [[1 + 2.1875 / 3, 2.0], [5 - 1.25 / 3, 4.0], [7 / 3, 0.0], [3.0, 8.0]]
    torch.testing.assert_close(agent.model.table.detach().squeeze(-1), torch.tensor(expected))
    assert metrics["loss"] == pytest.approx((2.1875**2 + 1.25**2 + 7**2) / 6)
    assert metrics["q"] == pytest.approx(2.0)

    learn(algo, by_hand([[9.0, 0.0]] * 3, [1.0, 2.0, 3.0], [True, False, False], [True, False, False]))
    assert agent.model.table[0, 0].item() == pytest.approx(1.0), "the mean is over valid rows, here one"


def test_the_target_is_the_best_of_the_allowed_actions() -> None:
    sampler, algo = made(debug_envs.masked, 8, 4, 2, epochs=1, minibatches=1)
    samples = copied(sampler.collect())
    with torch.no_grad():
        last, _ = algo.agent(samples.inputs[8:], ())
    q = torch.cat([samples.info.q, last.squeeze(-1)])  # type: ignore[attr-defined]
    best = q.masked_fill(samples.inputs.observation["action_mask"] == 0, -1e9).amax(-1)
    rows, _ = algo.rows(samples)
    open_ = samples.valid & ~samples.terminated
    expected = lambda_return(samples.reward, best, samples.terminated, samples.truncated, samples.valid, 0.99, 0.65)
    assert (best < q.amax(-1))[1:][open_].any(), "a forbidden action is the best somewhere"
    torch.testing.assert_close(rows.return_, expected)


@pytest.mark.parametrize("memory", variants(["gru", "lstm", "transformer"], ("gru",)))
def test_it_remembers_with_memory(memory: str) -> None:
    model = {**GRU, "memory": memory}
    agent = trained(debug_envs.memory, 12, T=12, env_delay=2, model=model, learning_rate="linear(2e-2,0)")
    assert score(agent, debug_envs.memory, delay=2) > 0.95


def test_a_reward_that_comes_late_reaches_the_action_that_earned_it() -> None:
    agent = trained(debug_envs.delayed_reward, 14, T=15, env_delay=4)
    assert score(agent, debug_envs.delayed_reward, delay=4) == 1.0  # chance is 1/3


def test_a_termination_ends_the_sum_and_a_truncation_bootstraps() -> None:
    for ends in ("terminated", "truncated"):
        more = {
            "discount": 0.8,
            "env_ends": ends,
            "env_length": 5,
            "q_lambda": 0.5,
            "model": {"hidden": ()},
            "minibatches": 2,
        }
        agent = trained(debug_envs.time_limit, 30, T=12, B=4, learning_rate="linear(2e-1,0)", **more)
        nothing = torch.zeros(5)
        inputs = AgentInputs(torch.arange(5), nothing.long(), nothing, nothing.bool())
        with torch.no_grad():
            best = agent(inputs, ())[0].squeeze(-1).amax(-1)
        if ends == "terminated":
            assert best.tolist() == pytest.approx([3.36, 2.95, 2.44, 1.8, 1.0], abs=0.05)
        else:
            assert (best > torch.tensor([3.36, 2.95, 2.44, 1.8, 1.0])).all()


@pytest.mark.parametrize("model", [{}, GRU], ids=["none", "gru"])
def test_rows_that_are_not_valid_change_nothing(model: dict[str, Any]) -> None:
    after = []
    for spoils in (False, True):
        sampler, algo = made(debug_envs.identity, 12, 4, 4, model, epochs=2, minibatches=2, env_length=4)
        samples = copied(sampler.collect())
        ended = ~samples.valid
        if spoils:
            samples.action[ended] = 1
            samples.reward[ended] = 1e30
            samples.info.q[ended & samples.terminated.roll(1, 0)] = 1e30  # type: ignore[attr-defined]
        learn(algo, samples)
        after.append(dict(algo.agent.state_dict()))
    assert ended.any()
    assert_equal(*after)


def test_the_metrics_of_a_batch_without_a_valid_row_are_finite_and_nothing_moves() -> None:
    sampler, algo = made(debug_envs.memory, 12, 4, 4, epochs=1, minibatches=2)
    samples = copied(sampler.collect())
    samples.valid[...] = False
    before = {name: x.detach().clone() for name, x in algo.agent.model.named_parameters()}
    assert all(np.isfinite(value) for value in learn(algo, samples).values())
    assert_equal(before, {name: x.detach() for name, x in algo.agent.model.named_parameters()})


@pytest.mark.parametrize("explore", ["epsilon", "noisy"])
def test_a_saved_one_goes_on_as_if_never_stopped(explore: str) -> None:
    more: dict[str, Any] = {"epochs": 2, "minibatches": 2, "explore": explore, "learning_rate": "linear(1e-3,0)"}
    sampler, algo = made(debug_envs.memory, 12, 4, 4, GRU, **more)
    batches = [copied(sampler.collect()) for _ in range(4)]
    for samples in batches[:2]:
        learn(algo, samples)
    saved = copy.deepcopy((algo.agent.state_dict(), algo.state_dict()))
    straight = [learn(algo, samples) for samples in batches[2:]]

    _, other = made(debug_envs.memory, 12, 4, 4, GRU, seed=5, **more)
    other.agent.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert [learn(other, samples) for samples in batches[2:]] == straight
    assert_equal(dict(other.agent.state_dict()), dict(algo.agent.state_dict()))
    assert other.progress == algo.progress


def test_epsilon_follows_the_env_steps_and_noise_is_drawn_anew_for_each_step() -> None:
    sampler, algo = made(debug_envs.memory, 12, 4, 4, explore=EpsilonConfig(epsilon="linear(1,0)"), minibatches=2)
    assert float(algo.agent.exploration.level[0]) == 1.0
    learn(algo, sampler.collect())
    level = 1 - algo.progress.env_steps / (4 * 12 * 4)
    assert float(algo.agent.exploration.level[0]) == pytest.approx(level) == algo.counters()["algo/epsilon"]

    sampler, algo = made(debug_envs.memory, 12, 4, 4, explore="noisy", epochs=1, minibatches=2)
    seen, learned = [], algo.learn
    algo.learn = lambda inputs: (
        seen.append([layer.noise_in.clone() for layer in algo.agent.model.noisy_layers]),
        learned(inputs),
    )[1]
    learn(algo, sampler.collect())
    assert len(seen) == 2
    assert all(bool((one != other).any()) for one, other in zip(*seen, strict=True))


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"algo.minibatches=5 must divide the 24 rows of a batch \(sampler.batch_T"):
        made(debug_envs.memory, 6, 4, 1, minibatches=5)
    with pytest.raises(ConfigError, match=r"algo.minibatches=3 must divide the 4 sequences"):
        made(debug_envs.memory, 6, 4, 1, GRU, minibatches=3)
    with pytest.raises(ConfigError, match="needs Discrete actions"):
        made("Pendulum-v1", 6, 4, 1)
