"""What make_replay chooses, logs and refuses, and where the memory is."""

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
from rlframe.replay import NStep, ReplayConfig, Whole, columns, make_replay
from rlframe.replay.columns import DiskMemory, available_memory
from rlframe.replay.frames import Frames, Rows
from tests.replay.history import History
from tests.replay.made import replay_for

ATARI = FrameStack(Box(0, 255, (4, 84, 84), np.uint8), 4)
VECTOR = Box(-np.inf, np.inf, (17,), np.float64)


def make(config: ReplayConfig, space: Any = VECTOR, plan: Any = NStep(0.99), **options: Any) -> Any:  # noqa: B008
    return make_replay(config, space, Discrete(6), BatchSpec(4, 8), plan, **options)


def test_frames_are_kept_where_observations_are_stacks_of_them() -> None:
    kept = make(ReplayConfig(size=800), Dict({"screen": ATARI, "image": Box(0, 255, (4, 8, 8), np.uint8), "x": VECTOR}))
    kinds = {name: type(leaf) for name, leaf in kept._storage.observation.items()}
    assert kinds == {"screen": Frames, "image": Rows, "x": Rows}


def test_a_transition_of_Atari_takes_at_most_7200_bytes() -> None:
    made = make(ReplayConfig(size=1_000), ATARI, NStep(0.99, 3), alpha=0.6)
    assert made.size == "1,000 rows of 7,105 bytes are 0.01 GB, in cpu"


def test_vectors_of_float64_take_four_bytes_a_number() -> None:
    assert make(ReplayConfig(size=1_000)).size.startswith("1,000 rows of 108 bytes")  # 17 * 4 + 8 for the action + 32


def test_what_cannot_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.replay.buffer.available_memory", lambda: 10**9)
    monkeypatch.setattr(columns, "available_memory", lambda: 10**9)
    with pytest.raises(ValueError, match=r"algo\.replay\.size=1000000 needs 7\.1\d GB .* 1\.00 GB .*size=14\d{4} or"):
        make(ReplayConfig(), ATARI)
    with pytest.raises(ValueError, match=r"needs 1\.8\d GB .* of main memory"):
        make(ReplayConfig(compress=True), ATARI)


def test_a_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskMemory, "available", lambda self: 10**9)
    with pytest.raises(ValueError, match=r"needs 7\.06 GB .* of disk"):
        make(ReplayConfig(memory="disk"), ATARI)


@pytest.mark.parametrize(("plan", "least"), [(NStep(0.99), 56), (NStep(0.99, 5), 88), (Whole(20), 208)])
def test_too_few_rows_are_refused_with_the_least(plan: Any, least: int) -> None:
    with pytest.raises(ValueError, match=f"use algo.replay.size={least}"):
        make(ReplayConfig(size=least - 1 - (least - 1) % 8), plan=plan)
    make(ReplayConfig(size=least), plan=plan)


def test_the_least_size_can_be_sampled_for_ever() -> None:
    for plan, least in ((NStep(0.5, 5), 15), (Whole(6), 16)):
        history = History(2, "frames")
        with pytest.raises(ValueError, match=f"size={2 * least}$"):
            replay_for(history, plan, L=least - 1)
        replay = replay_for(history, plan, L=least)
        for i in range(20):
            replay.append(history.batch(4))
            if i > 2:
                replay.sample(4)


def test_compression_needs_frames_and_main_memory() -> None:
    with pytest.raises(ConfigError, match="has none"):
        make(ReplayConfig(compress=True))
    with pytest.raises(ConfigError, match="not disk"):
        ReplayConfig(compress=True, memory="disk")
    with pytest.raises(ConfigError, match="size=0"):
        ReplayConfig(size=0)


def test_compression_without_lz4_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rlframe.replay.compressed", raising=False)
    monkeypatch.setitem(sys.modules, "lz4", None)
    with pytest.raises(ConfigError, match=r'^[^\n]*pip install "rlframe\[lz4\]"$'):
        make(ReplayConfig(size=800, compress=True), ATARI)


def test_memory_on_disk_is_in_the_run_and_has_no_name(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        before = set(run.directory.iterdir())
        replay = make(ReplayConfig(size=800, memory="disk"), ATARI)
        assert replay._storage.memory.folder == run.directory
        assert set(run.directory.iterdir()) == before
    history = History(2)
    replay = replay_for(history, config={"memory": "disk"})  # without a run
    replay.append(history.batch(4))
    assert len(replay.sample(5).index) == 5


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 1\ninactive_file 300\n"}, 400),
        ({"memory.limit_in_bytes": "50", "memory.usage_in_bytes": "60", "memory.stat": "total_inactive_file 0"}, 0),
    ],
)
def test_limits_of_control_groups_count(
    files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(columns, "_control_groups", lambda: [tmp_path])
    assert available_memory() == left


def test_no_limit_leaves_the_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(columns, "_control_groups", lambda: [tmp_path, tmp_path / "missing"])
    assert available_memory() > 10**6
