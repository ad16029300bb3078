"""Transitions of one environment whose observation counts its rows, with rewards 1, 2, 4, ... and γ = 0.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from rlframe.core.struct import leaves
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.replay import InMemory, NStep, OnDevice, ReplayBuffer, Transitions, make_replay
from rlframe.replay.arrays import DeviceMemory, HostMemory
from rlframe.replay.select import Candidates
from tests.replay.buffers import ACTIONS, replay_for
from tests.replay.history import History

COUNTER = Box(0, np.inf, (1,), np.float32)


def batch(
    n: int,
    terminated: tuple[int, ...] = (),
    truncated: tuple[int, ...] = (),
    life: tuple[int, ...] = (),
    start: int = 0,
) -> Samples:
    """n rows of one environment starting at `start`; episodes end at the given rows, whose next row is not valid."""
    T = torch.arange(start, start + n + 1)
    ends = torch.isin(T, torch.tensor((*terminated, *truncated)))[:-1, None]
    valid = torch.cat([torch.ones(1, 1, dtype=torch.bool), ~ends[:-1]])
    starts = (T[:, None] == 0) | torch.cat([torch.zeros(1, 1, dtype=torch.bool), ~valid])
    return Samples(
        inputs=AgentInputs(T[:, None, None].float(), T[:, None] - 1, 2.0 ** (T[:, None] - 1), starts),
        action=T[:-1, None],
        reward=2.0 ** T[:-1, None],
        terminated=torch.isin(T, torch.tensor((*terminated, *life)))[:-1, None],
        truncated=torch.isin(T, torch.tensor(truncated))[:-1, None],
        valid=valid,
        info=None,  # type: ignore[arg-type]  # not read by replay
        state=(),
        final_state=(),
        n_env_steps=int(valid.sum()),
        start=start,
    )


def replay(n: int = 1, kind: Any = InMemory, **options: Any) -> ReplayBuffer[Transitions]:
    return make_replay(kind(size=32), COUNTER, ACTIONS, BatchSpec(6, 1), NStep(0.5, n), **options)


def drawn(buffer: ReplayBuffer[Transitions]) -> dict[int, tuple[float, float, float]]:
    """All rows that can be sampled: return, factor and the row to bootstrap from."""
    found = buffer.sample(400)
    rows = found.inputs.observation[:, 0].int().tolist()
    return {
        row: (float(found.return_[i]), float(found.bootstrap[i]), float(found.next_inputs.observation[i, 0]))
        for i, row in enumerate(rows)
    }


@pytest.mark.parametrize(
    ("n", "ends", "expected"),
    [
        (1, {}, {t: (2.0**t, 0.5, t + 1) for t in range(6)}),
        (3, {}, {t: (3 * 2.0**t, 0.125, t + 3) for t in range(4)}),  # r[t] (1 + 0.5 * 2 + 0.25 * 4); the newest wait
        (3, {"terminated": (2,)}, {0: (3.0, 0.0, 3.0), 1: (4.0, 0.0, 3.0), 2: (4.0, 0.0, 3.0)}),  # 3: the last one seen
        (3, {"truncated": (2,)}, {0: (3.0, 0.125, 3.0), 1: (4.0, 0.25, 3.0), 2: (4.0, 0.5, 3.0)}),
        (3, {"life": (1,)}, {0: (2.0, 0.0), 1: (2.0, 0.0), 2: (12.0, 0.125, 5.0), 3: (24.0, 0.125, 6.0)}),
        (1, {"truncated": (5,)}, {t: (2.0**t, 0.5, t + 1) for t in range(6)}),  # needs no row of the next batch
    ],
    ids=str,
)
def test_ends_stop_the_sum_and_terminations_the_bootstrap(n: int, ends: Any, expected: dict[int, Any]) -> None:
    buffer = replay(n)
    buffer.append(batch(6, **ends))
    found = drawn(buffer)
    assert {row: found[row][: len(numbers)] for row, numbers in expected.items()} == expected
    assert len(found) == buffer.n_choices == len(expected)


def test_rows_have_the_types_of_their_samples_and_weigh_the_same() -> None:
    buffer, samples = replay(previous=True), batch(6)
    buffer.append(samples)
    found = buffer.sample(7)
    inputs = samples.inputs
    for one, other in (
        *zip(leaves(found.inputs), leaves(inputs), strict=True),
        *zip(leaves(found.next_inputs), leaves(inputs), strict=True),
        (found.action, samples.action),
        (found.return_, samples.reward),
        (found.bootstrap, samples.reward),
    ):
        assert (one.shape, one.dtype) == ((7, *other.shape[2:]), other.dtype)
    assert (found.weight.dtype, found.weight.tolist()) == (torch.float32, [1.0] * 7)


def test_a_worker_that_dies_between_batches_truncates_its_episode() -> None:
    buffer = replay(2)
    buffer.append(batch(6))
    after = replace(batch(6, start=6), n_env_steps=5)
    after.valid[0], after.inputs.first[1] = False, True  # row 6 ends an episode that nothing ended
    buffer.append(after)
    found = drawn(buffer)
    assert found[5] == (32.0, 0.5, 6.0)
    assert found[4] == (32.0, 0.25, 6.0)
    assert 6 not in found


@pytest.mark.parametrize("kind", [InMemory, OnDevice])
@pytest.mark.parametrize("row", [0, 1])
def test_so_it_does_while_its_environment_waits(row: int, kind: Any) -> None:
    buffer = replay(2, kind)
    waiting, after = replace(batch(6), n_env_steps=4), replace(batch(6, start=6), n_env_steps=5 - row)
    waiting.valid[4:], after.valid[: row + 1], after.inputs.first[row + 1] = False, False, True
    buffer.append(waiting)
    buffer.append(after)
    found = drawn(buffer)
    assert found[3] == (8.0, 0.5, 4.0)
    assert found[2] == (8.0, 0.25, 4.0)


def test_a_batch_that_does_not_continue_the_last_one_truncates_its_episodes() -> None:
    buffer = replay(2, previous=True)
    buffer.append(batch(6))
    buffer.append(batch(6, start=20))
    found = drawn(buffer)
    assert found[5] == (32.0, 0.5, 6.0)
    assert 6 not in found
    assert found[20] == (2.0**20 * 2, 0.25, 22.0)
    rows = buffer.sample(200).inputs
    at_start = rows.observation[:, 0] == 20
    assert set(rows.prev_action[at_start].tolist()) == {19}
    assert buffer.n_rows == 12


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [InMemory, OnDevice])
def test_an_episode_that_waits_at_such_a_gap_is_truncated_where_it_acted_last(
    n: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframe.replay.storage._ROWS_AT_ONCE", 1)
    buffer = replay(n, kind)
    waiting = replace(batch(6), n_env_steps=4)
    waiting.valid[4:] = False
    buffer.append(waiting)
    buffer.append(batch(6, start=20))
    assert drawn(buffer)[3] == (8.0, 0.5, 4.0)


def test_every_valid_row_is_drawn_equally_often() -> None:
    history = History(3, ends=0.1)
    buffer = replay_for(history, T=5, L=21)
    for _ in range(9):
        buffer.append(history.batch(5))
    n = 400 * buffer.n_choices
    counts = np.unique(buffer.sample(n).index, return_counts=True)[1]
    assert len(counts) == buffer.n_choices == buffer.n_rows
    assert buffer.n_choices < 20 * 3  # some ended
    np.testing.assert_allclose(counts, 400, atol=5 * 20)  # five standard deviations


@pytest.mark.parametrize("memory", [HostMemory, DeviceMemory])
def test_the_few_eligible_rows_of_a_wrapped_window_are_drawn_equally_often(memory: Any) -> None:
    candidates, rng = Candidates(1000, memory(torch.device("cpu"))), np.random.default_rng(0)
    eligible = rng.random(1500) < 0.02
    candidates.advance(0, 900, eligible[:900])
    candidates.draw(rng, 1)
    candidates.advance(500, 1500, eligible[900:])
    numbers, counts = np.unique(np.asarray(candidates.draw(rng, 20_000)), return_counts=True)
    assert numbers.tolist() == (500 + np.flatnonzero(eligible[500:])).tolist()
    mean = 20_000 / len(numbers)
    np.testing.assert_allclose(counts, mean, atol=5 * mean**0.5)


def test_newest_returns_the_rows_that_became_available() -> None:
    buffer = replay(3)
    buffer.append(batch(6))
    assert buffer.newest().tolist() == [0, 1, 2, 3]
    buffer.append(batch(6, start=6, truncated=(8,)))
    assert buffer.newest().tolist() == [4, 5, 6, 7, 8]


def test_sampling_an_empty_replay_raises_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be sampled yet"):
        replay().sample(1)
    waiting = make_replay(InMemory(size=32), COUNTER, ACTIONS, BatchSpec(2, 1), NStep(0.5, 3))
    waiting.append(batch(2))
    with pytest.raises(ValueError, match="2 valid rows"):
        waiting.sample(1)


def test_batches_of_another_width_raise_an_error() -> None:
    buffer = replay_for(History(2))
    with pytest.raises(ValueError, match=r"\[4, 3\]"):
        buffer.append(History(3).batch(4))


def test_a_discount_or_n_out_of_range_raises_an_error() -> None:
    with pytest.raises(ValueError, match="n=0"):
        NStep(0.99, 0)
    with pytest.raises(ValueError, match=r"discount=1\.1"):
        NStep(1.1)
