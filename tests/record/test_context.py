"""Opening, resuming and closing a run, and the files in its directory."""

import errno
import json
import logging
import math
import os
import sys
from contextlib import closing
from contextvars import copy_context
from pathlib import Path
from typing import Any

import psutil
import pytest

import rlframe
from rlframe.core.errors import ConfigError, RecordError
from rlframe.record import context as logger
from rlframe.record.context import current_run, logger_context
from rlframe.record.directory import DirectoryLock, add_choices, attempts, write_result
from rlframe.record.loggers import TensorBoardLogger
from rlframe.record.metrics import Metrics, collect_in
from rlframe.record.run import NullRun
from tests.tables import read_csv

LOGGER = logging.getLogger("rlframe")


def steps(directory: Path) -> list[str]:
    return [row["env_steps"] for row in read_csv(directory / "progress.csv")[1]]


def test_a_run_leaves_the_files_of_the_contract(tmp_path: Path) -> None:
    with logger_context(tmp_path, 3, config={"algo": "ppo", "seed": 7}) as run:
        run.log({"env_steps": 10, "episode/return_mean": 1.0})
        run.snapshot(lambda: {"n": 1}, 10, 1.0)
    names = sorted(path.name.split(".tfevents")[0] for path in (tmp_path / "run_3").iterdir())
    assert names == [
        *("debug.log", "episodes.csv", "events.out", "params.json", "progress.csv", "progress.jsonl", "snapshot")
    ]
    params = json.loads((tmp_path / "run_3/params.json").read_text())
    assert params["config"] == {"algo": "ppo", "seed": 7}
    assert params["seed"] == 7
    assert params["command_line"] == sys.argv
    assert params["versions"]["rlframe"] == rlframe.__version__
    assert {"torch", "numpy", "gymnasium", "python"} <= set(params["versions"])
    assert params["host"]["cpu_count"] == os.cpu_count()
    assert "git" in params


def test_without_log_dir_a_run_lives_in_the_data_of_the_project_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "deep/er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep/er")
    directories = []
    for _ in range(2):  # in one second, too
        with logger_context(name="exp", console=False) as run:
            directories.append(run.directory)
    assert len(set(directories)) == 2
    for directory in directories:
        data, local, day, second, name, number = directory.relative_to(tmp_path).parts
        assert (data, local, name, number) == ("data", "local", "exp", "run_0")
        assert (len(day), len(second)) == (8, 6)


def test_outside_of_any_project_data_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyprojroot

    def nowhere() -> Path:
        raise RuntimeError("Project root not found.")

    monkeypatch.setattr(pyprojroot, "here", nowhere)
    monkeypatch.chdir(tmp_path)
    with logger_context(console=False) as run:
        assert run.directory.is_relative_to(tmp_path / "data/local")


def test_runs_that_choose_a_directory_at_the_same_moment_have_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has seen that there is none of this second; the other has made it since then."""
    paths = [tmp_path / "data/073000/run_0", tmp_path / "data/073001/run_0"]
    paths[0].mkdir(parents=True)
    chosen = iter(paths)
    monkeypatch.setattr(logger, "dated", lambda *_: next(chosen))
    with closing(DirectoryLock(paths[0], "a run", "log_dir")), logger_context(console=False) as run:
        assert run.directory == paths[1]


def test_a_run_is_never_put_inside_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyprojroot

    package = Path(rlframe.__file__).parent
    monkeypatch.setattr(pyprojroot, "here", lambda: package)
    with pytest.raises(ConfigError, match="inside the installed rlframe"), logger_context(console=False):
        pass
    assert not (package / "data/local").exists()


def test_an_existing_run_is_refused_with_the_remedies_and_left_alone(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        run.log({"env_steps": 10, "a": 1.0})
    before = {path: path.read_bytes() for path in (tmp_path / "run_0").iterdir()}
    with pytest.raises(ConfigError, match=r"never overwritten.*run_ID.*resume=.*run_0"), logger_context(tmp_path):
        pass
    assert {path: path.read_bytes() for path in (tmp_path / "run_0").iterdir()} == before
    with logger_context(tmp_path, 1, console=False):
        pass


def test_a_run_that_failed_before_its_first_update_makes_room_for_the_next_try(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run_0"
    for updates, ended in ((0, "failed"), (0, "failed"), (3, "failed")):
        with logger_context(tmp_path, console=False):
            (run / "mine.txt").write_text("kept")
        write_result(run / "result.json", {"ended": ended, "updates": updates, "elapsed_s": 9.5})
    assert [path.name for path in attempts(run)] == [".run_0.1", ".run_0.2"]
    assert sorted(path.name for path in attempts(run)[0].iterdir()) == sorted(path.name for path in run.iterdir())
    assert "failed before its first update; it was moved to .run_0.2" in caplog.text
    early = {"ended": "failed", "updates": 0, "elapsed_s": 9.5}
    for other in ({"updates": 3}, {"ended": "interrupted"}, {"elapsed_s": 301.0}, {"elapsed_s": None}):
        write_result(run / "result.json", {**early, **other})
        with pytest.raises(ConfigError, match="never overwritten"), logger_context(tmp_path):
            pass
    write_result(run / "result.json", early)
    params = (run / "params.json").read_text()
    (run / "params.json").write_text(json.dumps({"config": {"record": "mine-v0"}}))
    with pytest.raises(ConfigError, match="never overwritten"), logger_context(tmp_path):
        pass
    (run / "params.json").write_text(params)
    with closing(DirectoryLock(run, "a run", "log_dir")), pytest.raises(ConfigError, match="is in use by a run"):
        logger_context(tmp_path).__enter__()
    assert (run / "mine.txt").read_text() == "kept"


def test_resuming_continues_the_same_files_from_the_trimmed_step(tmp_path: Path) -> None:
    config: dict[str, Any] = {"lr": 1, "compile": "auto"}
    with logger_context(tmp_path, config=config, snapshot_mode="all", console=False) as run:
        add_choices(tmp_path / "run_0/params.json", {"compile": "false"})
        for step in (10, 20, 30):
            run.log({"env_steps": step, "a": 1.0})
            run.snapshot(lambda step=step: {"n": step}, step)
    with logger_context(tmp_path, config={"lr": 2, "compile": "false"}, resume=True, console=False) as run:
        run.truncate_after(20)
        run.log({"env_steps": 30, "a": 2.0})
        assert run.directory == tmp_path / "run_0"
    rows = read_csv(tmp_path / "run_0/progress.csv")[1]
    assert [(row["env_steps"], row["a"]) for row in rows] == [("10", "1.0"), ("20", "1.0"), ("30", "2.0")]
    params = json.loads((tmp_path / "run_0/params.json").read_text())
    assert params["config"] == config
    assert [entry["changed"] for entry in params["resumed"]] == [{"lr": 2}]


def test_a_run_is_not_over_from_the_moment_when_its_rows_are_cut(tmp_path: Path) -> None:
    """A process killed there leaves rows of a run that goes on, which must not count as a complete one."""
    with logger_context(tmp_path, console=False) as run:
        run.log({"env_steps": 10})
        run.log({"env_steps": 20})
        run.write_result({"ended": "completed"})
    with logger_context(tmp_path, console=False, resume=True) as run:
        assert (run.directory / "result.json").is_file()
        run.truncate_after(10)
        assert not (run.directory / "result.json").exists()
        assert len(json.loads((run.directory / "params.json").read_text())["resumed"]) == 1


def test_a_full_disk_when_a_run_goes_on_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logger_context(tmp_path, console=False) as run:
        run.log({"env_steps": 10})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with logger_context(tmp_path, console=False, resume=True) as run:
        monkeypatch.setattr("rlframe.record.directory.replace_json", full)
        with pytest.raises(RecordError, match=r"params.json .*No space left"):
            run.truncate_after(10)
    monkeypatch.undo()
    with logger_context(tmp_path, console=False, resume=True, snapshot_errors="continue") as run:
        monkeypatch.setattr("rlframe.record.directory.replace_json", full)
        run.truncate_after(10)
        monkeypatch.undo()
        run.log({"env_steps": 20})
    assert len(json.loads((run.directory / "params.json").read_text())["resumed"]) == 1, "tried again at the next row"


def test_resume_takes_the_run_directory_itself_whatever_its_name(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False):
        pass
    (tmp_path / "run_0").rename(tmp_path / "mine")
    with logger_context(tmp_path / "mine", resume=True, console=False) as run:
        assert run.directory == tmp_path / "mine"


def test_resuming_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"), logger_context(tmp_path, resume=True):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=f"cannot create {tmp_path / 'file' / 'run_0'}"),
        logger_context(tmp_path / "file"),
    ):
        pass


def test_a_directory_that_is_a_link_to_nothing_is_named_with_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    said = r"link links to .*/gone, which does not exist; use"
    with pytest.raises(ConfigError, match=said), logger_context(tmp_path / "link"):
        pass


def test_a_config_that_json_cannot_hold_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^f=.* cannot be written"), logger_context(tmp_path, config={"f": print}):
        pass
    with logger_context(tmp_path, config={}, console=False):  # the failed start has left nothing in the way
        pass


def failing_run(log_dir: Path) -> None:
    with logger_context(log_dir, console=False) as run:
        run.log({"env_steps": 10, "a": 1.0})
        raise ZeroDivisionError("by zero")


def test_runs_that_overlap_leave_the_level_of_messages_as_it_was(tmp_path: Path) -> None:
    level = LOGGER.level
    runs = [(copy_context(), logger_context(tmp_path, n, console=False)) for n in range(2)]
    for context, run in runs:
        context.run(run.__enter__)
    for context, run in runs:  # the first one ends first
        assert LOGGER.level == logging.DEBUG
        context.run(run.__exit__, None, None, None)
    assert LOGGER.level == level


def test_an_exception_is_logged_reraised_and_closes_everything(tmp_path: Path) -> None:
    handlers, level = list(LOGGER.handlers), LOGGER.level
    open_before = psutil.Process().num_fds()
    with pytest.raises(ZeroDivisionError):
        failing_run(tmp_path)
    assert "ZeroDivisionError: by zero" in (tmp_path / "run_0/debug.log").read_text()
    assert (LOGGER.handlers, LOGGER.level) == (handlers, level)
    assert psutil.Process().num_fds() == open_before
    assert isinstance(current_run(), NullRun)
    with pytest.raises(ConfigError, match="this run has no directory, as it is not recorded; give it one by log_dir="):
        _ = current_run().directory


def test_a_logger_that_cannot_close_does_not_keep_the_others_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(logger: TensorBoardLogger) -> None:
        logger._file.close()
        raise OSError("disk gone")

    handlers, open_before = list(LOGGER.handlers), psutil.Process().num_fds()
    monkeypatch.setattr(TensorBoardLogger, "close", broken)
    with logger_context(tmp_path, console=False):
        pass
    assert "disk gone" in caplog.text
    assert handlers == LOGGER.handlers
    assert psutil.Process().num_fds() == open_before


def test_debug_log_gets_the_messages_of_workers_and_the_console_those_from_info_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = logging.getLogger("rlframe.worker.3")
    with logger_context(tmp_path):
        worker.debug("quiet")
        worker.info("environment [4] ready")
        worker.warning("slow")
    worker.info("too late")
    log = (tmp_path / "run_0/debug.log").read_text()
    for level, text in (("DEBUG", "quiet"), ("INFO", "environment [4] ready"), ("WARNING", "slow")):
        assert any(level in line and f"rlframe.worker.3: {text}" in line for line in log.splitlines())
    assert "too late" not in log
    assert capsys.readouterr().out == "environment [4] ready\nwarning: slow\n"


def test_current_run_is_the_innermost_open_one(tmp_path: Path) -> None:
    with logger_context(tmp_path, 0, console=False) as outer:
        with logger_context(tmp_path, 1, console=False) as inner:
            assert current_run() is inner
        assert current_run() is outer


def test_a_null_run_writes_nothing_shows_nothing_and_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def forbidden() -> None:
        raise AssertionError("the state was asked for")

    run = current_run()
    run.log({"env_steps": 1})
    run.progress(1, 10)
    assert run.snapshot(forbidden, 1, 1.0, final=True) is None
    run.truncate_after(0)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_row_needs_env_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs env_steps, got a"), logger_context(tmp_path, console=False) as run:
        run.log({"a": 1.0})


def test_a_row_of_floats_counts_steps_whole(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        run.log({"a": 1.0, "env_steps": 25_600.0})
    assert (tmp_path / "run_0/progress.csv").read_text() == "env_steps,a\n25600,1.0\n"


def test_snapshot_meta_has_steps_updates_and_score(tmp_path: Path) -> None:
    from rlframe.record.snapshot import load_snapshot

    with logger_context(tmp_path, snapshot_mode="best", console=False) as run:
        run.snapshot(lambda: {"n": 1}, 10, 2.5, updates=4)
        run.snapshot(lambda: {"n": 2}, 20, math.nan, updates=8)
    assert load_snapshot(tmp_path / "run_0/snapshot/best") == ({"n": 1}, {"env_steps": 10, "updates": 4, "score": 2.5})
    assert load_snapshot(tmp_path / "run_0")[1]["env_steps"] == 20


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_has_one_run_at_a_time(tmp_path: Path, resume: bool) -> None:
    with logger_context(tmp_path, console=False) as run:
        again = logger_context(tmp_path, console=False, resume=resume)
        with pytest.raises(ConfigError, match="is in use" if resume else "not empty"), again:
            pass
        run.log({"env_steps": 1})
    with logger_context(tmp_path, console=False, resume=True):
        pass


def test_values_are_logged_under_the_names_of_their_prefixes() -> None:
    metrics = Metrics()
    with collect_in(metrics):
        logger.record_tabular("loss", 1.0)
        logger.record_tabular("loss", 3.0)
        with logger.tabular_prefix("critic/"), logger.tabular_prefix("first_"):
            logger.record_tabular("loss", 5.0)
        logger.record_tabular_misc_stat("mine/q", [1.0, 2.0, 6.0])
        logger.dump_tabular()
    found = metrics.flush()
    assert (found["script/loss"], found["critic/first_loss"]) == (2.0, 5.0)
    q = [found[f"mine/q{name}"] for name in ("Average", "Std", "Median", "Min", "Max")]
    assert q == pytest.approx([3.0, math.sqrt(14 / 3), 2.0, 1.0, 6.0])


def test_no_values_are_nan() -> None:
    metrics = Metrics()
    with collect_in(metrics):
        logger.record_tabular_misc_stat("mine/q", [])
    assert math.isnan(metrics.flush()["mine/qAverage"])


def test_messages_have_their_prefixes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlframe")
    with logger.prefix("itr 3 | "), logger.prefix("rank 0 | "):
        logger.log("saved")
    logger.log("done")
    assert [record.getMessage() for record in caplog.records] == ["itr 3 | rank 0 | saved", "done"]
