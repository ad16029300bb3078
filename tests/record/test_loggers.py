"""TensorBoard, and `loggers=`: which loggers a run has."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

from rlframe import launch
from rlframe.core.errors import ConfigError
from rlframe.experiment.trust import foreign
from rlframe.record import logger_context
from rlframe.record.loggers import TensorBoardLogger, check_loggers, find_loggers
from tests.tables import read_csv


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


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


@pytest.mark.parametrize("name", ["env/a\nb", "env/a\rb", "env/a\udce9b"])
def test_a_name_that_would_break_a_line_of_the_tables_is_written_with_escapes(name: str, tmp_path: Path) -> None:
    row = {name: 2.0, 'env/"quoted"': 3.0}
    with logger_context(tmp_path, console=False) as run:
        for step in (1, 2):
            run.log({"env_steps": step, **row})
            run.log_episodes([{"env_steps": step, **row}])
    with logger_context(tmp_path, console=False, resume=True) as run:
        run.truncate_after(1)
        run.log({"env_steps": 3, **row})
    escaped = name.encode("unicode_escape").decode()
    for file, steps in (("progress.csv", ["1", "3"]), ("episodes.csv", ["1"])):
        columns, rows = read_csv(run.directory / file)
        assert columns == ["env_steps", escaped, 'env/"quoted"']
        assert [each["env_steps"] for each in rows] == steps
    assert not list(run.directory.glob("abandoned_*"))
