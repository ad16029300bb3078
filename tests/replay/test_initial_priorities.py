"""First priorities of new rows by the Q-values of acting, against errors computed reward by reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.agents.q import QInfo
from rlframe.core.spaces import ACTION_MASK
from rlframe.core.types import Samples
from rlframe.replay import NStep, ReplayBuffer
from rlframe.replay.n_step import InitialPriorities
from rlframe.replay.select import PRIORITY_EPSILON
from tests.replay.buffers import replay_for
from tests.replay.history import History


def q_at(time: int, env: int) -> np.ndarray:
    """Q of the 1000 actions, as acting found them at a row."""
    return np.random.default_rng([time, env]).normal(size=1000).astype(np.float32)


def acted(history: History, T: int) -> Samples:
    """The next batch, with what acting found."""
    start = len(history.rows) - 1
    batch = history.batch(T)
    q = np.stack([[q_at(t, b) for b in range(history.B)] for t in range(start, start + T)])
    return replace(batch, info=QInfo(torch.from_numpy(q)))


def error(history: History, time: int, env: int, n: int) -> float:
    """|G + γ^k max Q(row t+k, .) - Q(row t, a)|."""
    return_, bootstrap, row = history.transition(time, env, n, 0.5)
    best = q_at(row["time"], env).max() if bootstrap else 0.0
    return float(abs(return_ + bootstrap * best - q_at(time, env)[history.at(time, env)["action"]]))


def priorities(replay: ReplayBuffer[Any], index: np.ndarray) -> np.ndarray:
    leaves: np.ndarray = replay.selector._tree.leaves  # type: ignore[attr-defined]
    return leaves[index % replay._readers[0].candidates.n_slots]


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_every_new_row_has_the_td_error_of_acting(n: int, T: int) -> None:
    history, seen = History(2, ends=0.15), 0
    replay = replay_for(history, NStep(0.5, n, td_priorities=True), T=T, L=20, alpha=1.0)
    for _ in range(60 // T):  # three times around
        replay.append(acted(history, T))
        index = replay.newest()
        expected = [error(history, int(i) // 2, int(i) % 2, n) + PRIORITY_EPSILON for i in index]
        np.testing.assert_allclose(priorities(replay, index), expected, rtol=1e-5)
        assert all(i // 2 + n < len(history.rows) - 1 for i in index), "Q of the bootstrap is known"
        seen += len(index)
    assert seen > 60


def test_a_row_whose_bootstrap_was_not_acted_on_keeps_the_highest_priority() -> None:
    history, other = History(1, ends=0.0), History(1, ends=0.0, seed=1)
    replay = replay_for(history, NStep(0.5, 1, td_priorities=True), T=4, L=20, alpha=1.0)
    replay.append(acted(history, 4))
    replay.append(acted(other, 4))  # it does not continue: row 3 is truncated where nothing acted
    assert replay.newest().tolist() == [3, 5, 6, 7]  # 4 is the last observation
    highest = max(*(error(history, t, 0, 1) for t in range(3)), 1.0)
    assert priorities(replay, np.array([3]))[0] == pytest.approx(highest, rel=1e-5)
    np.testing.assert_allclose(
        priorities(replay, np.array([5, 6, 7])), [error(other, t, 0, 1) for t in range(3)], atol=1e-4
    )


def test_the_best_action_is_an_allowed_one() -> None:
    q = torch.tensor([[[1.0, 9.0]], [[2.0, 8.0]], [[3.0, 7.0]]])  # [T, B, A]
    mask = torch.tensor([[[1, 1]], [[1, 0]], [[0, 0]], [[1, 1]]])  # the last observation of an episode may forbid all
    history = History(1, ends=0.0)
    batch = replace(history.batch(3), info=QInfo(q), action=torch.zeros(3, 1, dtype=torch.int64))
    batch = replace(batch, inputs=replace(batch.inputs, observation={ACTION_MASK: mask}))
    errors = InitialPriorities(8, 1)
    errors.append(batch, 0)
    zero = np.zeros(2, np.float32)
    found = errors.of(np.array([0, 1]), np.array([0, 0]), 1, zero, zero + 1)
    assert found.tolist() == [abs(2.0 - 1.0), abs(7.0 - 2.0)]


def test_the_bootstrap_of_a_row_that_nothing_acted_on_yet_is_not_known() -> None:
    errors, zero = InitialPriorities(4, 1), np.zeros(1, np.float32)
    for time in (0, 4):  # the newest row has the place of the first
        batch = replace(History(1, ends=0.0).batch(4), info=QInfo(torch.ones(4, 1, 1000)))
        errors.append(batch, time)
    assert np.isnan(errors.of(np.array([6]), np.array([0]), 2, zero, zero + 1))


def test_a_restored_replay_gives_the_same_priorities() -> None:
    history = History(2, ends=0.1)
    replay, other = (replay_for(history, NStep(0.5, 3, td_priorities=True), T=4, L=20, alpha=0.7) for _ in range(2))
    for _ in range(3):
        replay.append(acted(history, 4))
    other.load_state_dict(replay.state_dict())
    batch = acted(history, 4)
    for each in (replay, other):
        each.append(batch)
    slots = np.arange(40)
    np.testing.assert_array_equal(priorities(replay, slots), priorities(other, slots))
