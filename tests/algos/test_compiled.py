"""Compiled updates learn what the plain equations learn; what cannot be compiled runs as it is and says why."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from rlframe.algos import dqn, ppo, r2d1
from rlframe.core.types import Samples
from rlframe.optimizers import SGDConfig
from rlframe.optimizers.own import OwnConfig
from rlframe.rewards import ICMConfig, RNDConfig
from rlframe.rewards.base import UNCHANGED
from rlframe.system.meeting import NotTogether
from rlframe.updates import compiled
from rlframe.updates.compiled import CompileChoice, compiling
from tests.algos.learners import collected, learner
from tests.algos.played import as_equations, functions_of
from tests.algos.test_cuda_graph import (
    CASES,
    OTHERS,
    assert_alike,
    assert_learned_alike,
    batches,
    learned,
    made,
    numbers,
    trained,
)
from tests.algos.test_sac_td3_ddpg import IMAGE, Sees
from tests.variants import variants

MORE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "own_optimizer": (dqn, "CartPole-v1", {"optimizer": OwnConfig(name="torch.optim:NAdam")}),
    "target_kl": (ppo, "CartPole-v1", {"target_kl": 1e-4, "epochs": 4, "clip": 0.5}),
}
CASES_HERE = {**CASES, **OTHERS, **MORE}
FAST = ("rainbow", "sac", "td3_muon", "ppo_kl", "impala", *MORE)
PLAINLY = ("rainbow", "sac")  # with Adam in the slow test of what is compiled; ppo_kl and impala have it here too
every = pytest.mark.parametrize("name", variants(CASES_HERE, FAST))
COMPILE = CompileChoice(True)
PLAIN: Any = {"optimizer": SGDConfig()}  # recorded in half the time of Adam
PENDULUM = (Box(-9, 9, (3,), np.float32), Box(-2, 2, (1,), np.float32))
CARTPOLE = (Box(-9, 9, (4,), np.float32), Discrete(2))
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in MORE.items():
        monkeypatch.setitem(OTHERS, name, case)


def both(name: str, **more: Any) -> tuple[Any, Any, list[Samples]]:
    return made(name, **more), made(name, **more), batches(name)


def warning_of_equal_runs(one: Any, other: Any, data: list[Samples], warned: Callable[[], list[str]]) -> str:
    """The only warning of an algorithm that is to be compiled, and learns to the bit what one as it is learns."""
    as_equations(other)
    for algo, choice in ((one, COMPILE), (other, CompileChoice(False))):
        np.random.seed(0)  # noqa: NPY002  # of a network that draws from it
        random.seed(0)
        with compiling(choice):
            learned(algo, data)
    assert_alike(one, other, rtol=0, atol=0)
    (line,) = warned()
    return line


def compare(name: str, more: Any = None, **tolerance: float) -> Any:
    plain, algo, data = both(name, **more or {})
    with compiling(COMPILE):
        found = learned(algo, data)
    assert_learned_alike(algo, found, plain, learned(plain, data), **tolerance)
    return algo


@every
def test_a_recorded_update_learns_what_its_equations_learn(name: str, recorded: list[Any]) -> None:
    algo = compare(name, PLAIN if name in PLAINLY else {}, rtol=1e-4, atol=1e-5)
    n_forms = [len(getattr(algo, name)._updates) for name in functions_of(algo)]
    assert min(n_forms) >= 1
    assert sum(n_forms) == len(recorded) <= 4
    followed = {key: getattr(algo.now, key) for key in algo.schedules._recorded}
    assert followed
    assert all(isinstance(x, float) for x in followed.values()), "outside of the graph they are numbers"
    assert {key: x.item() for key, x in algo.schedules._recorded.items()} == pytest.approx(followed)
    assert_gradients_have_the_layout_of_stacked_weights(recorded, at_least=1 if name in ("sac", "td3_muon") else 0)


def assert_gradients_have_the_layout_of_stacked_weights(graphs: list[Any], at_least: int) -> None:
    aten = torch.ops.aten
    products = [node for graph in graphs for node in graph.graph.nodes if node.target is aten.bmm.default]
    assert len(products) >= at_least
    assert not [x for x in products if {use.target for use in x.users} == {aten.transpose.int}]


@pytest.mark.parametrize("config", [pytest.param(RNDConfig, marks=pytest.mark.slow), ICMConfig])
def test_a_learned_bonus_is_recorded_too(config: Any, recorded: list[Any]) -> None:
    algo, settings = made("ppo"), config(hidden=(8,), embedding=8, learning_starts=0, batch_size=20)
    plain, compiled = (settings.add_to(UNCHANGED, algo, PENDULUM, n_steps=1000) for _ in range(2))
    for each in (plain, compiled):
        for samples in batches("ppo"):
            with compiling(CompileChoice(each is compiled)):
                each(samples)
    assert len(recorded) == 1
    torch.testing.assert_close(compiled.bonus.state_dict(), plain.bonus.state_dict(), rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.timeout(400)
@pytest.mark.slow  # but for dqn, whose comparison is in the test below
@pytest.mark.parametrize("name", CASES_HERE)
def test_a_compiled_update_learns_what_its_equations_learn(name: str, warned: Callable[[], list[str]]) -> None:
    compare(name, rtol=1e-3, atol=1e-4)
    assert warned() == []


@needs_compiler
def test_a_saved_algorithm_goes_on_compiled_to_the_bit_and_learns_what_its_equations_learn(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    one, other, data = both("dqn")
    marker, plain = tmp_path / "made" / "key", made("dqn")
    with compiling(CompileChoice(True, marker)):
        found = learned(one, data[:5])
        other.load_state_dict(one.state_dict())
        other.agent.load_state_dict(one.agent.state_dict())
        found += learned(one, data[5:])
        learned(other, data[5:])
    assert_alike(one, other, rtol=0, atol=0)
    assert_learned_alike(one, found, plain, learned(plain, data), rtol=1e-3, atol=1e-4)
    assert warned() == []
    assert marker.exists(), "a later run knows that the cache has it"


def test_without_the_context_updates_run_as_they_are(recorded: list[Any]) -> None:
    one, other, data = both("sac")
    as_equations(other)
    learned(one, data)
    learned(other, data)
    assert_alike(one, other, rtol=0, atol=0)
    assert not recorded


def test_recording_changes_nothing(recorded: list[Any]) -> None:
    algo, data = made("sac"), batches("sac")
    learned(algo, data[:4])
    before = numbers(trained(algo))
    batch = algo.replay.sample(8, 0.0)
    inputs = batch, algo.soft_value.noise(8)
    before = {**before, "generator": ()}
    for name in functions_of(algo):
        learn = getattr(algo, name)
        compiled.compile_update(learn._learn, inputs, algo.schedules, learn._steps)
    torch.testing.assert_close({**numbers(trained(algo)), "generator": ()}, before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in algo.agent.parameters())


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted_at_once(recorded: list[Any]) -> None:
    algo, data = made("ppo"), batches("ppo")
    with compiling(COMPILE):
        learned(algo, data[:1])
        before = {name: x.clone() for name, x in algo.agent.state_dict().items()}
        updates = algo.progress.updates
        bad = replace(data[1], reward=torch.full_like(data[1].reward, torch.nan))
        learned(algo, [bad])
        after = algo.agent.state_dict()
        weights = [name for name in before if "norm" not in name]
        assert all(torch.equal(before[name], after[name]) for name in weights)
        assert algo.progress.skipped == algo.progress.updates - updates > 0
        assert algo.progress.skipped_updates[0].batch
        learned(algo, data[2:])
    assert all(x.isfinite().all() for x in algo.agent.state_dict().values())
    assert any(not torch.equal(before[name], algo.agent.state_dict()[name]) for name in weights)


@pytest.mark.parametrize("name", [pytest.param("ppo", marks=pytest.mark.slow), "pqn"])
def test_a_first_step_that_is_not_finite_changes_nothing(name: str, recorded: list[Any]) -> None:
    algo, data = made(name), batches(name)
    bad = replace(data[0], reward=torch.full_like(data[0].reward, torch.nan))
    with compiling(COMPILE):
        learned(algo, [bad])
    assert recorded
    assert algo.progress.skipped > 0
    assert all(bool(x.isfinite().all()) for x in algo.agent.parameters())


def test_new_shapes_are_recorded_anew_until_they_are_too_many(
    recorded: list[Any], monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(compiled, "_MOST_FORMS", 2)
    one, other, data = both("a2c", **PLAIN)
    parts = [_first_rows(batch, T) for batch, T in zip(data, (1, 2, 3, 2, 1, 3), strict=False)]
    with compiling(COMPILE):
        learned(one, parts)
    learned(other, parts)
    assert len(recorded) == 2
    assert warned() == ["updates of further shapes run uncompiled, since 2 are compiled already"]
    assert_alike(one, other, rtol=1e-4, atol=1e-5)


def _first_rows(batch: Samples, T: int) -> Samples:
    rows = {name: getattr(batch, name)[:T] for name in ("action", "reward", "terminated", "truncated", "valid", "info")}
    return replace(batch, inputs=batch.inputs[: T + 1], n_env_steps=int(rows["valid"].sum()), **rows)


class Looking(nn.Module):
    """A user's network that decides by a value."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.tanh() if float(y.detach().mean()) > -9 else y


class InNumpy(Looking):
    """One that computes in NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + torch.from_numpy(y.detach().numpy() * 0.5)


class Drawing(Looking):
    """One that draws from a generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * (1 + torch.rand(8, generator=torch.Generator().manual_seed(0)))


class Deciding(Looking):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.mean() > 0 else 2 * y


class OfNumpy(Looking):
    """One that draws from NumPy's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * (1 + np.random.rand())  # noqa: NPY002


class OfBoth(OfNumpy):
    """One that draws from Python's too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class OfBothDeciding(OfBoth):
    """One that decides by a value then."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.mean() > 0 else 2 * y


class Counting(Looking):
    """One that counts its calls, and scales by them."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.layer(x) * (1 + 0.01 * self.n)  # type: ignore[no-any-return]


class Dropping(Looking):
    """One with dropout and batch normalisation."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.rest = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(self.layer(x))
        return y


def with_network(network: type[nn.Module]) -> Any:
    model = {"encoder": f"{network.__module__}:{network.__name__}", "hidden": ()}
    return learner(dqn, *CARTPOLE, model=model, replay_ratio=2.0, n_steps=96, **PLAIN)


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (Looking, "test_compiled.py"),
        (InNumpy, "test_compiled.py"),
        (Deciding, "it decides by the value of a tensor; use torch.where, or compile=false"),
        (Drawing, "a generator of its own"),
        (OfNumpy, "it draws from NumPy's generator; draw with torch, or use compile=false"),
        (OfBoth, "it draws from NumPy's and Python's generator"),
        pytest.param(OfBothDeciding, "it decides by the value of a tensor", marks=pytest.mark.slow),  # OfBoth, Deciding
        (Counting, "it changes Counting.n in Python; keep that in a tensor, or use compile=false"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is_and_says_where(
    network: type[nn.Module], says: str, recorded: list[Any], warned: Callable[[], list[str]]
) -> None:
    line = warning_of_equal_runs(with_network(network), with_network(network), batches("dqn", 3), warned)
    assert line.startswith("updates run uncompiled: ")
    assert says in line


def test_dropout_and_batch_normalisation_of_a_user_are_recorded_with_their_draws_and_statistics(
    recorded: list[Any],
) -> None:
    one, other, data = with_network(Dropping), with_network(Dropping), batches("dqn", 4)
    torch.manual_seed(1)
    with compiling(COMPILE):
        learned(one, data)
    torch.manual_seed(1)
    learned(other, data)
    assert recorded
    assert_alike(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_singular_vectors_and_pooled_features_are_recorded(recorded: list[Any]) -> None:
    def of_images() -> Any:
        model = {"encoder": "impala", "channels": (4,), "image_hidden": (8,), "spectral_norm": True, "image_pool": 2}
        return learner(dqn, IMAGE, Discrete(2), model=model, value="implicit", n_atoms=3, replay_ratio=2.0)

    one, other = of_images(), of_images()
    before = {name: x.clone() for name, x in one.agent.state_dict().items()}
    data = collected(Sees, one.agent, 4, (4, 2), observation=IMAGE, action=Discrete(2))
    with compiling(COMPILE):
        learned(one, data)
    learned(other, data)
    assert len(recorded) == 1
    assert_alike(one, other, rtol=1e-4, atol=1e-5)
    vectors = [name for name in before if name.endswith(".left")]
    assert len(vectors) == 4
    assert not any(torch.equal(before[name], one.agent.state_dict()[name]) for name in vectors)


def test_a_memory_is_named_as_what_is_not_compiled(recorded: list[Any], warned: Callable[[], list[str]]) -> None:
    model = {"memory": "lstm", "memory_size": 4, "hidden": (4,)}
    algo = learner(r2d1, *CARTPOLE, model=model, burn_in=0, learn_T=4, state_interval=4)
    with compiling(COMPILE):
        learned(algo, collected("CartPole-v1", algo.agent, 8, (4, 2)))
    assert algo.progress.updates
    assert not recorded
    assert warned() == ["updates run uncompiled: model.memory cuts sequences where episodes begin"]


def test_where_the_policys_step_cannot_be_compiled_the_critics_are_not_either(
    recorded: list[Any], warned: Callable[[], list[str]]
) -> None:
    one, other, data = both("td3", **PLAIN)
    for algo in (one, other):
        algo.actor_loss = partial(looking, algo.actor_loss)
    with compiling(COMPILE):
        learned(one, data)
    learned(other, data)
    assert_alike(one, other, rtol=1e-4, atol=1e-5)
    (line,) = warned()
    assert "test_compiled.py" in line
    assert len(recorded) == 1, "that of the critics, before the policy had its first step"


def test_runs_that_come_to_different_functions_learn_each_for_itself() -> None:
    one, other, data = both("sac")
    with compiling(CompileChoice(False, prepare=Mock(side_effect=NotTogether), shared=True)):
        learned(one, data)
    learned(other, data)
    assert_alike(one, other, rtol=0, atol=0)


def looking(loss: Callable[..., Tensor], q: Tensor, *actions: Tensor) -> Tensor:
    return loss(q, *actions) if float(q.detach().mean()) < 1e9 else q.sum()
