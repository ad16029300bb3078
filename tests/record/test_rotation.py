"""What each snapshot mode writes and keeps."""

import math
from pathlib import Path

import pytest

from rlframe.core.errors import ConfigError
from rlframe.record.rotation import Rotation
from rlframe.record.snapshot import load_snapshot


def offered(rotation: Rotation, env_steps: int, score: float = math.nan, final: bool = False) -> bool:
    return rotation.offer(lambda: {"n": env_steps}, env_steps, score, 0, final) is not None


def kept(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("step_*"))


def target(directory: Path, link: str) -> int:
    return int((directory / link).readlink().name[5:])


def test_none_writes_nothing_and_asks_for_no_state(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path / "snapshot", "none", 0)

    def forbidden() -> dict[str, int]:
        raise AssertionError("the state was asked for")

    assert rotation.offer(forbidden, 1, 1.0, 0, final=True) is None
    assert not (tmp_path / "snapshot").exists()


def test_last_keeps_only_the_newest(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, "last", 0)
    assert [offered(rotation, step) for step in (10, 20, 30)] == [True] * 3
    assert kept(tmp_path) == [30]
    assert target(tmp_path, "last") == 30


def test_all_keeps_every_one_and_marks_the_best(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, "all", 0)
    for step, score in ((10, 1.0), (20, 3.0), (30, 2.0)):
        offered(rotation, step, score)
    assert kept(tmp_path) == [10, 20, 30]
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (20, 30)


def test_gap_writes_when_enough_steps_have_passed_and_at_the_end(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, "gap", 100)
    written = [step for step in (40, 99, 100, 150, 199, 260) if offered(rotation, step)]
    assert written == [100, 260]
    assert offered(rotation, 300, final=True)
    assert kept(tmp_path) == [100, 260, 300]


def test_best_keeps_the_newest_and_the_highest_score(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, "best", 0)
    for step, score in ((10, 5.0), (20, 7.0), (30, 7.0), (40, math.nan)):
        offered(rotation, step, score)
    assert kept(tmp_path) == [20, 40]
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (20, 40)


def test_nan_is_never_best(tmp_path: Path) -> None:
    offered(Rotation(tmp_path, "best", 0), 10, math.nan)
    assert not (tmp_path / "best").exists()
    assert load_snapshot(tmp_path)[1]["score"] is None


def test_the_best_score_is_remembered_over_a_resume(tmp_path: Path) -> None:
    offered(Rotation(tmp_path, "best", 0), 10, 5.0)
    resumed = Rotation(tmp_path, "best", 0)
    offered(resumed, 20, 4.0)
    assert target(tmp_path, "best") == 10


def test_a_gap_is_counted_from_the_snapshot_resumed_from(tmp_path: Path) -> None:
    offered(Rotation(tmp_path, "gap", 100), 100)
    assert not offered(Rotation(tmp_path, "gap", 100), 150)


def test_a_final_snapshot_that_stands_already_is_not_written_again(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, "last", 0)
    path = rotation.offer(lambda: {"n": 1}, 10, 1.0, 0, False)
    assert rotation.offer(lambda: {"n": 2}, 10, 1.0, 0, True) == path


def test_mode_last_after_mode_best_leaves_no_dangling_link(tmp_path: Path) -> None:
    offered(Rotation(tmp_path, "best", 0), 10, 5.0)
    offered(Rotation(tmp_path, "last", 0), 20, 4.0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step_000000000020"]


def test_trimming_sets_later_snapshots_aside_and_points_back(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, "all", 0)
    for step, score in ((10, 2.0), (20, 1.0), (30, 9.0)):
        offered(rotation, step, score)
    rotation.trim(20)
    assert kept(tmp_path) == [10, 20]
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (10, 20)
    assert load_snapshot(tmp_path / "abandoned_step_000000000030")[0] == {"n": 30}
    assert load_snapshot(tmp_path)[0] == {"n": 20}
    offered(rotation, 30, 3.0)
    assert target(tmp_path, "best") == 30


def test_trimming_to_the_newest_changes_nothing(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, "best", 0)
    offered(rotation, 10, 1.0)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    rotation.trim(10)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


def test_a_mistyped_mode_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean best"):
        Rotation(tmp_path, "bets", 0)
    with pytest.raises(ConfigError, match="snapshot_gap=-1"):
        Rotation(tmp_path, "gap", -1)
