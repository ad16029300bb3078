"""What DQN begins while one environment steps: another thread's values are its own, and nothing of it is ever lost."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.algos import compiled
from rlframe.algos.prefetch import OneThread, Prefetch
from rlframe.kernels.device import in_bf16, learning_in
from rlframe.record.codec import ChunkedArray
from tests.algos.learners import kept_gradients
from tests.algos.test_dqn import copied, made
from tests.threads import claim_two_threads


class Pictures(gymnasium.Env):
    """Noise, for `length` steps, whatever is done."""

    def __init__(self, length: int = 5) -> None:
        self.observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)
        self.action_space, self.length = spaces.Discrete(2), length

    def _seen(self) -> np.ndarray:
        return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._seen(), float(action), self.t == self.length, False, {}


@pytest.fixture
def two_threads() -> Iterator[None]:
    n = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(n)


@pytest.fixture
def claimed_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    claim_two_threads(monkeypatch)


RAINBOW = {
    "double": True,
    "dueling": True,
    "explore": "noisy",
    "prioritized": True,
    "n_step": 3,
    "value": "categorical",
}


IMPLICIT = {"double": False, "value": "implicit", "n_atoms": 4, "munchausen": 0.9}


def learner(seed: int = 0, **settings: Any) -> tuple[Any, Any, Any]:
    settings = {"learning_starts": 16, "batch_size": 8, "replay_ratio": 2.0, "target_interval": 3} | settings
    return made(Pictures, 400, T=4, B=1, seed=seed, model_image_hidden=(16,), **settings)


def iterate(sampler: Any, algo: Any) -> tuple[bool, int]:
    """One batch; whether an update had prefetched before it, and how many were made of it."""
    algo.prefetch()
    had_prefetched, before = algo._next is not None, algo.progress.updates
    algo.receive(sampler.collect())
    while algo.updates_due():
        algo.update()
    return had_prefetched, algo.progress.updates - before


@pytest.mark.usefixtures("claimed_threads")
def test_nothing_is_prefetched_of_updates_that_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_import_compiler", lambda: None)
    monkeypatch.setattr(compiled, "_compile", lambda graph, examples: graph)
    sampler, _, algo = learner()
    with compiled.compiling(compiled.CompileChoice(True)):
        found = [iterate(sampler, algo)[0] for _ in range(12)]
    assert algo.progress.updates
    assert not any(found)
    assert any(iterate(sampler, algo)[0] for _ in range(3)), "uncompiled it is"


@pytest.mark.usefixtures("claimed_threads")
@pytest.mark.parametrize("options", [{}, RAINBOW], ids=["plain", "rainbow"])
def test_what_has_prefetched_is_put_back_where_nothing_becomes_due_or_a_state_is_saved(options: dict[str, Any]) -> None:
    sampler, _, algo = learner(**options)
    iterations = [iterate(sampler, algo) for _ in range(20)]
    assert (True, 1) in iterations
    assert (True, 0) in iterations, "rows that begin an episode are not learned from, so some batches owe no update"
    assert algo._next is None
    before = copied(algo.state_dict())
    algo.prefetch()
    assert algo._next is not None
    check_equal(algo.state_dict(), before)
    assert algo._next is None


def check_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            check_equal(a, b)
    elif isinstance(one, ChunkedArray):
        assert one.counts == other.counts
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("claimed_threads")
@pytest.mark.parametrize(
    ("n", "options"),
    [(10, {}), (9, RAINBOW), (10, RAINBOW), (11, RAINBOW), (10, IMPLICIT)],
    ids=["plain", *["rainbow"] * 3, "implicit"],
)
def test_a_resumed_algorithm_goes_on_exactly(n: int, options: dict[str, Any]) -> None:
    sampler, agent, algo = learner(**options)
    for _ in range(n):
        iterate(sampler, algo)
    _, other_agent, other = learner(seed=9, **options)
    other.load_state_dict(copied(algo.state_dict()))
    other_agent.load_state_dict(copied(dict(agent.state_dict())))
    for _ in range(6):
        algo.prefetch()
        other.prefetch()
        samples = sampler.collect()
        for each in (algo, other):
            each.receive(samples)
            while each.updates_due():
                each.update()
    for one, two in zip(agent.state_dict().values(), other_agent.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("claimed_threads")
def test_the_loss_is_that_of_the_batch_by_the_networks_as_they_are() -> None:
    sampler, _, algo = learner()
    for _ in range(10):
        iterate(sampler, algo)
    algo.prefetch()
    prefetched = algo._next
    samples = sampler.collect()
    loss, error, q = prefetched.evaluated.result()
    torch.testing.assert_close((loss, error, q), algo.algo.evaluate(prefetched.batch))
    weighted = (prefetched.batch.weight * algo.algo.evaluate(prefetched.batch)[0]).mean()
    weighted.backward()
    gradients = [parameter.grad.clone() for parameter in algo.algo.agent.model.parameters()]
    algo.algo.agent.zero_grad()
    algo.receive(samples)
    assert algo.updates_due() == 1
    with kept_gradients():
        assert algo.update()["loss"] == loss.mean(), "nothing else was computed"
    torch.testing.assert_close([parameter.grad for parameter in algo.algo.agent.model.parameters()], gradients)
    algo.algo.agent.zero_grad()
    algo.prefetch()
    prefetched = algo._next
    drawn = algo.replay.sample(8).index
    algo.updates_due()  # none is, so the draw is undone
    np.testing.assert_array_equal(algo.replay.sample(8).index, prefetched.batch.index)
    assert (drawn != prefetched.batch.index).any()


def test_a_network_that_learning_moves_is_not_shared_between_threads() -> None:
    images = {"model_encoder": "impala", "model_channels": (4,)}
    assert isinstance(learner(**images)[2], Prefetch)
    assert not isinstance(learner(**images, model_spectral_norm=True)[2], Prefetch)


@pytest.mark.usefixtures("claimed_threads")
@pytest.mark.parametrize("why", ["one thread", "vectors", "several environments", "nothing learned yet"])
def test_nothing_is_prefetched(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"learning_starts": 16, "batch_size": 8, "replay_ratio": 2.0}
    sampler, _, algo = made(
        "CartPole-v1" if why == "vectors" else Pictures,
        400,
        T=4,
        B=2 if why == "several environments" else 1,
        **settings,
    )
    if why == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for _ in range(1 if why == "nothing learned yet" else 10):
        algo.receive(sampler.collect())
        while algo.updates_due():
            algo.update()
    algo.prefetch()
    if why in ("one thread", "nothing learned yet"):
        assert algo._next is None
    else:
        assert not isinstance(algo, Prefetch)


@pytest.mark.usefixtures("two_threads")
def test_the_thread_has_one_of_torchs_threads_and_whoever_starts_it_keeps_theirs() -> None:
    assert OneThread().start(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 2


def test_the_thread_computes_in_the_precision_of_who_starts_it_and_passes_errors_on() -> None:
    thread = OneThread()
    with learning_in("bf16"):
        assert thread.start(in_bf16).result()
    assert not thread.start(in_bf16).result()
    with pytest.raises(ZeroDivisionError):
        thread.start(lambda: 1 / 0).result()
    assert thread.start(abs, -1).result() == 1
