"""A restored replay continues exactly, also from a snapshot file, and if the environments were reset."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.core.struct import leaves
from rlframe.record import codec, rank_state
from rlframe.record.codec import Arrays, ChunkedArray, encode
from rlframe.record.snapshot import load_snapshot, save_snapshot
from rlframe.replay import FixedSequence, NStep, ReturnsToGo
from tests.replay.buffers import replay_for, same
from tests.replay.history import History

Saved = Callable[[Any], Any]
READERS = [NStep(0.5), NStep(0.5, 3), FixedSequence(5), ReturnsToGo(0.5)]
CONFIGS: list[dict[str, Any]] = [{}, {"compress": True}, {"kind": "device"}, {"kind": "disk"}]
RESTORED = [  # fast: each pair of values
    pytest.param(
        CONFIGS[c],
        (0.0, 0.6)[a],
        READERS[r],
        (2, 9)[n],
        marks=[pytest.mark.slow] * ((a, n) != ((c + r) % 2, (c // 2 + r) % 2)),
    )
    for c, a, r, n in itertools.product(range(4), range(2), range(4), range(2))
]


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the small arrays of these tests in chunks, as large ones are."""
    monkeypatch.setattr(rank_state, "LARGE_BYTES", 8)
    monkeypatch.setattr(codec, "CHUNK_BYTES", 64)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], Any]:
    """Save a state as a snapshot and load it."""
    return lambda state: load_snapshot(save_snapshot(tmp_path, state, {"env_steps": 0}))[0]


@pytest.mark.parametrize(("config", "alpha", "reader", "n_batches"), RESTORED)
def test_a_restored_replay_samples_the_same(
    config: dict[str, Any], alpha: float, reader: Any, n_batches: int, saved: Saved
) -> None:
    history, rng = History(2, "both"), np.random.default_rng(0)
    one = replay_for(history, reader, L=26, config=config, alpha=alpha, previous=True)
    for _ in range(n_batches):
        one.append(history.batch(4))
        if one.n_choices:
            one.update_priorities(one.sample(8).index, rng.random(8))
    other = replay_for(history, reader, L=26, config=config, alpha=alpha, previous=True, seed=1)
    other.load_state_dict(saved(one.state_dict()))
    assert (one.n_rows, one.n_choices) == (other.n_rows, other.n_choices)
    assert one.newest().tolist() == other.newest().tolist()
    for _ in range(8):
        batch = history.batch(4)
        one.append(batch)
        other.append(batch)
        a, b = one.sample(8, beta=0.5), other.sample(8, beta=0.5)
        assert same(a, b)
        for replay in (one, other):
            replay.update_priorities(a.index, np.arange(8.0) + 1)
        assert one.newest().tolist() == other.newest().tolist()


def test_after_a_resume_with_new_episodes_the_open_ones_are_truncated(saved: Saved) -> None:
    history = History(2, ends=0.0)
    replay = replay_for(history, NStep(0.5, 2))
    replay.append(history.batch(4))
    resumed = replay_for(history, NStep(0.5, 2))
    resumed.load_state_dict(saved(replay.state_dict()))
    resumed.append(History(2, ends=0.0, seed=1).batch(4))
    assert resumed.n_rows == 16
    assert resumed.n_choices == 14  # but the newest of each environment
    found = resumed.sample(200)
    at_cut = found.index // 2 == 3
    assert found.bootstrap[at_cut].unique().tolist() == [0.5]
    assert (found.next_inputs.observation[at_cut, 0].int() - 1 == found.index[at_cut] + 2).all()


def test_the_state_of_another_layout_raises_an_error() -> None:
    history = History(2)
    state = replay_for(history).state_dict()
    for other in (
        replay_for(history, L=41),
        replay_for(history, alpha=0.6),
        replay_for(history, NStep(0.5, 2)),
        replay_for(History(2, "frames")),
        replay_for(History(3)),
    ):
        with pytest.raises(ValueError, match="the saved replay is"):
            other.load_state_dict(state)


def test_only_written_rows_are_saved() -> None:
    history = History(2)
    replay = replay_for(history, L=4_000)
    replay.append(history.batch(4))
    assert max(x.nbytes for x in leaves(replay.state_dict()["parts"][0]["storage"]["observation"][0])) == 5 * 2 * 12


def chunks(snapshot: Path) -> dict[str, int]:
    """The chunk files of a snapshot and their inodes."""
    return {file.name: file.stat().st_ino for file in (snapshot / "chunks").iterdir()}


def chunked_of(state: Any) -> list[ChunkedArray]:
    arrays: Arrays = {}
    encode(state, arrays)
    return [array for array in arrays.values() if isinstance(array, ChunkedArray)]


@pytest.mark.parametrize("config", [{}, {"compress": True}, {"kind": "device"}, {"kind": "disk"}], ids=str)
@pytest.mark.parametrize("reader", [NStep(0.5, 3), FixedSequence(5)], ids=str)
def test_cached_digests_match_the_chunks_after_any_writes(
    reader: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframe.replay.frames._CHUNK_BLOCKS", 8)
    history, rng, n_cached = History(2, "both"), np.random.default_rng(1), 0
    replay = replay_for(history, reader, L=40, config=config, alpha=0.6, previous=True)
    for number in range(24):
        for _ in range(rng.integers(4)):
            replay.append(History(2, "both", seed=number).batch(4) if rng.random() < 0.2 else history.batch(4))
        for array in chunked_of(replay.state_dict()):
            for i in range(len(array.counts)):
                digest = hashlib.sha256(array.read(i)).hexdigest()
                assert array.digests[i] in ("", digest)
                n_cached += bool(array.digests[i])
                array.digests[i] = digest
    assert n_cached > 100


@pytest.mark.parametrize("config", [{}, {"compress": True}, {"kind": "disk"}], ids=str)
def test_a_snapshot_writes_only_new_chunks_also_after_a_resume(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "CHUNK_BYTES", 256)
    if "compress" in config:
        monkeypatch.setattr("rlframe.replay.frames._CHUNK_BLOCKS", 16)
    history = History(2, "frames")
    replay = replay_for(history, L=800, config=config)
    for _ in range(201):
        replay.append(history.batch(4))
    first = chunks(save_snapshot(tmp_path, replay.state_dict(), {"env_steps": 1}))
    resumed = replay_for(history, L=800, config=config)
    resumed.load_state_dict(load_snapshot(tmp_path)[0])
    for step, buffer in ((2, replay), (3, resumed)):
        buffer.append(history.batch(4))
        now = chunks(save_snapshot(tmp_path, buffer.state_dict(), {"env_steps": step}))
        assert len(now) > 50
        assert len(set(now.values()) - set(first.values())) < len(now) / 3
        first = {**first, **now}


def test_chunks_without_writes_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(2)
    replay = replay_for(history, L=400)
    for _ in range(100):
        replay.append(history.batch(4))
    save_snapshot(tmp_path, replay.state_dict(), {"env_steps": 1})
    replay.append(history.batch(4))
    column = replay.state_dict()["parts"][0]["storage"]["observation"][0]["rows"]
    known = [bool(digest) for digest in column.digests[: len(column.counts)]]
    assert known.count(False) <= 3
    assert len(known) > 100
