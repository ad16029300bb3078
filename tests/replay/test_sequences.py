"""Sequences of 6 rows, from batches of 4 rows of two environments whose episodes never end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.core.types import BatchSpec
from rlframe.replay import FixedSequence, OfDatasets, ReplayBuffer, Sequences, make_replay
from tests.data.episodes import CARTPOLE, episodes, stored
from tests.replay.buffers import replay_for
from tests.replay.history import History


def filled(n_batches: int, **options: Any) -> tuple[ReplayBuffer[Sequences], History]:
    history = History(2, ends=0.0)
    replay = replay_for(history, FixedSequence(6), T=4, L=20, previous=True, **options)
    for _ in range(n_batches):
        replay.append(history.batch(4))
    return replay, history


def starts(replay: ReplayBuffer[Sequences]) -> set[int]:
    """The times at which sequences start, counted from the history's first row, which is the ring's second."""
    return {int(index) // 2 - 1 for index in replay.sample(100).index}


def test_a_sequence_is_sampled_once_all_its_rows_are_stored() -> None:
    replay, history = filled(1)
    assert replay.n_choices == 0
    with pytest.raises(ValueError, match="cannot be sampled yet"):
        replay.sample(1)
    replay.append(history.batch(4))
    assert starts(replay) == {0}
    assert replay.newest().tolist() == [2, 3]
    replay.append(history.batch(4))
    assert starts(replay) == {0, 4}
    assert replay.newest().tolist() == [10, 11]


def test_overwritten_sequences_are_not_sampled() -> None:
    replay, _ = filled(7)  # 28 rows; 10 to 28 are held, and of 10 what was before is not
    assert starts(replay) == {12, 16, 20}
    assert replay.n_choices == 6


def test_no_sequence_crosses_a_gap_between_batches() -> None:
    replay, _ = filled(3)
    other = History(2, ends=0.0, seed=1)
    for _ in range(2):
        replay.append(other.batch(4))
    times = np.unique(replay.sample(200).index // 2).tolist()
    assert times == [5, 15]  # of the batch at 9 two rows lack; 13 is its end, and 14 for what was before 15


@pytest.mark.parametrize("what", ["gap", "worker"])
def test_episodes_that_end_between_batches_are_truncated(what: str) -> None:
    history = History(2, ends=0.0)
    replay = replay_for(history, FixedSequence(4), T=4, L=20)
    replay.append(history.batch(4))
    if what == "gap":
        history = History(2, ends=0.0, seed=1)
    batch = history.batch(4)
    if what == "worker":
        batch = replace(batch, n_env_steps=7)
        batch.valid[0, 0], batch.inputs.first[1, 0] = False, True  # it died, and the row after begins an episode
    replay.append(batch)
    found = replay.sample(50)
    ended = found.truncated[:, torch.from_numpy(found.index < 2)]
    assert not ended[:3].any()
    expected = found.index[found.index < 2] % 2 < (2 if what == "gap" else 1)
    np.testing.assert_array_equal(ended[3], expected)


def test_priorities_belong_to_sequences() -> None:
    replay, history = filled(4, alpha=1.0)  # begin at 0, 4, 8
    replay.update_priorities(np.array([2, 3, 10, 11, 18, 19]), torch.tensor([0.0, 0, 1, 0, 3, 0]))
    counts = np.bincount(replay.sample(400, beta=1.0).index)
    assert (counts[10], counts[18]) == (100, 300)
    weight = {int(i): float(w) for i, w in zip(*_index_and_weight(replay), strict=True)}
    assert weight == {10: 1.0, 18: pytest.approx(1 / 3)}
    for _ in range(3):
        replay.append(history.batch(4))
    total = replay.selector._tree.total  # type: ignore[attr-defined]
    replay.update_priorities(np.array([2, 3, 10, 4]), np.full(4, 100.0))  # overwritten; and 4 is no beginning
    assert replay.selector._tree.total == total  # type: ignore[attr-defined]


def _index_and_weight(replay: ReplayBuffer[Sequences]) -> tuple[np.ndarray, torch.Tensor]:
    found = replay.sample(40, beta=1.0)
    return found.index, found.weight


def test_batches_of_another_length_raise_an_error() -> None:
    replay, history = filled(1)
    with pytest.raises(ValueError, match="3 time steps"):
        replay.append(history.batch(3))


def test_length_0_raises_an_error() -> None:
    with pytest.raises(ValueError, match="length=0"):
        FixedSequence(0)


def spaced(interval: int, n_batches: int, **options: Any) -> tuple[ReplayBuffer[Sequences], History]:
    history = History(2, ends=0.0)
    replay = replay_for(history, FixedSequence(6, interval), T=4, L=40, previous=True, **options)
    for _ in range(n_batches):
        replay.append(history.batch(4))
    return replay, history


def test_sequences_start_every_interval_with_the_state_stored_there() -> None:
    replay, history = spaced(12, 6, alpha=1.0)  # 24 rows
    found = replay.sample(100)
    time, env = np.divmod(found.index, 2)
    assert set((time - 1).tolist()) == {0, 12}
    np.testing.assert_array_equal(found.state[0][:, 0], time - 1 + env / 8)
    for _ in range(10):  # once around: 64 rows, of which 40 are held
        replay.append(history.batch(4))
    assert starts(replay) == {36, 48}
    assert replay.newest().tolist() == []
    replay.update_priorities(np.array([2, 74, 75]), np.array([9.0, 3.0, 0.0]))  # 2 is overwritten
    assert np.bincount(replay.sample(500).index)[[74, 75, 98, 99]].tolist() == [300, 0, 100, 100]


def test_the_size_counts_the_states() -> None:
    texts = {interval: str(spaced(interval, 0)[0]) for interval in (4, 8)}  # states of two floats
    n_bytes = {interval: int(text.split(" rows of ")[1].split()[0]) for interval, text in texts.items()}
    assert n_bytes[4] - n_bytes[8] == 8 / 4 - 8 / 8


def test_an_interval_of_a_batch_is_the_default_and_a_longer_one_stores_fewer_states() -> None:
    n_bytes = {}
    for interval in (0, 4, 8, 12):
        replay, _ = spaced(interval, 16)
        n_bytes[interval] = sum(column._slots.nbytes for column in replay._readers[0]._state)  # type: ignore[attr-defined]
        if interval <= 4:
            assert starts(replay) == {28, 32, 36, 40, 44, 48, 52, 56}
    assert n_bytes == {0: 12 * 16, 4: 12 * 16, 8: 7 * 16, 12: 5 * 16}  # of two environments, two floats each


@pytest.mark.parametrize(("interval", "remedy"), [(1, 4), (6, 8), (13, 16)])
def test_an_interval_that_is_no_multiple_of_a_batch_is_refused(interval: int, remedy: int) -> None:
    message = rf"algo.state_interval={interval} must be a multiple of sampler.batch_T=4; use {remedy}$"
    with pytest.raises(ValueError, match=message):
        spaced(interval, 0)


def test_an_interval_too_long_for_the_ring_is_refused_with_the_size_that_is_not() -> None:
    with pytest.raises(ValueError, match=r"algo.replay.size=80 holds 40 time steps .*; use algo.replay.size=100"):
        spaced(40, 0)


def test_data_may_have_fewer_rows_than_a_sequence(tmp_path: Path) -> None:
    path, spec = stored(tmp_path, episodes([21], *CARTPOLE), *CARTPOLE), BatchSpec(80, 1)
    state = np.zeros((1, 1), np.float32)
    made: Any = make_replay(OfDatasets(path=path), *CARTPOLE, spec, FixedSequence(80), state=state, previous=True)
    assert made.sample(1).valid.sum() == made.n_rows == 21
