"""run_study takes Python objects in variants, and writes them as words of a command."""

import functools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
import torch

from rlframe.algos import ppo
from rlframe.study import run_study
from tests.experiment import forms
from tests.experiment.forms import FastPPO, Slower, Walk

PRINTS = [sys.executable, "-c", "import sys; print(sys.argv)"]


def words_of(variant: dict[str, Any], folder: Path, command: list[str] = PRINTS) -> dict[str, str]:
    run_study(command, [variant], [0], str(folder))
    return json.loads((folder / "experiment.json").read_text())["variants"][0]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that is run as a script, with a class of its own."""
    main = ModuleType("__main__")
    main.__file__ = "/elsewhere/script.py"
    main.Own = type("Own", (Walk,), {"__module__": "__main__", "__qualname__": "Own"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def test_objects_of_variants_are_written_by_their_names(tmp_path: Path) -> None:
    variant = {"env": Walk, "callbacks": [Slower], "algo": {"name": FastPPO, "optimizer": torch.optim.RAdam}}
    assert words_of({**variant, "model": {"hidden": [8, 8]}, "explore": 3, "do": "all"}, tmp_path) == {
        "env": "tests.experiment.forms:Walk",
        "callbacks": "tests.experiment.forms:Slower",
        "algo": "tests.experiment.forms:FastPPO",
        "algo.optimizer": "torch.optim.radam:RAdam",
        "model.hidden": "8,8",
        "explore": "3",  # any program's keys
        "do": "all",
    }


def test_a_config_gives_the_words_of_its_keys(tmp_path: Path) -> None:
    words = words_of({"algo": ppo.Config(epochs=3)}, tmp_path)
    assert (words["algo"], words["algo.epochs"]) == ("ppo", "3")


def test_a_class_of_a_script_is_named_by_its_file(tmp_path: Path, script: ModuleType) -> None:
    assert words_of({"env": script.Own}, tmp_path / "other")["env"] == "/elsewhere/script.py:Own"
    assert words_of({"env": script.Own}, tmp_path / "same", [*PRINTS, script.__file__])["env"] == "__main__:Own"


@pytest.mark.parametrize(
    "env", [lambda: Walk(), Walk(), functools.partial(Walk, 4)], ids=["lambda", "object", "partial"]
)
def test_an_object_without_a_name_is_refused(env: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_study(PRINTS, [{"env": env}], [0], str(tmp_path / "study")) == 2
    assert (
        "has no name in other programs, as the runs of a study are; define it in a .py file" in capsys.readouterr().err
    )


def test_a_class_of_a_notebook_is_refused(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    del script.__file__
    assert run_study(PRINTS, [{"env": script.Own}], [0], str(tmp_path / "study")) == 2
    assert "env=__main__:Own has no name in other programs" in capsys.readouterr().err


def test_a_run_that_imports_the_script_starts_no_study(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.__spec__ = gymnasium.__spec__.__class__("rlframe.launch", None)
    assert run_study(PRINTS, [{"env": forms.short_walk}], [0], str(tmp_path / "study")) == 2
    assert "rlframe.launch imports this script; call run_study below if __name__ ==" in capsys.readouterr().err
