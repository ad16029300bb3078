"""run_study takes Python objects in variants, and writes them as words of a command."""

import functools
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
import torch

from rlframe.algos import ppo
from rlframe.analysis.curves import configs_of
from rlframe.core.errors import ConfigError
from rlframe.core.names import find_attribute
from rlframe.core.objects import ObjectName
from rlframe.core.own_code import own_code
from rlframe.experiment.settings import from_flat
from rlframe.study import run_study
from rlframe.study.objects import StudyObjects
from rlframe.study.record import FILE
from tests.experiment import forms
from tests.experiment.forms import FastPPO, Slower, Walk
from tests.fork_server import run_python
from tests.processes import DEADLINE_S

PRINTS = [sys.executable, "-c", "import sys; print(sys.argv)"]


def words_of(variant: dict[str, Any], folder: Path, command: list[str] = PRINTS) -> dict[str, str]:
    run_study(command, [variant], [0], str(folder))
    return json.loads((folder / "experiment.json").read_text())["variants"][0]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module that is run as a script, with a class of its own."""
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "script.py")
    Path(main.__file__).touch()
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
    assert words_of({"env": script.Own}, tmp_path / "other")["env"] == f"{script.__file__}:Own"
    assert words_of({"env": script.Own}, tmp_path / "same", [*PRINTS, script.__file__])["env"] == "__main__:Own"


@pytest.mark.parametrize(
    "env", [lambda: Walk(), Walk(), functools.partial(Walk, 4)], ids=["lambda", "object", "partial"]
)
def test_an_object_without_a_name_is_kept_for_the_runs(env: Any, tmp_path: Path) -> None:
    name = words_of({"env": env}, tmp_path / "study")["env"]
    assert re.fullmatch(rf"{tmp_path}/study/objects_\w+\.py:\w+", name)
    assert isinstance(find_attribute(name, "env")(), Walk)


def test_a_kept_object_counts_by_what_it_is_in_any_study(tmp_path: Path) -> None:
    found = []
    for folder, n in (("one", 4), ("other", 4), ("third", 5)):
        name = words_of({"env": functools.partial(Walk, n)}, tmp_path / folder)["env"]
        find_attribute(name, "env")
        params = {"config": {"env": name}, "code": own_code({"env": name})}
        assert [*params["code"]] == [name]
        found.append(configs_of(params)[0]["env"])
    assert found[0] == found[1] != found[2]
    assert re.fullmatch(r"Walk_\w{8}@\w{8}", found[0])


def test_one_object_that_cannot_be_made_stops_no_run_with_another(tmp_path: Path) -> None:
    bad = functools.partial(Walk, Unmade())
    name = words_of({"env": lambda: 1, "callbacks": [bad]}, tmp_path)["env"]
    assert find_attribute(name, "env")() == 1


class Unmade:
    """Whose pickle is of no use elsewhere."""

    def __reduce__(self) -> Any:
        return open, ("/no/such/file",)


def test_a_class_of_a_notebook_is_kept_once(tmp_path: Path, script: ModuleType) -> None:
    del script.__file__
    words = words_of({"env": script.Own, "eval.env": script.Own, "callbacks": [Slower()]}, tmp_path / "study")
    assert words["env"] == words["eval.env"]
    assert re.search(r"\.py:Own_[0-9a-f]{8}$", words["env"])
    assert re.search(r"\.py:Slower_[0-9a-f]{8}$", words["callbacks"])
    assert find_attribute(words["env"], "env").__mro__[1] is Walk


@pytest.mark.parametrize("begun", [False, True])
def test_an_error_before_a_study_begins_leaves_no_objects_and_one_after_it_keeps_them(
    begun: bool, tmp_path: Path
) -> None:
    objects = StudyObjects(tmp_path / "study")
    objects.name(ObjectName("walk()", lambda: Walk(), "env"), PRINTS)

    def fail() -> None:
        if begun:
            (tmp_path / "study" / FILE).write_text("{}")
        raise ConfigError("late")

    with pytest.raises(ConfigError, match="late"), objects.kept():
        fail()
    assert (tmp_path / "study").exists() == begun
    assert len([*tmp_path.glob("study/objects_*")]) == 2 * begun


def test_a_study_goes_on_with_equal_objects_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = words_of({"env": lambda: 1}, tmp_path)["env"]
    assert run_study(PRINTS, [{"env": lambda: 1}], [0], str(tmp_path)) == 0
    assert "1 already done" in capsys.readouterr().out
    assert run_study(PRINTS, [{"env": lambda: 2}], [0], str(tmp_path)) == 2, "its returns would be the old ones"
    said = capsys.readouterr().err
    assert "started with other arguments: env=" in said
    assert "(an object of this name whose code or arguments have changed)" in said
    assert find_attribute(name, "env")() == 1


def test_a_study_keeps_the_objects_of_its_earlier_calls(tmp_path: Path) -> None:
    name = words_of({"env": lambda: 1, "do": "a"}, tmp_path)["env"]
    assert run_study(PRINTS, [{"env": lambda: 1, "do": "a"}, {"env": lambda: 2, "do": "b"}], [0], str(tmp_path)) == 0
    assert find_attribute(name, "env")() == 1


def test_a_study_says_which_code_has_changed_since_its_runs_were_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_walk.py").write_text("import own_sizes")
    (tmp_path / "own_sizes.py").write_text("n = 3")
    variant, study = {"env": "own_walk:Walk"}, tmp_path / "study"
    words_of(variant, study)
    (study / "run_0").mkdir()
    (study / "run_0/params.json").write_text(json.dumps({"config": variant, "code": own_code(variant)}))
    for text, is_said in (("n = 3", False), ("n = 4", True)):
        (tmp_path / "own_sizes.py").write_text(text)
        assert run_study(PRINTS, [variant], [0], str(study)) == 0
        assert ("warning: own_walk has changed since 1 run ended, or what it" in capsys.readouterr().out) == is_said


def test_a_run_that_imports_the_script_starts_no_study(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.__spec__ = gymnasium.__spec__.__class__("rlframe.launch", None)
    assert run_study(PRINTS, [{"env": forms.short_walk}], [0], str(tmp_path / "study")) == 2
    assert "rlframe.launch imports this script; call run_study below if __name__ ==" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["train", "build", "restore"])
def test_a_script_that_its_study_imports_starts_no_run(
    call: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "script.py").write_text(f"import rlframe\nrlframe.{call}('nowhere')\n")
    script.__file__, script.__spec__ = str(tmp_path / "script.py"), None
    with pytest.raises(ConfigError, match=f"its own study imports this script; call {call} below if __name__ =="):
        importlib.import_module("script")


def test_a_script_that_trains_and_starts_a_study_of_its_own_class_is_not_run_again(tmp_path: Path) -> None:
    """The study names the class by the script's file, which is imported under its own name to check the settings."""
    (tmp_path / "own_script.py").write_text(
        "print('started', __name__)\nimport rlframe\nfrom tests.experiment.forms import SMALL, Walk\n"
        "class Own(Walk): pass\n"
        f"rlframe.train('ppo', Own, n_steps=64, log_dir={str(tmp_path / 'run')!r}, sampler='serial', **SMALL)\n"
        f"rlframe.run_study([{{'algo': 'ppo'}}], env=Own, log_dir={str(tmp_path / 'study')!r})\n"
    )
    found = run_python([sys.executable, str(tmp_path / "own_script.py")], cwd=tmp_path, timeout=DEADLINE_S)
    assert [line for line in found.stdout.splitlines() if line.startswith("started")] == [
        "started __main__",
        "started own_script",
    ]
    assert "its own study imports this script; call train below if __name__ ==" in found.stderr
    assert (tmp_path / "run/run_0/result.json").is_file()


@pytest.mark.slow
def test_a_script_that_is_imported_for_its_environment_starts_no_study(tmp_path: Path) -> None:
    """The study looks at the script's environment before it starts; else each look would start another."""
    (tmp_path / "script.py").write_text(
        "import rlframe\nfrom tests.experiment.forms import Walk\nclass Own(Walk): pass\n"
        f"rlframe.run_study([{{'algo': 'ppo'}}], env=Own, log_dir={str(tmp_path / 'study')!r})\n"
    )
    command = [sys.executable, str(tmp_path / "script.py")]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert "its own study imports this script; call run_study below if __name__ ==" in found.stderr
    assert not (tmp_path / "study").exists()


def test_arguments_of_the_environment_arrive_as_they_were_given(tmp_path: Path) -> None:
    given = {"cost": 1e-5, "limit": None, "most": math.inf, "name": "1e-5", "size": [2, 3], "on": True}
    given |= {
        "map": {0: "a", True: "yes: no"},
        "sign": "😀",
        "lines": "a\nb ",
        "twice": [given["size"]] * 2,
        "day": "2020-01-01",
    }
    words = words_of({"env": "CartPole-v1", "env_kwargs": given}, tmp_path)
    assert from_flat(words).env_kwargs == given
    typed = {"env": "CartPole-v1", "env_kwargs.cost": "1e-5", "env_kwargs.size": "[2, 1.5e3]"}
    assert from_flat(typed).env_kwargs == {"cost": 1e-5, "size": [2, 1500.0]}


def test_an_argument_of_the_environment_that_no_command_can_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_study(PRINTS, [{"env": "CartPole-v1", "env_kwargs": {"reward": len}}], [0], str(tmp_path)) == 2
    assert "env_kwargs: " in (said := capsys.readouterr().err)
    assert "is not a number, text, list or dict of them" in said
