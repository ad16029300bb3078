"""What each snapshot mode writes and keeps."""

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlframe.core.errors import ConfigError
from rlframe.record import logger_context
from rlframe.record.retention import Retention, SnapshotPolicy, restore_links
from rlframe.record.snapshot import link_target, load_snapshot


def offered(retention: Retention, env_steps: int, score: float = math.nan, final: bool = False) -> bool:
    return retention.save_if_due(lambda: {"n": env_steps}, env_steps, score, 0, final) is not None


def kept(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("step_*"))


def target(directory: Path, link: str) -> int:
    return int((directory / link).readlink().name[5:])


def test_none_writes_nothing_and_asks_for_no_state(tmp_path: Path) -> None:
    retention = Retention(tmp_path / "snapshot", SnapshotPolicy("none", keep=1))

    def forbidden() -> dict[str, int]:
        raise AssertionError("the state was asked for")

    assert retention.save_if_due(forbidden, 1, 1.0, 0, final=True) is None
    assert not (tmp_path / "snapshot").exists()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(SnapshotPolicy("last", keep=1), [40]), (SnapshotPolicy(), [30, 40]), (SnapshotPolicy(keep=3), [20, 30, 40])],
)
def test_the_newest_stay_as_many_as_asked_and_by_default_two(
    policy: SnapshotPolicy, expected: list[int], tmp_path: Path
) -> None:
    retention = Retention(tmp_path, policy)
    assert [offered(retention, step) for step in (10, 20, 30, 40)] == [True] * 4
    assert kept(tmp_path) == expected
    assert target(tmp_path, "last") == 40


@pytest.mark.parametrize(("keep", "expected"), [(1, [20, 50]), (2, [20, 40, 50])])
def test_the_first_of_the_highest_score_stays_beside_the_newest(keep: int, expected: list[int], tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("best", keep=keep))
    for step, score in ((10, 5.0), (20, 7.0), (30, 7.0), (40, 6.0), (50, math.nan)):
        offered(retention, step, score)
    assert kept(tmp_path) == expected
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (20, 50)


def test_links_are_restored_by_scores_of_the_newest_ones_metric(tmp_path: Path) -> None:
    offered(Retention(tmp_path, SnapshotPolicy("all")), 10, 500.0)
    shorter = Retention(tmp_path, SnapshotPolicy("all", best="-eval/length_mean"))  # the run was resumed so
    for step, score in ((20, -30.0), (30, -40.0)):
        offered(shorter, step, score)
    restore_links(tmp_path)
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (20, 30)


def test_a_snapshot_without_a_score_is_never_the_best(tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("all"))
    for step, score in ((10, math.nan), (20, math.nan), (30, 3.0)):
        offered(retention, step, score)
    retention.truncate_after(20)
    assert link_target(tmp_path / "best") is None


def test_all_keeps_every_one_and_marks_the_best(tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("all", keep=1))
    for step, score in ((10, 1.0), (20, 3.0), (30, 2.0)):
        offered(retention, step, score)
    assert kept(tmp_path) == [10, 20, 30]
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (20, 30)


def test_gap_writes_the_first_after_each_multiple_and_the_last(tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("gap", 100))
    written = [step for step in (40, 99, 100, 150, 199, 260, 301) if offered(retention, step)]
    assert written == [100, 260, 301]
    assert offered(retention, 310, final=True)
    assert kept(tmp_path) == [100, 260, 301, 310]


def test_nan_is_never_best(tmp_path: Path) -> None:
    offered(Retention(tmp_path, SnapshotPolicy("best", keep=1)), 10, math.nan)
    assert not (tmp_path / "best").exists()
    assert load_snapshot(tmp_path)[1]["score"] is None


def test_the_best_score_is_remembered_over_a_resume(tmp_path: Path) -> None:
    offered(Retention(tmp_path, SnapshotPolicy("best", keep=1)), 10, 5.0)
    resumed = Retention(tmp_path, SnapshotPolicy("best", keep=1))
    offered(resumed, 20, 4.0)
    assert target(tmp_path, "best") == 10


def test_a_gap_is_counted_from_the_snapshot_resumed_from(tmp_path: Path) -> None:
    offered(Retention(tmp_path, SnapshotPolicy("gap", 100)), 100)
    assert not offered(Retention(tmp_path, SnapshotPolicy("gap", 100)), 150)


def test_an_existing_final_snapshot_is_not_written_again(tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("last", keep=1))
    path = retention.save_if_due(lambda: {"n": 1}, 10, 1.0, 0, False)
    assert retention.save_if_due(lambda: {"n": 2}, 10, 1.0, 0, True) == path
    again = Retention(tmp_path, SnapshotPolicy("last", keep=1))
    assert again.save_if_due(lambda: {"n": 3}, 10, 1.0, 0, True) == path


def test_a_final_snapshot_has_the_updates_since_one_of_the_same_step(tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("last", keep=1))
    retention.save_if_due(lambda: {"n": 1}, 10, 1.0, 5, False)
    retention.save_if_due(lambda: {"n": 2}, 10, 1.0, 6, True)
    assert load_snapshot(tmp_path)[0] == {"n": 2}


def test_mode_last_after_mode_best_leaves_no_dangling_link(tmp_path: Path) -> None:
    offered(Retention(tmp_path, SnapshotPolicy("best", keep=1)), 10, 5.0)
    offered(Retention(tmp_path, SnapshotPolicy("last", keep=1)), 20, 4.0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step_000000000020"]


def test_a_run_copied_with_links_followed_goes_on_and_has_its_best(tmp_path: Path) -> None:
    before = Retention(tmp_path / "run", SnapshotPolicy("best", keep=1))
    offered(before, 10, 5.0)
    offered(before, 20, 4.0)
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    assert not (copy / "last").is_symlink()
    assert link_target(copy / "best") == copy / "step_000000000010"
    after = Retention(copy, SnapshotPolicy("best", keep=1))
    offered(after, 30, 4.0)
    assert (kept(copy), target(copy, "last"), link_target(copy / "best")) == ([10, 30], 30, copy / "step_000000000010")
    offered(after, 40, 6.0)
    assert (kept(copy), target(copy, "last"), target(copy, "best")) == ([40], 40, 40)
    alone = Path(shutil.copytree(tmp_path / "run", tmp_path / "alone"))  # while the run replaced its best one
    shutil.rmtree(alone / "step_000000000010")
    assert link_target(alone / "best") == alone / "best"
    offered(Retention(alone, SnapshotPolicy("best", keep=1)), 30, 4.5)
    assert (kept(alone), target(alone, "last"), target(alone, "best")) == ([10, 30], 30, 10)


def test_trimming_sets_later_snapshots_aside_and_points_back(tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("all", keep=1))
    for step, score in ((10, 2.0), (20, 1.0), (30, 9.0)):
        offered(retention, step, score)
    retention.truncate_after(20)
    assert kept(tmp_path) == [10, 20]
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (10, 20)
    assert load_snapshot(tmp_path / "abandoned_step_000000000030")[0] == {"n": 30}
    assert load_snapshot(tmp_path)[0] == {"n": 20}
    offered(retention, 30, 3.0)
    assert target(tmp_path, "best") == 30


def test_trimming_to_the_newest_changes_nothing(tmp_path: Path) -> None:
    retention = Retention(tmp_path, SnapshotPolicy("best", keep=1))
    offered(retention, 10, 1.0)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    retention.truncate_after(10)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


def test_a_mistyped_mode_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean best"):
        Retention(tmp_path, SnapshotPolicy("bets", keep=1))
    with pytest.raises(ConfigError, match="snapshot_gap=-1"):
        Retention(tmp_path, SnapshotPolicy("gap", -1))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [("keep", 0, "snapshot_keep=0"), ("errors", "ignore", "snapshot_errors='ignore' is not one of stop, continue")],
)
def test_a_policy_that_cannot_be_is_refused(field: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SnapshotPolicy(**{field: value})


def test_best_goes_by_any_metric_and_lower_may_be_better(tmp_path: Path) -> None:
    for number, (best, steps) in enumerate((("algo/loss", 20), ("-algo/loss", 30), ("", 10))):
        with logger_context(tmp_path, number, snapshot_mode="best", snapshot_best=best, console=False) as run:
            for step, loss, score in ((10, 2.0, 9.0), (20, 3.0, 1.0), (30, 1.0, 1.0)):
                run.log({"env_steps": step, "algo/loss": loss})
                run.snapshot(dict, step, score)
        assert target(tmp_path / f"run_{number}/snapshot", "best") == steps


def test_a_score_by_another_metric_is_no_rival(tmp_path: Path) -> None:
    offered(Retention(tmp_path, SnapshotPolicy("best", best="algo/loss")), 10, 100.0)
    resumed = Retention(tmp_path, SnapshotPolicy("best", best="eval/return_mean"))
    offered(resumed, 20, 5.0)
    assert target(tmp_path, "best") == 20


@pytest.mark.parametrize(
    ("best", "row", "match"),
    [
        ("eval/return_men", {"eval/return_mean": 1.0}, "did you mean eval/return_mean"),
        ("-memory/return_mean", {"episode/count": 3}, "this run has no metric 'memory/return_mean'"),
        ("algo/looss", {"updates": 3, "algo/loss": 1.0}, "did you mean algo/loss"),
    ],
)
def test_an_unknown_metric_is_named_at_the_first_report(
    best: str, row: dict[str, float], match: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match=match),
        logger_context(tmp_path, snapshot_mode="best", snapshot_best=best, console=False) as run,
    ):
        run.log({"env_steps": 0, **row})


def test_a_metric_of_the_environment_that_episodes_lack_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rlframe"), "propagate", True)
    with logger_context(tmp_path, snapshot_mode="best", snapshot_best="env/sucess", console=False) as run:
        run.log({"env_steps": 0, "updates": 0})
        assert "so far" not in caplog.text
        run.log({"env_steps": 9, "episode/return_mean": 1.0, "env/success": 0.5})
        assert "this run has no metric 'env/sucess' so far; did you mean env/success" in caplog.text


@pytest.mark.parametrize("best", ["episode/return_mean", "algo/loss", "algo/of_my_own", "-env/crashes"])
def test_a_metric_that_comes_later_is_waited_for(best: str, tmp_path: Path) -> None:
    with logger_context(tmp_path, snapshot_mode="best", snapshot_best=best, console=False) as run:
        run.log({"env_steps": 0, "updates": 0})
        assert run.snapshot(dict, 0) is not None
        assert not (run.directory / "snapshot/best").exists()
        run.log({"env_steps": 9, "updates": 1, best.removeprefix("-"): 1.0})
        run.snapshot(dict, 9)
        assert target(run.directory / "snapshot", "best") == 9
