"""Updates as graphs: those of every algorithm learn what they learn without, on the CPU played, on a GPU really."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import gymnasium
import pytest
import torch
from torch import Tensor

from rlframe.algos import a2c, appo, bc, cql, ddpg, dqn, impala, iql, marwil, pg, ppo, pqn, sac, td3, td3_bc
from rlframe.core.struct import leaves
from rlframe.core.types import BatchSpec, Samples
from rlframe.kernels.device import learning_in
from rlframe.models import ModelConfig
from rlframe.ops import returns
from rlframe.optimizers import MuonConfig, RMSPropConfig, SGDConfig
from rlframe.record.codec import decode
from rlframe.updates.graphed import graphed
from tests.algos.critic_cases import CRITICS
from tests.algos.learners import LEVEL, collected, learner
from tests.algos.played import NoLooks, as_equations, graphs_of, launch, play, steps_of
from tests.algos.test_sac_td3_ddpg import IMAGE, Sees, kept
from tests.variants import variants

NETWORK = {"hidden": (8,), "activation": "relu", "normalize_observation": True}
ANNEALED = {"learning_rate": "linear(3e-4,0)", "n_steps": 96, "replay_ratio": 2.0}
RMSPROP = RMSPropConfig(momentum=0.9, weight_decay=0.1)
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "dqn": (dqn, "CartPole-v1", {"target_interval": 3, "double": True}),
    "rainbow": (
        dqn,
        "CartPole-v1",
        {"explore": "noisy", "dueling": True, "value": "categorical", "prioritized": True, "n_step": 2, "v_max": 9.0},
    ),
    "sac": (sac, "Pendulum-v1", {"max_grad_norm": "linear(1,0.5)", "tau": "linear(0.1,0.01)"}),
    "sac_discrete": (sac, "CartPole-v1", {"learn_temperature": False, "temperature": "linear(1,0.1)"}),
    "td3": (td3, "Pendulum-v1", {"target_noise": "linear(0.5,0)", "target_noise_clip": "cosine(0.5,0.1)"}),
    "ddpg": (ddpg, "Pendulum-v1", {"prioritized": True}),
    "ddpg_smoothed": (
        ddpg,
        "Pendulum-v1",
        {"target_noise": "linear(0.5,0)", "n_critics": 2, "policy_interval": 2, "target_clip": "linear(9,1)"},
    ),
    "sac_delayed": (
        sac,
        "Pendulum-v1",
        {"policy_interval": 2, "target_interval": 1, "action_prior": "gaussian", "n_critics": 3, "target_clip": 5.0},
    ),
    **CRITICS,
    "td3_muon": (td3, "Pendulum-v1", {"optimizer": MuonConfig(smallest=4, weight_decay=0.1)}),
    "td3_sgd": (td3, "Pendulum-v1", {"optimizer": SGDConfig(momentum=0.9)}),
    "td3_rmsprop": (td3, "Pendulum-v1", {"optimizer": RMSPROP}),
    "td3_adamw": (td3, "Pendulum-v1", {"optimizer": "adamw"}),
    "dqn_conservative": (dqn, "CartPole-v1", {"conservative_weight": "linear(1,0)", "value": "quantile"}),
    "bc": (bc, "Pendulum-v1", {"loss": "mse"}),
    "marwil": (marwil, "CartPole-v1", {"beta": "linear(1,0)"}),
    "iql": (iql, "Pendulum-v1", {"expectile": "linear(0.5,0.9)", "target_interval": 2}),
    "td3_bc": (td3_bc, "Pendulum-v1", {"q_weight": "linear(1,9)"}),
    "cql": (cql, "Pendulum-v1", {"n_actions": 2, "conservative_weight": "linear(1,5)"}),
    "cql_learned": (cql, "CartPole-v1", {"learn_conservative_weight": True, "target_gap": "linear(1,0)"}),
    "a2c": (
        a2c,
        "CartPole-v1",
        {"normalize_advantage": True, "gae_lambda": "linear(1,0.5)", "entropy_coef": "linear(1,0)"},
    ),
    "ppo": (
        ppo,
        "Pendulum-v1",
        {"clip": "linear(0.1,0)", "value_coef": "linear(1,0)", "minibatches": 2, "epochs": 3, "value_clip": 0.2},
    ),
    "ppo_kl": (ppo, "CartPole-v1", {"clip": math.inf, "kl_coef": "linear(3,1)", "kl_coef_target": 1e-5, "epochs": 2}),
}
OTHERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "pg": (pg, "CartPole-v1", {}),
    "pqn": (pqn, "CartPole-v1", {"q_lambda": "linear(0.9,0.5)", "minibatches": 2}),
    "impala": (impala, "CartPole-v1", {"rho_clip": "linear(2,1)", "optimizer": RMSPROP}),
    "appo": (appo, "CartPole-v1", {}),
}
FAST = ("rainbow", "sac", "td3_muon", "ddpg_smoothed", "a2c", "ppo")  # one of each kind of update
every = pytest.mark.parametrize("name", variants(CASES, FAST))


def made(name: str, device: str = "cpu", **more: Any) -> Any:
    """An algorithm whose rates and clips change with every batch."""
    module, env, settings = (CASES | OTHERS)[name]
    spaces = gymnasium.make(env)
    arguments = (spaces.observation_space, spaces.action_space)
    if module not in (a2c, appo, impala, pg, ppo, pqn):
        words = {"model": {}, **ANNEALED, **settings, **more}
        return learner(module, *arguments, device=device, **words | {"model": NETWORK | words["model"]})
    config = module.Config(**{"learning_rate": "linear(1e-3,0)"} | settings | more)
    agent = config.make_agent(*arguments, ModelConfig(**NETWORK), 0).to(device)
    return config.make_algorithm(agent, BatchSpec(4, 2), ANNEALED["n_steps"], 0)


def batches(name: str, n: int = 8) -> list[Samples]:
    return copy.deepcopy(_batches(name, n))


@functools.cache
def _batches(name: str, n: int) -> list[Samples]:
    return collected((CASES | OTHERS)[name][1], made(name).agent, n, (4, 2))


def learned(algo: Any, data: list[Samples]) -> list[dict[str, Any]]:
    """The metrics of every update, as they are given."""
    found = []
    for samples in data:
        algo.receive(samples)
        while algo.updates_due():
            found.append(dict(algo.update()))
    return found


def assert_alike(one: Any, other: Any, **tolerance: float) -> None:
    """Parameters, targets and optimizers."""
    for mine, its in ((one.agent.state_dict(), other.agent.state_dict()), (trained(one), trained(other))):
        torch.testing.assert_close(mine, its, **tolerance)


def numbers(state: Any) -> Any:
    """What of a saved state are numbers."""
    if isinstance(state, dict):
        return {key: numbers(x) for key, x in state.items() if not isinstance(x, str)}
    return state


def assert_learned_alike(algo: Any, found: list[Any], plain: Any, expected: list[Any], **tolerance: float) -> None:
    """The metrics of every update, and what was trained."""
    assert len(found) == len(expected) >= 8
    for mine, its in zip(found, expected, strict=True):
        for key in mine.keys() - {"clip_fraction"}:  # a ratio of 1 is at its bound, but for rounding
            torch.testing.assert_close(mine[key], its[key], check_stride=False, **tolerance)
    torch.testing.assert_close(numbers(trained(algo)), numbers(trained(plain)), **tolerance)
    torch.testing.assert_close(algo.agent.state_dict(), plain.agent.state_dict(), **tolerance)


def trained(algo: Any) -> dict[str, Any]:
    return {name: value for name, value in algo.state_dict().items() if name not in ("replay", "generator", "rng")}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: returns are not computed in NumPy."""
    monkeypatch.setattr(returns, "_accumulate", lambda x, decay: (returns._double(x, decay), x)[1])


@every
def test_graphs_learn_what_is_learned_without_and_each_update_keeps_its_metrics(name: str, as_on_a_gpu: None) -> None:
    data, eager, algo = batches(name), made(name), made(name)
    launch(eager)
    eager.schedules.place("cpu")
    play(algo)
    expected, found = learned(eager, data), learned(algo, data)
    assert len(found) == len(expected) >= 8  # updates
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # of each update, after all of them
    losses = [next(each[key] for key in ("loss", "value_loss", "policy_loss") if key in each) for each in found]
    assert len({float(x) for x in losses}) == len(found)
    assert_alike(algo, eager, rtol=0, atol=0)
    for graph in graphs_of(algo):
        assert graph._graph.n["capture"] == 1
        assert graph._graph.n["replay"] >= 3
        assert graph._graph.n["warm_up"] == 3


@every
def test_steps_that_are_launched_are_those_that_are_waited_for_and_so_are_their_saved_states(name: str) -> None:
    data, waits, algo = batches(name), made(name), made(name)
    launch(algo)
    assert_alike_metrics(learned(algo, data), learned(waits, data))
    assert_alike(algo, waits, rtol=1e-4, atol=1e-5)
    for mine, its in zip(steps_of(algo), steps_of(waits), strict=True):
        assert mine.state_dict()["param_groups"] == its.state_dict()["param_groups"]
        its.load_state_dict(decode(*kept(mine.state_dict())))
        torch.testing.assert_close(its.state_dict(), mine.state_dict(), rtol=0, atol=0)


def assert_alike_metrics(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for mine, its in zip(one, other, strict=True):
        as_floats = [{name: float(x) for name, x in each.items()} for each in (mine, its)]
        assert as_floats[0] == pytest.approx(as_floats[1], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_an_update_looks_at_no_value_where_steps_are_launched(name: str, as_on_a_gpu: None) -> None:
    algo = made(name)
    launch(algo)
    for samples in batches(name, 7 if name == "marwil" else 3):  # until an episode has ended
        algo.receive(samples)
        while algo.updates_due():
            with NoLooks():
                algo.update()
    assert algo.progress.updates >= 3


@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "ppo", "a2c"])
def test_a_graph_skips_what_is_not_finite_and_counts_it_one_update_later(name: str, as_on_a_gpu: None) -> None:
    data, waits, algo = batches(name), made(name), made(name)
    play(algo)
    learned(waits, data[:6])
    learned(algo, data[:6])
    before = {key: value.clone() for key, value in algo.agent.named_parameters()}
    data[6].reward[1] = torch.nan
    skipped = []
    for samples in data[6:]:
        for each in (waits, algo):
            learned(each, [samples])
        skipped.append((algo.progress.skipped, waits.progress.skipped))
    for step in steps_of(algo):
        step.check()
    assert algo.progress.skipped == waits.progress.skipped >= 1
    first = algo.progress.skipped_updates[0]
    assert first.updates == waits.progress.skipped_updates[0].updates
    assert any(not x.isfinite().all() for x in leaves(first.batch) if isinstance(x, Tensor))
    assert all(bool(x.isfinite().all()) for x in algo.agent.parameters())
    assert algo.progress.updates == waits.progress.updates
    assert set(before) == set(dict(algo.agent.named_parameters()))
    assert_alike(algo, waits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dqn", "sac", "ppo", "a2c"])
def test_a_graph_goes_on_from_a_saved_state_that_was_loaded(name: str, as_on_a_gpu: None) -> None:
    data, eager, algo = batches(name, 14), made(name), made(name)
    launch(eager)
    eager.schedules.place("cpu")
    play(algo)
    for each in (eager, algo):
        learned(each, data[:6])
    state = decode(*kept({"agent": algo.agent.state_dict(), "algo": algo.state_dict()}))
    for each in (eager, algo):
        learned(each, data[6:8])
        each.agent.load_state_dict(state["agent"])
        each.load_state_dict(state["algo"])
        learned(each, data[8:])
    assert_alike(algo, eager, rtol=0, atol=0)
    assert all(graph._graph.n["capture"] == 1 for graph in graphs_of(algo))


@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "ddpg", "ppo", "a2c"])
def test_a_saved_state_counts_the_newest_skipped_step(name: str) -> None:
    data, algo = batches(name, 4), made(name)
    launch(algo)
    learned(algo, data[:3])
    assert algo.state_dict()["progress"]["skipped"] == 0
    data[3].reward[...] = torch.nan
    learned(algo, data[3:])
    saved = algo.state_dict()["progress"]["skipped"]
    for step in steps_of(algo):
        step.check()
    assert saved == algo.progress.skipped >= 1


def of_images(device: str = "cpu") -> Any:
    """SAC with convolutions, which autograd goes back through."""
    return learner(sac, IMAGE, LEVEL, model={"hidden": (8,), "image_hidden": (8,)}, device=device, replay_ratio=4.0)


def image_batches() -> list[Samples]:
    return collected(Sees, of_images().agent, 2, (4, 2), observation=IMAGE, action=LEVEL)


@pytest.mark.parametrize("precision", variants(["fp32", "bf16"], ("bf16",)))
def test_convolutions_are_learned_by_graphs_in_either_precision(precision: str, as_on_a_gpu: None) -> None:
    data, eager, algo = image_batches(), of_images(), of_images()
    launch(eager)
    eager.schedules.place("cpu")
    play(algo)
    with learning_in(precision):
        assert_alike_metrics(learned(algo, data), learned(eager, data))
    assert_alike(algo, eager, rtol=0, atol=0)
    assert all(graph.captured for graph in graphs_of(algo))


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_the_noise_of_a_state_from_another_device_follows_from_it(name: str) -> None:
    of_a_gpu = [torch.arange(16, dtype=torch.uint8), torch.arange(1, 17, dtype=torch.uint8)]  # its seed and offset
    drawn = []
    for state in (of_a_gpu[0], of_a_gpu[0], of_a_gpu[1]):
        algo = made(name)
        algo.load_state_dict({**algo.state_dict(), "generator": state})
        drawn.append(torch.rand(3, generator=algo.generator).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_function_that_exchanges_gradients_is_left_as_it_is() -> None:
    algo, gpu = made("sac"), torch.device("cuda")
    algo.progress.ranks = type("Two", (), {"world_size": 2})()
    assert graphed(algo._learn_policy, gpu, steps_of(algo)) == algo._learn_policy


@pytest.mark.gpu
@every
def test_a_gpu_learns_by_graphs_what_it_learns_without(name: str) -> None:
    data, eager, algo = batches(name), made(name, "cuda:0"), made(name, "cuda:0")
    as_equations(eager)
    assert_alike_metrics(learned(algo, data), learned(eager, data))
    assert_alike(algo, eager, rtol=1e-3, atol=1e-4)
    assert {graph.captured for graph in graphs_of(algo)} == {True}
    assert not graphs_of(eager)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_learns_convolutions_by_graphs_in_either_precision(precision: str) -> None:
    data, eager, algo = image_batches(), of_images("cuda:0"), of_images("cuda:0")
    as_equations(eager)
    with learning_in(precision), torch.backends.cudnn.flags(allow_tf32=False):  # it rounds as bf16 does
        learned(algo, data)
        learned(eager, data)
    assert all(graph.captured for graph in graphs_of(algo))
    assert_alike(algo, eager, rtol=1e-2, atol=1e-3)


def looking(learn: Any) -> Any:
    return lambda inputs: (learn(inputs), inputs[0].return_.sum().item())[0]


@pytest.mark.gpu
def test_a_gpu_goes_on_after_a_capture_that_failed() -> None:
    data, eager, algo = batches("sac"), made("sac", "cuda:0"), made("sac", "cuda:0")
    as_equations(eager)
    algo.learn_critics = looking(algo.learn_critics)
    assert_alike_metrics(learned(algo, data), learned(eager, data))
    assert_alike(algo, eager, rtol=1e-3, atol=1e-4)
    assert not any(each.captured for each in graphs_of(algo))
    assert torch.randn(3, device="cuda:0").isfinite().all(), "its own generator goes on too"
    assert torch.cuda.current_stream("cuda:0") == torch.cuda.default_stream("cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "ppo", "a2c"])
def test_what_was_saved_on_a_gpu_goes_on_on_a_cpu_and_the_other_way_round(name: str) -> None:
    data = batches(name)
    there, here = made(name, "cuda:0"), made(name)
    learned(there, data[:6])
    for to, saved in ((here, there), (there, here)):
        state = decode(*kept({"agent": saved.agent.state_dict(), "algo": saved.state_dict()}))
        to.agent.load_state_dict(state["agent"])
        to.load_state_dict(state["algo"])
        learned(to, data[6:])
        assert all(bool(x.isfinite().all()) for x in to.agent.parameters())
