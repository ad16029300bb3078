"""rlframe.entrypoint: a function with key=value words, whose errors and exit statuses are those of the commands."""

import re
from pathlib import Path

import pytest

import rlframe
from rlframe.core.errors import ConfigError, Interrupted

got: dict[str, object] = {}


def train(
    n_steps: int, rate: float = 0.5, fast: bool = False, hidden: tuple[int, ...] = (64,), log_dir: str = ""
) -> int | None:
    got.update(n_steps=n_steps, rate=rate, fast=fast, hidden=hidden, log_dir=log_dir)
    if log_dir == "wrong":
        raise ConfigError("log_dir is wrong")
    if log_dir == "stopped":
        stop = Interrupted(2, "stopped at env_steps 7")
        stop.directory = Path("a/run_0")
        raise stop
    return 3 if log_dir == "three" else None


def called(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        rlframe.entrypoint(train, words)
    return ended.value.code


def test_words_have_the_types_of_the_parameters() -> None:
    assert called("n_steps=1e5", "rate=1e-3", "fast=true", "hidden=32,16", "log_dir=three") == 3
    assert got == {"n_steps": 100_000, "rate": 1e-3, "fast": True, "hidden": (32, 16), "log_dir": "three"}
    assert called("n_steps=-2_000") == 0
    assert got == {"n_steps": -2000, "rate": 0.5, "fast": False, "hidden": (64,), "log_dir": ""}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("n_step=3", "n_steps= is missing"),
        ("n_steps=3 rats=1", "unknown key .rats.; the keys are n_steps, rate, fast, .*; did you mean rate?"),
        ("n_steps=1.5", "n_steps='1.5': '1.5' is not a whole number"),
        ("n_steps=1 fast=maybe", "fast='maybe': write true or false"),
        ("n_steps=1 hidden=a", "hidden='a': "),
        ("n_steps=1 log_dir=wrong", "log_dir is wrong"),
    ],
)
def test_an_error_is_one_line_with_exit_status_2(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(*words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(says, error)


def test_any_function_can_be_one() -> None:
    found: list[object] = []

    def unannotated(first=1, n=3, /, fast=True, rate=0.5, sizes=(64,), *rest, seed: int | None = None, **others):
        found.extend([first, n, fast, rate, sizes, rest, seed, others])
        return True  # which is no exit status

    words = ["n=5", "fast=false", "rate=1", "sizes=[32,16]", "seed=1e3"]
    with pytest.raises(SystemExit) as ended:
        rlframe.entrypoint(unannotated, words)
    assert ended.value.code == 0
    assert found == [1, 5, False, 1.0, (32, 16), (), 1000, {}]


def test_a_default_without_entries_takes_a_list_with_brackets() -> None:
    found: list[object] = []
    with pytest.raises(SystemExit):
        rlframe.entrypoint(lambda names=(): found.append(names), ["names=[a,b]"])
    assert found == [("a", "b")]


def test_a_name_for_type_checkers_alone_hides_no_other_type() -> None:
    found: list[object] = []

    def typed(n: "int", x: "float" = 1, out: "Nowhere | None" = None) -> None:  # type: ignore[name-defined]  # noqa: F821
        found.extend([n, x, out])

    with pytest.raises(SystemExit):
        rlframe.entrypoint(typed, ["n=1000", "x=0.5", "out=a"])
    assert found == [1000, 0.5, "a"]


def test_lists_may_have_brackets_and_whole_numbers_are_exact() -> None:
    assert called("n_steps=9007199254740993", "hidden=[32,16]") == 0
    assert got["n_steps"] == 9007199254740993
    assert got["hidden"] == (32, 16)
    assert called("n_steps=1", "hidden=32") == 0
    assert got["hidden"] == (32,)


def test_ctrl_c_names_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("n_steps=1", "log_dir=stopped") == 130
    shown = capsys.readouterr()
    assert shown.out == "run: a/run_0\n"
    assert shown.err == "\nSIGINT: stopped at env_steps 7\n"


def test_help_lists_the_parameters_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("--help") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][0] == "rlframe.entrypoint:"
    assert lines[-5:-3] == [["n_steps=", "int"], ["rate=", "float", "0.5"]]
