"""Loggers of rows: no lost, incomplete or repeated rows; and `loggers=`, which ones a run has."""

import importlib.machinery
import importlib.util
import json
import math
import os
from pathlib import Path

import pytest

from rlframe import launch
from rlframe.core import files
from rlframe.core.errors import ConfigError, RecordError
from rlframe.experiment.trust import foreign
from rlframe.record import logger_context, loggers
from rlframe.record.loggers import CsvLogger, JsonlLogger, TensorBoardLogger, check_loggers, find_loggers
from tests.tables import read_csv


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_late_column_is_added_and_earlier_rows_keep_their_cells(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    logger = CsvLogger(file)
    logger.write({"env_steps": 10, "a": 0.5})
    logger.write({"env_steps": 20, "late,name": 1.0})
    logger.write({"env_steps": 30, "a": 1e-300, "late,name": float("nan")})
    logger.close()
    assert file.read_text() == 'env_steps,a,"late,name"\n10,0.5,\n20,,1.0\n30,1e-300,nan\n'


def test_a_row_is_in_the_file_before_anything_is_closed(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "progress.csv")
    logger.write({"env_steps": 10, "a": 0.1})
    assert (tmp_path / "progress.csv").read_text().endswith("10,0.1\n")
    logger.close()
    logger.close()


@pytest.mark.parametrize("torn", ["20,0.", "2" * 200_000], ids=["short", "of several blocks"])
def test_an_incomplete_last_line_is_dropped_and_the_file_continued(torn: str, tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text(f"env_steps,a\n10,0.5\n{torn}")
    logger = CsvLogger(file)
    logger.write({"env_steps": 20, "a": 0.75})
    logger.close()
    assert file.read_text() == "env_steps,a\n10,0.5\n20,0.75\n"


def test_a_damaged_header_is_an_error_and_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text('"env_steps,loss\n10,0.5\n20,0.25\n')
    with pytest.raises(RecordError, match=r"progress.csv is damaged: its first line names no column env_steps"):
        CsvLogger(path)
    assert path.read_text().endswith("20,0.25\n")


def test_a_file_torn_in_its_header_starts_anew(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text("env_st")
    logger = CsvLogger(file)
    logger.write({"env_steps": 20, "a": 0.75})
    logger.close()
    assert file.read_text() == "env_steps,a\n20,0.75\n"


def test_trimming_drops_rows_after_the_step_and_unreadable_ones(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text("env_steps,a\n10,1.0\n20,2.0\n\0\0,x\n30,3.0\n")
    logger = CsvLogger(file)
    logger.truncate_after(20)
    logger.write({"env_steps": 25, "a": 2.5})
    logger.close()
    assert [row["env_steps"] for row in read_csv(file)[1]] == ["10", "20", "25"]


def test_a_table_longer_than_one_from_another_person_may_be_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.iter_csv, "__defaults__", (100,))
    file = tmp_path / "episodes.csv"
    file.write_text("env_steps,a\n" + "10,1.0\n" * 50)
    with pytest.raises(ConfigError, match="362 bytes, more than the limit of 100"):
        next(files.iter_csv(file))
    logger = CsvLogger(file)
    logger.write({"env_steps": 20, "b": 2.0})
    logger.truncate_after(20)
    logger.close()
    assert file.read_text() == "env_steps,a,b\n" + "10,1.0,\n" * 50 + "20,,2.0\n"


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    logger = CsvLogger(file)
    logger.write({"env_steps": 10, "a": 1.0})
    whole = file.read_text()
    import resource
    import signal

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 3, limits[1]))
        with pytest.raises(OSError, match="bytes written"):
            logger.write({"env_steps": 20, "a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        logger.close()
    assert file.read_text() == whole


def test_a_kill_while_a_column_is_added_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress.csv"
    logger = CsvLogger(file)
    logger.write({"env_steps": 10, "a": 1.0})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        logger.write({"env_steps": 20, "b": 2.0})
    logger.close()
    assert file.read_text() == "env_steps,a\n10,1.0\n"


def test_tensorboard_reads_the_scalars_by_env_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, {}, "run")
    logger.write({"env_steps": 10, "a/b": 0.5})
    logger.write({"env_steps": 20, "a/b": 1.5})
    assert scalars(tmp_path, "a/b") == [(10, 0.5), (20, 1.5)]  # before it is closed
    logger.close()


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path, {}, "run")
    for step in (10, 20, 30):
        first.write({"env_steps": step, "a": 1.0})
    first.close()
    second = TensorBoardLogger(tmp_path, {}, "run")
    second.truncate_after(20)
    second.write({"env_steps": 30, "a": 2.0})
    second.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    assert scalars(tmp_path, "a") == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_damaged_line_costs_itself_and_no_line_after_it(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    logger = CsvLogger(path)
    for step in range(1, 4):
        logger.write({"env_steps": step, "x": 0.5})
    logger.close()
    path.write_bytes(path.read_bytes().replace(b"\n2,", b'\n"2,').replace(b"3,", b"3," + b"9" * 200_000 + b",", 1))
    assert [row["env_steps"] for row in read_csv(path)[1]] == ["1"]
    logger = CsvLogger(path)
    logger.write({"env_steps": 4, "x": 1.0})
    logger.close()
    assert [row["env_steps"] for row in read_csv(path)[1]] == ["1", "4"]


def test_trimming_drops_all_rows_from_the_first_later_one_on(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,algo/loss,eval/return_mean\n10,1.0,\n10,,5.0\n20,2.0,\n10,,6.0\n30,3.0,\n20,,7.0\n")
    logger = CsvLogger(path)
    logger.truncate_after(20)
    logger.close()
    assert path.read_text() == "env_steps,algo/loss,eval/return_mean\n10,1.0,\n10,,5.0\n20,2.0,\n10,,6.0\n"


def strict(text: str) -> list[dict[str, float]]:
    """The rows of a progress.jsonl, read by a parser that knows no NaN; strings become numbers."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return [{name: float(value) for name, value in row.items()} for row in rows]


def test_jsonl_has_the_rows_of_csv_also_after_a_kill_between_the_two_and_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    rows: list[dict[str, float]] = [
        {"env_steps": 1, "a": 0.1, "b": math.nan},
        {"env_steps": 2, "late": math.inf, "b": -math.inf},
        {"env_steps": 3, "a": 1e-300, "b": 7},
    ]
    table = CsvLogger(path)
    lines = JsonlLogger(path)
    for row in rows[:2]:
        table.write(row)
        lines.write(row)
    table.write(rows[2])  # killed here
    table.close()
    lines.close()
    assert repr(strict((tmp_path / "progress.jsonl").read_text())) == repr(as_floats(rows[:2]))
    table = CsvLogger(path)
    lines = JsonlLogger(path)
    for logger in (table, lines):
        logger.truncate_after(3)
        logger.close()
    assert by_name(strict((tmp_path / "progress.jsonl").read_text())) == by_name(as_floats(rows))
    cells = [{name: float(cell) for name, cell in row.items() if cell} for row in read_csv(path)[1]]
    assert by_name(strict((tmp_path / "progress.jsonl").read_text())) == by_name(cells)


def as_floats(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in row.items()} for row in rows]


def by_name(rows: list[dict[str, float]]) -> str:
    """Text that is equal for equal rows, NaN included, in any order of columns."""
    return repr([sorted(row.items()) for row in rows])


def test_a_torn_line_of_jsonl_is_replaced_on_resume(tmp_path: Path) -> None:
    (tmp_path / "progress.csv").write_text("env_steps,a\n10,0.5\n")
    (tmp_path / "progress.jsonl").write_text('{"env_steps": 10, "a": 0.5}\n{"env_st')
    table = CsvLogger(tmp_path / "progress.csv")
    lines = JsonlLogger(tmp_path / "progress.csv")
    for logger in (table, lines):
        logger.write({"env_steps": 20, "a": 1.0})
        logger.close()
    assert strict((tmp_path / "progress.jsonl").read_text()) == [{"env_steps": 10, "a": 0.5}, {"env_steps": 20, "a": 1}]


def test_a_strangers_table_cannot_grow_without_end_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.csv"
    path.write_text(f"env_steps,{'x' * 5_000}\n" + "1,1\n" * 1_000)
    assert loggers._MAX_JSONL == 1 << 28
    monkeypatch.setattr(loggers, "_MAX_JSONL", 1 << 20)
    with pytest.raises(RecordError, match="its rows take more than 1,336,928 bytes as JSON"):
        JsonlLogger(path)


def test_rows_that_the_csv_has_lost_are_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "progress.csv"
    table, lines = CsvLogger(path), JsonlLogger(path)
    for step in (0, 100, 200):
        table.write({"env_steps": step})
        lines.write({"env_steps": step})
    lines.close()
    table.close()
    JsonlLogger(path).close()
    assert not (aside := tmp_path / "abandoned_progress.jsonl").exists()
    before = path.with_suffix(".jsonl").read_text()
    path.write_text("env_steps\n0\n1")
    JsonlLogger(path).close()
    assert aside.read_text() == before
    assert "progress.csv has only 1 of 3 rows; all are kept in abandoned_progress.jsonl" in caplog.text
    path.write_text("env_steps\n")
    JsonlLogger(path).close()
    assert aside.read_text() == before, "a second loss does not take the place of the first"


def test_a_table_of_many_rows_may_be_as_long_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("env_steps,algo/policy_loss\n" + "123456,0.123456\n" * 1_000)
    monkeypatch.setattr(loggers, "_MAX_JSONL", 1 << 10)
    JsonlLogger(path).close()
    assert (tmp_path / "progress.jsonl").stat().st_size > 3 * path.stat().st_size


HERE = "tests.record.own_loggers"
SHORT = [
    "env=CartPole-v1",
    "algo.epochs=1",
    "algo.minibatches=1",
    "sampler=serial",
    "eval.n_episodes=1",
    "runner.n_steps=300",
    "affinity=none",
]


def files_of(directory: Path) -> set[str]:
    return {path.name.split(".tfevents")[0] for path in directory.iterdir()}


def missing(name: str, package: str | None = None) -> None:
    return None


def test_without_loggers_there_is_no_event_file_but_csv_and_jsonl(tmp_path: Path) -> None:
    with logger_context(tmp_path, loggers=(), console=False) as run:
        run.log({"env_steps": 1})
    of_run = {"debug.log", "episodes.csv", "params.json", "progress.csv", "progress.jsonl"}
    assert files_of(tmp_path / "run_0") == of_run


def test_an_empty_list_on_the_command_line_switches_tensorboard_off(tmp_path: Path) -> None:
    assert launch.main([*SHORT, "loggers=[]", f"log_dir={tmp_path}"]) == 0
    assert "events.out" not in files_of(tmp_path / "run_0")
    assert json.loads((tmp_path / "run_0/params.json").read_text())["config"]["loggers"] == []


def test_a_logger_of_ones_own_gets_directory_config_name_and_rows(tmp_path: Path) -> None:
    options = {"config": {"seed": 7}, "loggers": [f"{HERE}:Notes"], "console": False, "name": "mine"}
    with logger_context(tmp_path, **options) as run:
        run.log({"env_steps": 1})
    with logger_context(tmp_path, **options, resume=True) as run:
        run.truncate_after(0)
    notes = [json.loads(line) for line in (tmp_path / "run_0/notes.txt").read_text().splitlines()]
    start = ["open", "mine", 7]
    assert notes == [start, ["write", 1], ["close"], start, ["truncate_after", 0], ["close"]]


def test_a_logger_in_a_file_is_added_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loggers.py").write_text(f"from {HERE} import Notes as Mine\n")
    assert launch.main([*SHORT, f"log_dir={tmp_path}"]) == 0
    words = [f"resume={tmp_path / 'run_0'}", "runner.n_steps=2000", "loggers=[tensorboard,./my_loggers.py:Mine]"]
    assert launch.main(words) == 0
    assert '["truncate_after", ' in (tmp_path / "run_0/notes.txt").read_text()


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_an_unknown_logger_is_refused_with_the_nearest_before_anything_starts(
    dry_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*SHORT, f"dry_run={dry_run}", "loggers=[wandv]", f"log_dir={tmp_path / 'runs'}"]) == 2
    assert "loggers=wandv is none of tensorboard, wandb" in (said := capsys.readouterr().err)
    assert "did you mean wandb?" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_one_line_with_its_extra_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert launch.main([*SHORT, f"loggers={name}", f"log_dir={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert f'pip install "rlframe[{name}]"' in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_wandb_made_is_not_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = importlib.machinery.ModuleSpec("wandb", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    with pytest.raises(ConfigError, match="pip install"):
        check_loggers(["wandb"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"{HERE}:NotALogger"], "is not a subclass of rlframe.record.Logger"),
        ([f"{HERE}:Note"], "has no Note; did you mean Notes"),
        (["no_such_module:Mine"], "No module named 'no_such_module'"),
        (["./no_such_file.py:Mine"], "no_such_file.py does not exist"),
        (["tensorboard", "tensorboard"], "loggers names tensorboard more than once"),
    ],
)
def test_what_is_not_a_logger_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_loggers(names)


@pytest.mark.parametrize("value", [[], ["tensorboard", "wandb"], "[mlflow, trackio]", "[]", ""])
def test_built_in_loggers_need_no_trust(value: object) -> None:
    assert foreign({"loggers": value}) == []


@pytest.mark.parametrize("value", [["os:system"], "[tensorboard,./evil.py:Evil]", "evil:Evil", ["tensorboard", "x"]])
def test_code_in_loggers_needs_trust(value: object) -> None:
    assert len(foreign({"loggers": value})) == 1
