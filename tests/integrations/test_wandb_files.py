"""What a stranger's run directory may hold for W&B: nothing outside is read, written or waited for."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlframe.core.errors import ConfigError
from rlframe.record import logger_context
from tests.experiment.hostile import SECRET, SPECIAL, at_most

MODULE = "rlframe.integrations.wandb"


class Run:
    """A run of W&B, as its server has it."""

    step = 0

    def define_metric(self, name: str, step_metric: str = "") -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        self.step += 1

    def finish(self, exit_code: int) -> None: ...


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """WandbLogger with a package that sends nothing."""
    package: Any = types.ModuleType("wandb")
    setup = types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))
    package.init, package.setup, package.Settings = lambda **_: Run(), lambda: setup, dict
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", package)
        patch.delitem(sys.modules, MODULE, raising=False)
        yield importlib.import_module(MODULE).WandbLogger
    sys.modules.pop(MODULE, None)


def write(logger: Any, directory: Path) -> None:
    (directory / "progress.jsonl").write_text(json.dumps({"env_steps": 1, "a": 2.0}) + "\n")
    logger(directory, {}, "run").close()


@pytest.mark.parametrize("how", sorted(set(SPECIAL) - {"hardlink"}))
def test_a_file_of_sent_steps_that_is_a_link_pipe_or_device_is_an_error_before_wandb_starts(
    how: str, logger: Any, tmp_path: Path
) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "run"
    outside.write_text(SECRET)
    directory.mkdir()
    SPECIAL[how](directory / "wandb_sent.jsonl", outside)
    with at_most(10), pytest.raises(ConfigError, match=r"^\S*/wandb_sent.jsonl is not a regular file"):
        write(logger, directory)
    assert outside.read_text() == SECRET


def test_a_hard_link_to_another_file_is_not_written_through(logger: Any, tmp_path: Path) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "run"
    outside.write_text(SECRET)
    directory.mkdir()
    (directory / "wandb_sent.jsonl").hardlink_to(outside)
    write(logger, directory)
    assert outside.read_text() == SECRET
    assert (directory / "wandb_sent.jsonl").read_text() == f'{SECRET}\n[0, 1, ["a"]]'


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_a_folder_of_wandb_that_is_a_link_is_an_error(folder: str, logger: Any, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{folder} is a link, and W&B would write into its target; remove it"):
        write(logger, tmp_path)


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_settings_of_wandb_in_a_runs_directory_are_an_error(folder: str, logger: Any, tmp_path: Path) -> None:
    """W&B started in this directory would send its key to the server that they name."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "settings").write_text("[default]\nbase_url = https://example.com\n")
    with pytest.raises(ConfigError, match=rf"{folder}/settings may name another server for W&B; remove it"):
        write(logger, tmp_path)


@pytest.mark.parametrize(
    "content", [b"[[],[],[]]\n" * 1_000, b"[" * 100_000, b'{"a": 1}\n3\nnull\n[1, 2, [[]]]', b"\xff\x00"]
)
def test_lines_that_are_no_steps_are_passed_over(content: bytes, logger: Any, tmp_path: Path) -> None:
    (tmp_path / "wandb_sent.jsonl").write_bytes(content)
    write(logger, tmp_path)
    assert (tmp_path / "wandb_sent.jsonl").read_bytes() == content + b'\n[0, 1, ["a"]]'


def test_a_run_opened_with_such_a_link_records_nothing(logger: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text(SECRET)
    options = {"loggers": [f"{MODULE}:WandbLogger"], "console": False}
    with logger_context(tmp_path, **options) as run:
        run.log({"env_steps": 1, "a": 2.0})
    (tmp_path / "run_0/wandb_sent.jsonl").unlink()
    (tmp_path / "run_0/wandb_sent.jsonl").symlink_to(outside)
    before = (tmp_path / "run_0/params.json").read_text()
    with pytest.raises(ConfigError, match="is not a regular file"), logger_context(tmp_path, **options, resume=True):
        pass
    assert (outside.read_text(), (tmp_path / "run_0/params.json").read_text()) == (SECRET, before)
