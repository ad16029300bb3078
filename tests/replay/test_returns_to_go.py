"""Transitions to the end of the episode equal the history, and no row of an episode that is open is sampled."""

from __future__ import annotations

from typing import Any

import pytest

from rlframe.core.types import BatchSpec
from rlframe.replay import InMemory, ReplayBuffer, ReturnsToGo, Transitions, make_replay
from tests.replay.buffers import ACTIONS, replay_for
from tests.replay.history import History
from tests.replay.test_against_history import check_inputs
from tests.replay.test_transitions import COUNTER, batch, drawn

TO_THE_END = 10**9


def check(found: Transitions, history: History, offset: int, previous: bool) -> None:
    for i, number in enumerate(found.index):
        time, env = int(number) // history.B - offset, int(number) % history.B
        row = history.at(time, env)
        return_, bootstrap, after = history.transition(time, env, TO_THE_END, 0.5)
        check_inputs(found.inputs, i, history, row, previous)
        assert found.action[i] == row["action"]
        assert float(found.return_[i]) == pytest.approx(return_, rel=1e-5)
        assert float(found.bootstrap[i]) == pytest.approx(bootstrap, rel=1e-5)
        check_inputs(found.next_inputs, i, history, after, previous)


def can_be_drawn(history: History, oldest: int) -> set[tuple[int, int]]:
    """The rows (time, env) whose episode has ended, before the first row of one that has not."""
    n, B = len(history.rows) - 1, history.B
    opened = [n] * B
    for b in range(B):
        for t in reversed(range(n)):
            row = history.at(t, b)
            if row["valid"] and (row["terminated"] or row["truncated"]):
                break
            opened[b] = t if row["valid"] else opened[b]
    return {(t, b) for t in range(oldest, min(opened)) for b in range(B) if history.at(t, b)["valid"]}


@pytest.mark.parametrize(
    ("kind", "config", "previous", "T"),
    [
        ("vector", {}, False, 1),
        ("both", {}, True, 4),
        pytest.param("both", {"kind": "device"}, True, 1, marks=pytest.mark.slow),
    ],
)
def test_transitions_to_the_end_equal_the_history(kind: str, config: dict[str, Any], previous: bool, T: int) -> None:
    history = History(3, kind, seed=T)
    replay = replay_for(history, ReturnsToGo(0.5), T, 31, config, previous=previous)
    offset, n_checked = replay._storages[0].rows_before, 0
    for _ in range(90 // T):
        replay.append(history.batch(T))
        ring, candidates = replay._storages[0].ring, replay._readers[0].candidates
        allowed = can_be_drawn(history, max(0, ring.oldest))
        slots = range(candidates.lo, candidates.hi)
        eligible = {(i // 3 - offset, i % 3) for i in slots if candidates.eligible[i % candidates.n_slots]}
        assert eligible == {(t, b) for t, b in allowed if t + offset >= ring.oldest + offset}
        if allowed:
            check(replay.sample(8), history, offset, previous)
            n_checked += 1
    assert n_checked > 10


def made(L: int = 32) -> ReplayBuffer[Transitions]:
    return make_replay(InMemory(size=L), COUNTER, ACTIONS, BatchSpec(6, 1), ReturnsToGo(0.5))


def test_an_open_episode_waits_for_its_end_in_a_later_batch() -> None:
    buffer = made()
    buffer.append(batch(6, terminated=(1,)))
    # 1 + 2 / 2, then 2, and nothing of what follows; row 2 is the last observation
    assert drawn(buffer) == {0: (2.0, 0.0, 2.0), 1: (2.0, 0.0, 2.0)}
    buffer.append(batch(6, truncated=(7,), start=6))
    found = drawn(buffer)
    assert found[3] == (5 * 8.0, 0.5**5, 8.0), "rewards 8, 16, ..., 128, each discounted by a half"
    assert set(found) == {0, 1, 3, 4, 5, 6, 7}


def test_without_an_end_there_is_nothing_to_draw_and_old_rows_are_forgotten() -> None:
    buffer = made()
    for start in range(0, 60, 6):
        buffer.append(batch(6, start=start))
        assert (buffer.n_choices, buffer.n_rows) == (0, 0)
    buffer.append(batch(6, terminated=(62,), start=60))
    assert max(drawn(buffer)) == 62


def test_a_lost_batch_truncates_the_episode_that_was_open() -> None:
    buffer = made()
    buffer.append(batch(6))
    buffer.append(batch(6, start=20))
    assert drawn(buffer)[5] == (32.0, 0.5, 6.0)
    assert set(drawn(buffer)) == set(range(6))


def test_a_discount_above_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"discount=1\.1 must be from 0 to 1"):
        ReturnsToGo(1.1)
