"""Parsing of config fields and module names, and their errors."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
from chz.blueprint import ExtraneousBlueprintArg, InvalidBlueprintArg

from rlframe.core.config import ConfigError, choice, count, fraction, names, nearest, option, sizes
from rlframe.core.parts import find_module, module_names, module_part


@chz.chz
class Part:
    n_steps: int = count(10, "a number of steps")
    hidden: tuple[int, ...] = sizes((64, 64), "widths")
    kind: str = choice("mean", ("mean", "median"), "which average")
    rate: float = option(0.1, "a rate")
    share: float = fraction(0.5, "a part")
    files: tuple[str, ...] = names((), "of your own")


def parse(*args: str) -> Part:
    return chz.Blueprint(Part).make_from_argv(list(args))


class TestFields:
    @pytest.mark.parametrize(("text", "value"), [("1e6", 1_000_000), ("1_000", 1000), ("7", 7), ("2.5e3", 2500)])
    def test_counts(self, text: str, value: int) -> None:
        n_steps = parse(f"n_steps={text}").n_steps
        assert n_steps == value
        assert type(n_steps) is int

    @pytest.mark.parametrize("text", ["1.5", "many", "inf", "nan"])
    def test_invalid_counts_are_errors(self, text: str) -> None:
        with pytest.raises(InvalidBlueprintArg, match="is not a"):
            parse(f"n_steps={text}")

    @pytest.mark.parametrize(
        ("text", "value"),
        [("[64,64]", (64, 64)), ("[32, 16]", (32, 16)), ("32", (32,)), ("(8,)", (8,)), ("[]", ())],
    )
    def test_sizes(self, text: str, value: tuple[int, ...]) -> None:
        assert parse(f"hidden={text}").hidden == value

    @pytest.mark.parametrize("text", ["[[1]]", "[1", "1]", "[1,,2]", "[1,[2]]", "([1])", "[]]", "[,1]", ","])
    def test_a_nested_or_torn_list_is_an_error(self, text: str) -> None:
        with pytest.raises(InvalidBlueprintArg, match="not a list of whole numbers"):
            parse(f"hidden={text}")
        with pytest.raises(InvalidBlueprintArg, match="not a list of names"):
            parse(f"files={text}")

    def test_an_invalid_list_of_sizes_is_an_error(self) -> None:
        with pytest.raises(InvalidBlueprintArg, match="not a list of whole numbers"):
            parse("hidden=[wide]")

    def test_choices(self) -> None:
        assert parse("kind=median").kind == "median"

    def test_another_choice_is_refused_with_the_list(self) -> None:
        with pytest.raises(ConfigError, match=r"^kind='medium' is not one of mean, median; did you mean median"):
            parse("kind=medium")

    def test_defaults(self) -> None:
        assert parse() == Part(n_steps=10, hidden=(64, 64), kind="mean", rate=0.1)

    def test_a_typo_is_answered_with_the_nearest_key(self) -> None:
        with pytest.raises(ExtraneousBlueprintArg, match="hidden"):
            parse("hiden=[3]")


def test_nearest_names_up_to_three() -> None:
    assert nearest("ppoo", ["ppo", "a2c", "dqn"]) == "; did you mean ppo?"
    assert nearest("zzz", ["ppo", "a2c"]) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ou", "ornstein_uhlenbeck"),
        ("param_noise", "parameter_noise"),
        ("eps", "epsilon"),
        ("Gausian", "gaussian"),
        ("step_7", "step_000000200"),
        ("random", ""),
        ("epsilon_greedy", "epsilon"),
        ("o", ""),
    ],
)
def test_a_name_is_suggested_if_it_is_similar_or_written_out(name: str, meant: str) -> None:
    known = ["own", "none", "gaussian", "ornstein_uhlenbeck", "parameter_noise", "epsilon", "step_000000200"]
    assert nearest(name, known) == (f"; did you mean {meant}?" if meant else "")


@pytest.mark.parametrize(
    ("field", "given"), [("n_steps", 2.5), ("n_steps", "3"), ("hidden", (8, 8.0)), ("share", None), ("hidden", [8])]
)
def test_a_field_that_is_set_in_python_has_a_number_of_its_kind(field: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}=.* must be a .*whole number|{field}=.* must be a number"):
        Part(**{field: given})
    assert Part(n_steps=np.int64(3), share=np.float32(0.5)).n_steps == 3


MODULE = """
import chz

@chz.chz
class Config:
    tau: float = 0.5
"""


@pytest.fixture
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_imports: None) -> Path:
    """A package `parts_here` with the parts `alpha` and `beta`, and modules that are none."""
    folder = tmp_path / "parts_here"
    folder.mkdir()
    for name, text in {"__init__": "", "alpha": MODULE, "beta": MODULE, "base": "X = 1\n"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


class TestFindModule:
    def test_by_name(self, parts: Path) -> None:
        assert find_module("alpha", "parts_here").__name__ == "parts_here.alpha"

    def test_names_are_the_modules_with_a_config(self, parts: Path) -> None:
        assert module_names("parts_here") == ["alpha", "beta"]

    def test_by_dotted_path(self, parts: Path) -> None:
        assert find_module("parts_here.base", "rlframe.core").X == 1

    def test_by_file(self, parts: Path) -> None:
        own = parts / "elsewhere" / "my_part.py"
        own.parent.mkdir()
        own.write_text(MODULE)
        module = find_module(str(own), "parts_here")
        assert module.Config().tau == 0.5
        assert find_module(str(own), "parts_here") is module
        assert str(own.parent) in sys.path, "worker processes must be able to import it by name"

    @pytest.mark.parametrize("name", ["alphq", "base", ".alpha", "..alpha", "al pha", ""])
    def test_an_unknown_name_is_refused_with_the_names_there_are(self, parts: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=r"not in parts_here \(alpha, beta\)"):
            find_module(name, "parts_here")

    def test_the_nearest_name_is_suggested(self, parts: Path) -> None:
        with pytest.raises(ConfigError, match="did you mean alpha"):
            find_module("alphq", "parts_here")

    def test_an_unknown_dotted_path_is_refused(self, parts: Path) -> None:
        with pytest.raises(ConfigError, match=r"no module 'parts_here\.gamma'"):
            find_module("parts_here.gamma", "parts_here")

    def test_a_missing_import_inside_the_module_is_not_hidden(self, parts: Path) -> None:
        (parts / "parts_here" / "needy.py").write_text("import parts")
        with pytest.raises(ModuleNotFoundError, match="'parts'"):
            find_module("parts_here.needy", "parts_here")

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="does not exist"):
            find_module(str(tmp_path / "nothing.py"), "rlframe.core")

    @pytest.mark.parametrize("name", ["json", "torch"])
    def test_a_file_named_like_another_module_is_refused(self, tmp_path: Path, clean_imports: None, name: str) -> None:
        path = tmp_path / f"{name}.py"
        path.write_text(MODULE)
        before = sys.modules[name]
        with pytest.raises(ConfigError, match=f"the name '{name}' means .*; rename the file"):
            find_module(str(path), "rlframe.core")
        assert sys.modules[name] is before

    def test_a_file_whose_name_is_no_python_name_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "my-part.py"
        path.write_text(MODULE)
        with pytest.raises(ConfigError, match="not a Python name"):
            find_module(str(path), "rlframe.core")


@chz.chz
class Whole:
    part: Any = chz.field(meta_factory=module_part("parts_here", "alpha"), default=None)


class TestModulePart:
    def test_a_name_makes_the_modules_config(self, parts: Path) -> None:
        config = chz.Blueprint(Whole).make_from_argv(["part=beta", "part.tau=0.01"]).part
        assert type(config).__module__ == "parts_here.beta"
        assert config.tau == 0.01

    def test_a_field_alone_makes_the_default(self, parts: Path) -> None:
        config = chz.Blueprint(Whole).make_from_argv(["part.tau=0.01"]).part
        assert type(config).__module__ == "parts_here.alpha"

    def test_an_unknown_name_is_refused_with_the_nearest(self, parts: Path) -> None:
        with pytest.raises(InvalidBlueprintArg, match="did you mean alpha"):
            chz.Blueprint(Whole).make_from_argv(["part=alfa"])

    def test_a_module_without_config_is_refused(self, parts: Path) -> None:
        with pytest.raises(InvalidBlueprintArg, match="has no class Config"):
            chz.Blueprint(Whole).make_from_argv(["part=parts_here.base"])
