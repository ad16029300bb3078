"""What every command says of an error of the operating system, in one line."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from rlframe import evaluate, export, launch, plot
from rlframe.core.command_line import paths_and_settings, run_command
from rlframe.core.errors import ConfigError
from rlframe.core.files import prepare_output

LONG = "x" * 300  # no file system has such names


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (launch, [f"resume={LONG}"]),
        (launch, [f"experiment={LONG}"]),
        (launch, ["env=CartPole-v1", f"callbacks=[./{LONG}.py:A]"]),
        (launch, ["env=CartPole-v1", f"algo={LONG}.py"]),
        (evaluate, [LONG]),
        (export, [LONG]),
        (plot, [LONG]),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_refused_in_one_line(
    command: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    said = capsys.readouterr().err
    assert said.endswith(" characters): File name too long; use another path\n")
    assert len(said.splitlines()) == 1
    assert len(said) < 300


def test_an_output_of_such_a_name_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"out=x{300} cannot be written: File name too long"):
        prepare_output(Path("x" * 300))


def test_a_file_that_may_not_be_read_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def body(argv: list[str]) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/other/run_0/params.json")

    assert run_command(body, []) == 2
    assert capsys.readouterr().err == "error: /other/run_0/params.json: Permission denied; use another path\n"


def test_any_other_error_keeps_its_traceback() -> None:
    def body(argv: list[str]) -> int:
        raise OSError(errno.EIO, "Input/output error", "file")

    with pytest.raises(OSError, match="Input/output error"):
        run_command(body, [])


def test_a_name_that_the_terminal_cannot_show_is_printed_with_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert run_command(lambda words: print(*words) or 0, ["log_dir=\u00fc"]) == 0
    assert written.getvalue() == b"log_dir=\\xfc\n"
    assert sys.stdout.errors == "strict", "as it was"


def test_a_value_that_begins_with_the_home_directory_is_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    seen: list[str] = []
    words = ["resume=~/runs/a", "sweep.seed=0,1", "env=~a", "stop=a >= ~/b", "x=[~/a,~/b]"]
    run_command(lambda words: seen.extend(words) or 0, words)
    assert seen == ["resume=/home/ada/runs/a", *words[1:4], "x=[/home/ada/a,/home/ada/b]"]


def test_paths_are_told_from_settings_and_the_log_beside_a_run_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run_0", "a=b"):
        (tmp_path / name).mkdir()
    words = ["run_0", "run_0.log", "other.log", "a=b", "c=d", "e/f=g", "h=i/j", f"long={'x' * 300}"]
    assert paths_and_settings(words) == (["run_0", "other.log", "a=b", "e/f=g"], words[4:5] + words[6:])
