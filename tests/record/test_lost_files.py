"""Files of a run that are deleted or replaced while it runs: an error that names them, and no row lost in silence."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlframe import launch
from rlframe.core.errors import RecordError
from rlframe.record import Run, logger_context
from tests.experiment.hostile import SPECIAL, WORDS
from tests.tables import read_csv

HOW: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "symlink": lambda path: SPECIAL["symlink"](path, path.parent.parent / "outside"),
    "another": lambda path: path.write_text(""),
}


def log_row(run: Run, n: int) -> None:
    run.log({"env_steps": n, "a": n})


def log_another_column(run: Run, n: int) -> None:
    run.log({"env_steps": n, "b": n})


def log_episode(run: Run, n: int) -> None:
    run.log_episodes([{"env_steps": n, "return": 1.0}])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("file", "record"),
    [
        ("progress.csv", log_row),
        ("progress.csv", log_another_column),
        ("progress.jsonl", log_row),
        ("events.out.tfevents*", log_row),
        ("episodes.csv", log_episode),
    ],
)
def test_a_file_of_rows_that_is_lost_is_an_error(
    file: str, record: Callable[[Run, int], None], how: str, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_text("")
    with logger_context(tmp_path, console=False, snapshot_errors="continue") as run:
        log_row(run, 1)
        log_episode(run, 1)
        (path,) = run.directory.glob(file)
        path.unlink()
        HOW[how](path)
        with pytest.raises(RecordError, match=rf"{path.name} was deleted or replaced during the run"):
            record(run, 2)
    assert (tmp_path / "outside").read_text() == ""


def test_a_debug_log_that_is_lost_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with logger_context(tmp_path, console=False) as run:
        (run.directory / "debug.log").unlink()
        for n in range(3):
            log_row(run, n)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"{run.directory}/debug.log was deleted or replaced during the run; messages are lost"]


@pytest.mark.parametrize("errors", ["stop", "continue"])
def test_a_snapshot_folder_that_becomes_a_link_is_an_error_and_its_target_is_left_alone(
    errors: str, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    with logger_context(tmp_path, console=False, snapshot_errors=errors) as run:
        run.snapshot(lambda: {"n": 1}, 1)
        (run.directory / "snapshot").rename(tmp_path / "moved")
        (run.directory / "snapshot").symlink_to(tmp_path / "elsewhere")
        for record in (
            lambda: run.snapshot(lambda: {"n": 2}, 2),
            lambda: run.snapshot(lambda: {"n": 2}, 2, final=True),
            lambda: run.score_snapshot(1, {"eval/return_mean": 1.0}),
        ):
            with pytest.raises(RecordError, match="snapshot was replaced by a link during the run"):
                record()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("how", ["file", "pipe"])
def test_a_file_in_the_place_of_the_snapshot_folder_is_named(how: str, tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        folder = run.directory / "snapshot"
        folder.write_text("") if how == "file" else os.mkfifo(folder)
        with pytest.raises(RecordError, match="run_0/snapshot is not a directory; remove it"):
            run.snapshot(lambda: {"n": 1}, 1, final=True)


def test_a_run_whose_rows_are_lost_fails_with_a_line_and_a_snapshot_and_is_resumed_with_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, run = Run.log, tmp_path / "run_0"

    def log_and_lose(self: Run, row: dict[str, float]) -> None:
        log(self, row)
        if row["env_steps"] == 32:
            (run / "progress.jsonl").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", log_and_lose)
        assert launch.main([*WORDS, f"log_dir={tmp_path}"]) == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "Traceback" not in line]
    assert said.startswith(f"error: {run}/progress.jsonl was deleted or replaced during the run")
    assert json.loads((run / "result.json").read_text())["ended"] == "failed"
    assert launch.main([f"resume={run}"]) == 0
    rows = [json.loads(line)["env_steps"] for line in (run / "progress.jsonl").read_text().splitlines()]
    assert rows == [int(row["env_steps"]) for row in read_csv(run / "progress.csv")[1]] == [0, 32, 64]


def test_a_name_that_is_no_text_is_in_the_debug_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rlframe"), "propagate", False)  # a report of the test could not be sent
    with logger_context(tmp_path / "caf\udce9", console=False) as run:
        logging.getLogger("rlframe").info(f"run: {run.directory}")
    assert "caf\\udce9" in (run.directory / "debug.log").read_text()
    assert "Logging error" not in capfd.readouterr().err
