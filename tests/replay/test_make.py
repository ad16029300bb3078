"""make_replay: how observations are stored, size checks, errors, and memory on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import FrameStack
from rlframe.core.types import BatchSpec
from rlframe.record import logger_context
from rlframe.replay import FixedSequence, InMemory, NStep, OnDisk, ReplayConfig, arrays, make_replay
from rlframe.replay.arrays import DiskMemory
from rlframe.replay.frames import Frames, WholeRows
from tests.replay.buffers import replay_for
from tests.replay.history import History

ATARI = FrameStack(Box(0, 255, (4, 84, 84), np.uint8), 4)
VECTOR = Box(-np.inf, np.inf, (17,), np.float64)


def make(config: ReplayConfig, space: Any = VECTOR, reader: Any = NStep(0.99), **options: Any) -> Any:  # noqa: B008
    return make_replay(config, space, Discrete(6), BatchSpec(4, 8), reader, **options)


def test_stacks_of_frames_are_stored_as_frames() -> None:
    replay = make(InMemory(size=800), Dict({"screen": ATARI, "image": Box(0, 255, (4, 8, 8), np.uint8), "x": VECTOR}))
    kinds = {name: type(leaf) for name, leaf in replay._storages[0].observation.items()}
    assert kinds == {"screen": Frames, "image": WholeRows, "x": WholeRows}


def test_a_transition_of_Atari_takes_at_most_7200_bytes() -> None:
    replay = make(InMemory(size=1_000), ATARI, NStep(0.99, 3), alpha=0.6)
    assert replay.size == "1,000 rows of 7,105 bytes: 0.01 GB, in main memory"


def test_vectors_of_float64_take_four_bytes_a_number() -> None:
    assert make(InMemory(size=1_000)).size.startswith("1,000 rows of 108 bytes")  # 17 * 4 + 8 for the action + 32


def test_a_replay_that_does_not_fit_raises_an_error_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.replay.make.available_memory", lambda: 10**9)
    monkeypatch.setattr(arrays, "available_memory", lambda: 10**9)
    with pytest.raises(ValueError, match=r"algo\.replay\.size=1000000 needs 7\.1\d GB .* 1\.00 GB .*size=14\d{4} or"):
        make(InMemory(), ATARI)
    with pytest.raises(ValueError, match=r"needs 1\.8\d GB .* of main memory"):
        make(InMemory(compress=True), ATARI)


def test_a_full_disk_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskMemory, "available", lambda self: 10**9)
    with pytest.raises(ValueError, match=r"needs 7\.06 GB .* of disk"):
        make(OnDisk(), ATARI)


@pytest.mark.parametrize(("reader", "minimum"), [(NStep(0.99), 56), (NStep(0.99, 5), 88), (FixedSequence(20), 208)])
def test_too_few_rows_raise_an_error_with_the_minimum(reader: Any, minimum: int) -> None:
    with pytest.raises(ValueError, match=f"use algo.replay.size={minimum}"):
        make(InMemory(size=minimum - 1 - (minimum - 1) % 8), reader=reader)
    make(InMemory(size=minimum), reader=reader)


def test_the_minimum_size_can_always_be_sampled() -> None:
    for reader, minimum in ((NStep(0.5, 5), 15), (FixedSequence(6), 16)):
        history = History(2, "frames")
        with pytest.raises(ValueError, match=f"size={2 * minimum}$"):
            replay_for(history, reader, L=minimum - 1)
        replay = replay_for(history, reader, L=minimum)
        for i in range(20):
            replay.append(history.batch(4))
            if i > 2:
                replay.sample(4)


def test_compression_needs_frames() -> None:
    with pytest.raises(ConfigError, match="has none"):
        make(InMemory(compress=True))
    with pytest.raises(ConfigError, match="size=0"):
        InMemory(size=0)


def test_compression_without_lz4_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    with pytest.raises(ConfigError, match=r'^[^\n]*pip install "rlframe\[lz4\]"$'):
        make(InMemory(size=800, compress=True), ATARI)


def test_memory_on_disk_is_an_unnamed_file_in_the_run_directory(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        before = set(run.directory.iterdir())
        replay = make(OnDisk(size=800), ATARI)
        assert set(run.directory.iterdir()) == before
        if sys.platform == "linux":
            assert f" {run.directory.resolve()}/" in Path("/proc/self/maps").read_text(), "of the mapped files"
        assert replay._storages[0].memory.folder == run.directory
    history = History(2)
    replay = replay_for(history, config={"kind": "disk"})  # without a run
    replay.append(history.batch(4))
    assert len(replay.sample(5).index) == 5
