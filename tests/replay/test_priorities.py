"""Prioritized replay: exact sums of the tree, frequencies and weights, ignored stale rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.replay import NStep, ReplayBuffer
from rlframe.replay.select import WIDTH, Prioritized, SumTree
from tests.replay.buffers import replay_for
from tests.replay.history import History


def filled(n_batches: int = 2, alpha: float = 1.0, L: int = 12, **options: Any) -> tuple[ReplayBuffer[Any], History]:
    """Rows of one environment whose episodes never end."""
    history = History(1, ends=0.0)
    replay = replay_for(history, T=4, L=L, alpha=alpha, **options)
    for _ in range(n_batches):
        replay.append(history.batch(4))
    return replay, history


class TestSumTree:
    @pytest.mark.parametrize("n", [1, 3, WIDTH, WIDTH + 1, WIDTH**2 + 1, WIDTH**2 * 1_025])  # the last on four levels
    def test_every_leaf_is_found_in_its_share(self, n: int) -> None:
        tree = SumTree(n)
        index = np.unique(np.linspace(0, n - 1, 50).astype(int))
        tree.set(index, np.arange(1, len(index) + 1))
        ends = np.arange(1, len(index) + 1).cumsum()
        assert tree.total == ends[-1]
        np.testing.assert_array_equal(tree.find((ends - 0.5) / ends[-1]), index)
        np.testing.assert_array_equal(tree.find((ends - 1e-6) / ends[-1]), index)

    @pytest.mark.parametrize("n", [5_000, WIDTH * 1_025])
    def test_sums_stay_exact(self, n: int) -> None:
        tree, rng = SumTree(n), np.random.default_rng(0)
        for _ in range(300):
            tree.set(rng.integers(0, n, 200), rng.random(200) * 10.0 ** rng.integers(-8, 8, 200))
        for level, parent in zip(tree._levels, tree._parents, strict=True):
            np.testing.assert_array_equal(parent[: len(level)], level.sum(axis=1))
        tree.set(np.arange(n), 0.0)
        assert tree.total == 0.0

    def test_zeros_are_never_found(self) -> None:
        tree = SumTree(300)
        tree.set(np.array([7, 64, 200]), np.array([0.1, 0.2, 0.7]))
        assert set(tree.find(np.r_[np.linspace(0, 1, 1_001), 1.001]).tolist()) == {7, 64, 200}

    def test_the_last_of_repeated_indices_counts(self) -> None:
        tree = SumTree(100)
        tree.set(np.array([3, 3]), np.array([5.0, 2.0]))
        assert tree.total == 2.0

    def test_all_zeros_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match="every priority is 0"):
            SumTree(100).find(np.zeros(1))


def test_rows_are_drawn_in_proportion_to_the_power_of_their_priorities() -> None:
    replay, _ = filled(alpha=0.5)
    replay.update_priorities(np.arange(8), np.array([0.0, 1, 4, 9, 16, 0, 0, 0]))
    counts = np.bincount(replay.sample(10_000).index, minlength=8)
    np.testing.assert_allclose(counts, 1_000 * np.array([0, 1, 2, 3, 4, 0, 0, 0]), atol=1)  # stratified


def test_samples_are_stratified() -> None:
    replay, _ = filled()
    assert sorted(replay.sample(8).index.tolist()) == list(range(8))


def test_weights_follow_schaul_et_al() -> None:
    replay, _ = filled()
    priority = np.array([1.0, 2, 4, 8, 1, 1, 1, 2])  # of a total of 20
    replay.update_priorities(np.arange(8), priority)
    drawn = replay.sample(40, beta=0.5)
    weight = (8 * priority[drawn.index] / 20) ** -0.5
    np.testing.assert_allclose(drawn.weight, weight / weight.max(), rtol=1e-6)
    assert replay.sample(40, beta=0.0).weight.tolist() == [1.0] * 40


def test_new_rows_have_the_highest_priority_so_far() -> None:
    replay, history = filled(1)
    replay.update_priorities(np.arange(4), np.array([1.0, 6, 2, 1]))
    replay.update_priorities(np.array([1]), np.array([2.0]))
    replay.append(history.batch(4))
    np.testing.assert_array_equal(replay.newest(), [4, 5, 6, 7])
    drawn = np.bincount(replay.sample(3_000).index, minlength=8)
    np.testing.assert_allclose(drawn, 100 * np.array([1, 2, 2, 1, 6, 6, 6, 6]), atol=1)


def test_priorities_of_overwritten_rows_are_ignored() -> None:
    replay, _ = filled(4)  # 16 rows; 5 to 15 are held
    total = replay.selector._tree.total  # type: ignore[attr-defined]
    replay.update_priorities(np.arange(5), np.full(5, 100.0))
    assert replay.selector._tree.total == total == 11  # type: ignore[attr-defined]
    replay.update_priorities(np.array([4, 5]), np.array([100.0, 3.0]))
    assert replay.selector._tree.total == 13  # type: ignore[attr-defined]
    assert replay.sample(400).index.min() == 5


def test_overwritten_rows_leave_the_tree() -> None:
    replay, history = filled(2)
    replay.update_priorities(np.arange(8), np.full(8, 50.0))
    for _ in range(3):
        replay.append(history.batch(4))
        assert replay.n_choices == min(11, len(history.rows) - 1)
        assert replay.selector._tree.total == 50 * replay.n_choices  # type: ignore[attr-defined]


def test_invalid_and_incomplete_rows_have_no_priority() -> None:
    history = History(2, ends=0.2)
    replay = replay_for(history, NStep(0.5, 3), T=4, L=15, alpha=1.0)
    for _ in range(12):
        replay.append(history.batch(4))
        assert replay.selector._tree.total == replay.n_choices  # type: ignore[attr-defined]


def test_unique_draws_are_those_of_drawing_one_by_one_without_replacement() -> None:
    replay, _ = filled(unique=2)
    p = np.array([0.5, 0.3, 0.1, 0.1, 0, 0, 0, 0])
    replay.update_priorities(np.arange(8), 20 * p)
    total = replay.selector._tree.total  # type: ignore[attr-defined]
    counts = np.zeros((8, 8))
    for _ in range(4_000):
        first, second = replay.sample(2).index
        counts[first, second] += 1
    expected = np.array([[a * b / (1 - a) if i != j else 0 for j, b in enumerate(p)] for i, a in enumerate(p)])
    np.testing.assert_allclose(counts / 4_000, expected, atol=0.03)
    assert counts.diagonal().sum() == 0
    assert replay.selector._tree.total == total  # type: ignore[attr-defined]


def test_a_unique_batch_of_all_rows_is_all_rows_and_keeps_the_weights_of_single_draws() -> None:
    replay, _ = filled(unique=8, L=24)
    priority = np.array([1e-6, 2, 4, 8, 1, 1, 1, 1e6])  # one has nearly all of the total
    replay.update_priorities(np.arange(8), priority)
    leaves = replay.selector._tree.leaves.copy()  # type: ignore[attr-defined]
    drawn = replay.sample(8, beta=0.5)
    assert sorted(drawn.index.tolist()) == list(range(8))
    np.testing.assert_allclose(drawn.weight, (priority[drawn.index] / 1e-6) ** -0.5, rtol=1e-6)
    np.testing.assert_array_equal(replay.selector._tree.leaves, leaves)  # type: ignore[attr-defined]


def test_a_unique_batch_waits_until_there_are_as_many_rows() -> None:
    replay, history = filled(1, unique=5)
    assert (replay.n_choices, replay.n_rows) == (4, 0)
    with pytest.raises(ValueError, match=r"a batch of 5 rows without repetition .* there are 4; use"):
        replay.sample(5)
    replay.append(history.batch(4))
    assert replay.n_rows == 8
    assert len(set(replay.sample(5).index.tolist())) == 5


def test_unique_rows_are_drawn_over_all_streams_and_alike_after_a_restore() -> None:
    history = History(1, ends=0.0)
    one, other = (replay_for(history, T=4, L=24, alpha=0.6, unique=7, n_streams=2) for _ in range(2))
    for stream in (3, 5):
        one.append(replace(history.batch(4), stream=stream))
    one.update_priorities(np.arange(8), 10.0 ** np.arange(8))
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        drawn = one.sample(7).index
        assert len(set(drawn.tolist())) == 7
        np.testing.assert_array_equal(drawn, other.sample(7).index)


def test_new_rows_have_the_initial_priority_that_is_given() -> None:
    replay, history = filled(1, alpha=0.5, initial_priority=4.0)
    replay.update_priorities(np.arange(4), np.array([1.0, 100, 1, 1]))
    replay.append(history.batch(4))
    assert replay.selector._tree.leaves[:8].tolist() == [1, 10, 1, 1, 2, 2, 2, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_an_invalid_priority_raises_an_error(wrong: float, alpha: float) -> None:
    replay, _ = filled(alpha=alpha)
    with pytest.raises(ValueError, match="1 of 2 priorities"):
        replay.update_priorities(np.array([0, 1]), np.array([1.0, wrong]))


@pytest.mark.parametrize("largest", [np.finfo(np.float32).max, np.finfo(np.float64).max])
def test_priorities_as_large_as_a_float_are_drawn_almost_always(largest: Any) -> None:
    replay, _ = filled(alpha=1.0)
    replay.update_priorities(np.array([2, 5]), np.array([largest, largest]))
    drawn = replay.sample(50, beta=1.0)
    assert set(drawn.index.tolist()) == {2, 5}
    assert drawn.weight.tolist() == [1.0] * 50


def test_priorities_may_be_tensors_and_need_the_shape_of_the_index() -> None:
    replay, _ = filled()
    replay.update_priorities(np.array([0, 1]), torch.tensor([3.0, 5.0]))
    assert replay.selector._tree.total == 6 + 8  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="priorities"):
        replay.update_priorities(np.array([0, 1]), torch.tensor([3.0]))


def test_alpha_0_is_not_prioritized() -> None:
    with pytest.raises(ValueError, match="alpha=0"):
        Prioritized(np.random.default_rng(0), 0.0, 8)


def test_the_parts_of_learners_are_one_draw_over_all_streams() -> None:
    history = History(1, ends=0.0)
    replay = replay_for(history, T=4, L=24, alpha=1.0, unique=6, n_streams=2)
    for stream in (3, 5, 5):
        replay.append(replace(history.batch(4), stream=stream))
    index = np.unique(np.concatenate([replay.sample(6).index for _ in range(40)]))
    replay.update_priorities(index, priority := np.geomspace(0.1, 10, len(index)))
    for _ in range(5):
        parts = replay.sample_parts(6, 2, beta=1.0)
        assert [len(part.index) for part in parts] == [len(part.weight) for part in parts] == [3, 3]
        drawn = np.concatenate([part.index for part in parts])
        weight = np.concatenate([part.weight for part in parts])
        assert len(set(drawn.tolist())) == 6
        p = priority[np.searchsorted(index, drawn)]
        np.testing.assert_allclose(weight, p.min() / p, rtol=1e-5)
