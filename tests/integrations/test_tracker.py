"""Tracker, the base of trackers: each point arrives once, whatever fails and whenever the run is killed."""

import json
import logging
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlframe.core.errors import ConfigError
from rlframe.integrations.tracker import Points, Tracker
from rlframe.record import logger_context
from rlframe.record.context import current_run
from rlframe.record.csv_loggers import CsvLogger, JsonlLogger
from tests.processes import until

HERE = "tests.integrations.test_tracker"
ROWS: list[dict[str, float]] = [
    {"env_steps": 0, "eval/return_mean": 1.0},
    {"env_steps": 10, "algo/loss": 0.5},
    {"env_steps": 10, "eval/return_mean": 2.0},  # late
    {"env_steps": 20, "algo/loss": 0.25},
    {"env_steps": 10, "eval/n_episodes": 3},  # later still
]


class Store(Tracker):
    """Keeps points in a file of the run directory, as a tracker does elsewhere."""

    failing: tuple[str, ...] = ()  # methods that fail
    error: BaseException = ConnectionError("no network")
    block = threading.Event()
    blocked = False  # send waits for `block`

    def connect(self, directory: Path, config: Mapping[str, Any], name: str, run_id: str, resumed: bool) -> None:
        self._fail("connect")
        self.run_id, self._file = run_id, directory / "store"

    def points(self) -> Points:
        self._fail("points")
        points: dict[int, set[str]] = {}
        for env_steps, name, _ in stored(self._file):
            points.setdefault(env_steps, set()).add(name)
        return points

    def send(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        if self.blocked:
            self.block.wait()
        for name, value in metrics.items():
            self._fail(name)
            with self._file.open("a") as file:
                file.write(f"{json.dumps([env_steps, name, value])}\n")

    def finish(self, failed: bool) -> None:
        with self._file.with_name("finished").open("a") as file:
            file.write(f"{failed}\n")

    def _fail(self, method: str) -> None:
        if method in self.failing:
            raise type(self.error)(f"{self.error} in {method}")


def store_of(run: Any) -> Store:
    """The tracker of a run."""
    (store,) = (logger for logger in run._loggers if isinstance(logger, Store))
    return store


class NotALogger:
    pass


def stored(file: Path) -> list[tuple[int, str, float]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def points_of(rows: list[dict[str, float]]) -> list[tuple[int, str, float]]:
    return [(int(row["env_steps"]), name, value) for row in rows for name, value in row.items() if name != "env_steps"]


def log(directory: Path, rows: list[dict[str, float]], tracker: bool = True, trim: int | None = None) -> None:
    """Log rows as a run does that continues at `trim`; without `tracker`, as if it was killed before it sent them."""
    table = directory / "progress.csv"
    loggers = [CsvLogger(table), JsonlLogger(table), *([Store(directory, {}, "run")] if tracker else [])]
    for logger in loggers if trim is not None else ():
        logger.truncate_after(trim)
    for row in rows:
        for logger in loggers:
            logger.write(row)
    for logger in reversed(loggers):
        logger.close()


def test_every_row_arrives_once(tmp_path: Path) -> None:
    log(tmp_path, ROWS)
    assert stored(tmp_path / "store") == points_of(ROWS)
    assert (tmp_path / "finished").read_text() == "False\n"


@pytest.mark.parametrize("n_arrived", range(6))
def test_a_kill_between_the_file_and_the_tracker_loses_and_doubles_nothing(tmp_path: Path, n_arrived: int) -> None:
    points = points_of(ROWS)
    log(tmp_path, ROWS, tracker=False)
    (tmp_path / "store").write_text("".join(f"{json.dumps(point)}\n" for point in points[:n_arrived]))
    log(tmp_path, ROWS[3:], trim=10)
    assert sorted(stored(tmp_path / "store")) == sorted(points)


def test_rows_that_are_made_again_in_another_order_are_not_sent_again(tmp_path: Path) -> None:
    log(tmp_path, ROWS)
    log(tmp_path, [ROWS[4], ROWS[3], {"env_steps": 30, "algo/loss": 0.125}], trim=10)
    assert stored(tmp_path / "store") == [*points_of(ROWS), (30, "algo/loss", 0.125)]


def test_a_tracker_that_is_added_on_resume_gets_all_rows(tmp_path: Path) -> None:
    log(tmp_path, ROWS[:2], tracker=False)
    log(tmp_path, ROWS[2:], trim=10)
    assert stored(tmp_path / "store") == points_of(ROWS)


def test_infinities_and_nan_arrive_as_numbers(tmp_path: Path) -> None:
    log(tmp_path, [{"env_steps": 1, "a": float("nan"), "b": float("-inf")}])
    assert str(stored(tmp_path / "store")) == "[(1, 'a', nan), (1, 'b', -inf)]"


def test_a_failing_tracker_neither_ends_the_run_nor_loses_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{HERE}:Store"]
    monkeypatch.setattr(Store, "failing", ("algo/loss",))
    with logger_context(tmp_path, loggers=names, console=False) as run:
        for row in ROWS:
            current_run().log(row)
        until(lambda: store_of(run).n_failed)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "did not take all rows: ConnectionError: no network in algo/loss" in warnings[0].getMessage()
    assert "resume= sends them" in warnings[-1].getMessage()
    assert len(warnings) == 2
    monkeypatch.setattr(Store, "failing", ())
    with logger_context(tmp_path, loggers=names, console=False, resume=True) as run:
        run.truncate_after(20)
    points = [point for point in stored(tmp_path / "run_0/store") if not point[1].startswith("record/")]
    assert sorted(points) == sorted(points_of(ROWS))


@pytest.mark.parametrize("method", ["connect", "points", "algo/loss"])
def test_an_endless_error_is_one_short_line_and_is_not_repeated(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Store, "failing", (method,))
    monkeypatch.setattr(Store, "error", ConnectionError("x" * 10**7))
    with (
        pytest.raises(ConfigError) if method == "connect" else nullcontext() as caught,
        logger_context(tmp_path, loggers=[f"{HERE}:Store"], console=False) as run,
    ):
        run.log(ROWS[1])
        until(lambda: store_of(run).n_failed)
    said = [str(caught.value)] if caught else [record.getMessage() for record in caplog.records if record.levelno > 20]
    assert "x" * 200 + f"... ({10**7 + len(f' in {method}'):,} characters)" in said[0]
    assert sum(map(len, said)) < 500


def test_a_tracker_that_calls_sys_exit_is_warned_of_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Store, "failing", ("algo/loss",))
    monkeypatch.setattr(Store, "error", SystemExit("enough"))
    with logger_context(tmp_path, loggers=[f"{HERE}:Store"], console=False) as run:
        run.log(ROWS[1])
        until(lambda: store_of(run).n_failed)
        monkeypatch.setattr(Store, "failing", ())
        run.log(ROWS[3])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["test_tracker did not take all rows: SystemExit: enough in algo/loss; they are sent later"]
    points = [point for point in stored(tmp_path / "run_0/store") if not point[1].startswith("record/")]
    assert points == points_of([ROWS[1], ROWS[3]])


@pytest.mark.parametrize("error", [ConnectionError("no network"), SystemExit("no login")], ids=repr)
def test_a_tracker_that_cannot_start_is_an_error_that_leaves_the_directory_free(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "failing", ("connect",))
    monkeypatch.setattr(Store, "error", error)
    context = logger_context(tmp_path, loggers=[f"{HERE}:Store"], console=False)
    says = f"test_tracker cannot start: {type(error).__name__}: {error} in connect"
    with pytest.raises(ConfigError, match=says), context:
        pass
    assert [path.name for path in (tmp_path / "run_0").iterdir()] == []


def test_failures_are_counted_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "failing", ("points",))
    with logger_context(tmp_path, loggers=[f"{HERE}:Store"], console=False) as run:
        run.log(ROWS[0])
        until(lambda: store_of(run).n_failed)
        run.log(ROWS[1])
    last = json.loads((tmp_path / "run_0/progress.jsonl").read_text().splitlines()[-1])
    assert last["record/not_sent"] == 1


def test_a_tracker_that_hangs_does_not_slow_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Store, "blocked", True)
    monkeypatch.setattr("rlframe.integrations.tracker._CLOSE_S", 0.01)
    with logger_context(tmp_path, loggers=[f"{HERE}:Store"], console=False) as run:
        for row in ROWS:
            run.log(row)
    assert "still busy after 0.01 s" in caplog.text
    Store.block.set()


def test_a_resumed_run_continues_the_same_run_of_the_tracker(tmp_path: Path) -> None:
    first, second = Store(tmp_path, {}, "run"), Store(tmp_path, {}, "run")
    assert first.run_id == second.run_id
    for each in (first, second):
        each.close()


def test_a_run_that_fails_is_failed_in_the_tracker(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        logger_context(tmp_path, loggers=[f"{HERE}:Store"], console=False),
    ):
        raise ZeroDivisionError
    assert (tmp_path / "run_0/finished").read_text() == "True\n"


def test_a_damaged_id_is_named(tmp_path: Path) -> None:
    (tmp_path / "tracker.json").write_text('{"id": "../elsewhere"}')
    with pytest.raises(ConfigError, match=r"tracker.json is damaged: its id must have 16 hexadecimal digits"):
        Store(tmp_path, {}, "run")
