"""Schedules and optimizers in all algorithms: every scheduled field is read, logged and resumed."""

from __future__ import annotations

import copy
from typing import Any

import chz
import gymnasium
import pytest
import torch

from rlframe.algos import a2c, appo, ddpg, dqn, impala, marwil, pg, ppo, pqn, r2d1, sac, td3
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import accepts_schedule
from rlframe.core.types import BatchSpec
from rlframe.exploration import EpsilonConfig
from rlframe.models import ModelConfig
from rlframe.optimizers import AdamWConfig, MuonConfig, OwnConfig, RAdamConfig, RMSPropConfig, SGDConfig
from rlframe.replay import InMemory
from tests.algos.learners import collected, learn, learner

RUN = 48  # env_steps
BATCHES = RUN // 8
REPLAY: dict[str, Any] = {"batch_size": 4, "replay_ratio": 2.0, "learning_starts": 0, "replay": InMemory(size=200)}
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "pg": (pg, "CartPole-v1", {}),
    "a2c": (a2c, "CartPole-v1", {}),
    "ppo": (ppo, "CartPole-v1", {"value_clip": 0.2, "target_kl": 9.0, "kl_coef": 0.5, "minibatches": 2, "epochs": 2}),
    "impala": (impala, "CartPole-v1", {}),
    "appo": (appo, "CartPole-v1", {}),
    "pqn": (pqn, "CartPole-v1", {"minibatches": 2, "epochs": 2, "explore": EpsilonConfig(epsilon_last=0.1)}),
    "dqn": (dqn, "CartPole-v1", {**REPLAY, "prioritized": True, "explore": EpsilonConfig(epsilon_last=0.1)}),
    "r2d1": (r2d1, "CartPole-v1", {**REPLAY, "burn_in": 1, "learn_T": 3, "replay_ratio": 1.0}),
    "ddpg": (ddpg, "Pendulum-v1", {**REPLAY, "prioritized": True}),
    "td3": (td3, "Pendulum-v1", {**REPLAY, "prioritized": True}),
    "sac": (sac, "Pendulum-v1", {**REPLAY, "learn_temperature": False}),
    "sac_target": (sac, "Pendulum-v1", {**REPLAY, "target_entropy": -0.5}),
}
every = pytest.mark.parametrize("name", CASES)


def made(name: str, **more: Any) -> Any:
    return made_of(*CASES[name], **more)


def made_of(module: Any, env: str, settings: dict[str, Any], **more: Any) -> Any:
    spaces = gymnasium.make(env)
    model = ModelConfig(hidden=(8,), memory="gru" if module is r2d1 else "none", memory_size=4)
    config = module.Config(**settings | more)
    agent = config.make_agent(spaces.observation_space, spaces.action_space, model, 0)
    return config.make_algorithm(agent, BatchSpec(4, 2), RUN, 0)


def numbers(name: str) -> dict[str, float]:
    """The fields that take schedules, with a number of each."""
    config = made(name).config
    found = {key: getattr(config, key) for key, field in chz.chz_fields(config).items() if accepts_schedule(field)}
    found = {key: x if isinstance(x, float | int) else x.values[0] for key, x in found.items()}
    found = {key: 1.5 if abs(x) == float("inf") else x for key, x in found.items() if x == x}
    if name == "sac_target":
        del found["temperature"]
    return found


@every
def test_a_level_schedule_of_every_field_learns_what_the_numbers_learn(name: str) -> None:
    given = numbers(name)
    one, other = made(name, **given), made(name, **{key: f"linear({x!r},{x!r})" for key, x in given.items()})
    data = collected(CASES[name][1], one.agent, BATCHES, (4, 2))
    assert learn(one, data) == learn(other, data)
    for mine, its in zip(one.agent.parameters(), other.agent.parameters(), strict=True):
        assert torch.equal(mine, its)
    logged = {key.removeprefix("algo/") for key in other.counters()}
    assert logged >= set(given)
    assert not set(one.counters()) & {f"algo/{key}" for key in given}


IDLE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "eta": (*CASES["r2d1"][:2], {**CASES["r2d1"][2], "prioritized": False}),
    "most_weight": (marwil, "CartPole-v1", {**REPLAY, "beta": 0.0}),
}


@pytest.mark.parametrize("field", IDLE)
def test_a_schedule_of_a_field_that_does_nothing_changes_nothing(field: str) -> None:
    one, other = made_of(*IDLE[field]), made_of(*IDLE[field], **{field: "linear(1,0.5)"})
    data = collected("CartPole-v1", one.agent, 24, (4, 2))  # episodes end
    assert learn(one, data) == learn(other, data)
    assert one.progress.updates
    assert f"algo/{field}" not in other.counters()


OPTIMIZERS: dict[str, Any] = {
    "adamw": AdamWConfig(betas=(0.8, 0.9)),
    "radam": RAdamConfig(),
    "rmsprop": RMSPropConfig(momentum=0.9),
    "sgd": SGDConfig(momentum=0.9, nesterov=True),
    "muon": MuonConfig(smallest=4),
    "own": OwnConfig(name="torch.optim:NAdam"),
}


# Each algorithm has one of them, in turn, the others are slow.
EACH = [
    pytest.param(name, optimizer, marks=[pytest.mark.slow] * (i % len(OPTIMIZERS) != j))
    for i, name in enumerate(CASES)
    for j, optimizer in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("name", "optimizer"), EACH)
def test_every_algorithm_learns_with_every_optimizer_and_schedules_and_goes_on_exactly(
    name: str, optimizer: str
) -> None:
    given: dict[str, Any] = {key: f"cosine({x!r},{0.5 * x!r})" for key, x in numbers(name).items()}
    whole, other = (made(name, optimizer=OPTIMIZERS[optimizer], **given) for _ in range(2))
    first = [p.detach().clone() for p in whole.agent.parameters()]
    data = collected(CASES[name][1], whole.agent, 6, (4, 2))
    learn(whole, data[:3])
    saved = copy.deepcopy((whole.agent.state_dict(), whole.state_dict()))
    expected = learn(whole, data[3:])
    other.agent.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert learn(other, data[3:]) == expected
    assert whole.counters() == other.counters()
    assert not all(torch.equal(p, before) for p, before in zip(whole.agent.parameters(), first, strict=True))


def test_a_schedule_is_the_number_before_the_newest_batch() -> None:
    algo = made("ppo", entropy_coef="linear(1,0)", clip="piecewise(0:0.2,32:0.2,32:0.1)")
    data = collected("CartPole-v1", algo.agent, BATCHES, (4, 2))
    found = []
    for samples in data:
        before = algo.progress.env_steps
        learn(algo, [samples])
        assert algo.now.entropy_coef == pytest.approx(1 - before / RUN)
        assert algo.now.clip == (0.2 if before < 32 else 0.1)
        found.append(algo.counters()["algo/entropy_coef"])
    assert found[0] == 1 > found[-1]
    assert algo.now.discount == 0.99


def test_a_rate_that_is_set_in_a_run_may_be_a_schedule() -> None:
    algo, other = made("a2c"), made("a2c")
    algo.learning_rate = "linear(1e-2,0)"
    data = collected("CartPole-v1", algo.agent, 4, (4, 2))
    found = [each["learning_rate"] for each in learn(algo, data)]
    assert found[0] == 1e-2
    assert found[-1] == pytest.approx(1e-2 * (1 - algo.progress.scheduled / RUN))
    other.load_state_dict(algo.state_dict())
    assert other.learning_rate == found[-1]
    with pytest.raises(ValueError, match=r"learning_rate=linear\(1,-1\) must be at least 0 and finite"):
        algo.learning_rate = "linear(1,-1)"


def test_a_rate_that_is_set_is_that_of_all_parts_with_its_key() -> None:
    algo = learner(sac)
    algo.learning_rate = 0.25
    assert (algo.optimizer.rate, algo.temperature_optimizer.rate) == (0.25, 0.25)
    assert algo.critic_optimizer.rate != 0.25


CROSSES = ("exponential(2,1)", "linear(2,1)")  # between their ends, which are equal


@pytest.mark.parametrize(("rho", "c"), [(0.5, 1.0), ("linear(1,0.5)", 1.0), (1.0, "linear(1,1.2)"), CROSSES])
def test_traces_longer_than_their_ratios_are_refused(rho: Any, c: Any) -> None:
    for name in ("impala", "appo"):
        with pytest.raises((ConfigError, ValueError), match=r"must be at least algo\.c_clip"):
            made(name, rho_clip=rho, c_clip=c)
