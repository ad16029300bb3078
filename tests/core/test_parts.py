"""Parts by name, in each other and in mappings; and how names of modules are found."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chz
import pytest
from chz.blueprint import InvalidBlueprintArg

from rlframe.core.errors import ConfigError
from rlframe.core.parts import Part, find_module, flatten, known_keys, module_names, part, part_at

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
        with pytest.raises(ConfigError, match=r"parts_here\.needy raised ModuleNotFoundError: No module named 'parts'"):
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
    part: Any = part("parts_here", "alpha", "a part")


class TestPart:
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


INNER = """
from typing import Any
import chz
from rlframe.core.parts import part

@chz.chz
class Config:
    inner: Any = part("parts_here", "alpha", "a part within")
"""


@chz.chz
class Team:
    part: Any = part("parts_here", "alpha", "of the team")
    size: int = 1


@chz.chz
class Teams:
    teams: Mapping[str, Team] = chz.field(default_factory=dict, doc="by name")


class TestNested:
    @pytest.fixture
    def nested(self, parts: Path) -> Path:
        """With a part `gamma` that has a part of its own."""
        (parts / "parts_here" / "gamma.py").write_text(INNER)
        return parts

    def test_a_part_within_a_part_is_read_and_flat_again(self, nested: Path) -> None:
        given = {"part": "gamma", "part.inner": "gamma", "part.inner.inner": "beta", "part.inner.inner.tau": "0.1"}
        made = chz.Blueprint(Whole).make_from_argv([f"{key}={value}" for key, value in given.items()])
        inner = {"part.inner": "gamma", "part.inner.inner": "beta", "part.inner.inner.tau": 0.1}
        assert flatten(part=made.part) == inner

    def test_known_keys_are_those_of_the_kinds_that_are_given(self, nested: Path) -> None:
        assert [*known_keys(Whole, {})] == ["part", "part.tau"]
        assert [*known_keys(Whole, {"part": "gamma"})] == ["part", "part.inner", "part.inner.tau"]
        assert [*known_keys(Whole, {"part": "gamma", "part.inner": "nothing"})] == ["part", "part.inner"]

    def test_a_part_of_another_kind_is_found(self, nested: Path) -> None:
        assert isinstance(part_at(Whole, "part.inner", {}), Part)
        assert part_at(Whole, "part.tau", {}) is None

    def test_a_mapping_has_the_configs_that_keys_name(self, nested: Path) -> None:
        words = {"teams.red.part": "gamma", "teams.red.part.inner.tau": "0.2", "teams.blue.size": "3"}
        made = chz.Blueprint(Teams).make_from_argv([f"{key}={value}" for key, value in words.items()])
        assert flatten(teams=made)["teams.teams.red.part.inner.tau"] == 0.2
        assert [key for key in known_keys(Teams, words) if key.startswith("teams.red.part")] == [
            *("teams.red.part", "teams.red.part.inner", "teams.red.part.inner.tau")
        ]

    def test_a_value_that_is_no_part_is_refused(self, parts: Path) -> None:
        assert Team(part="beta").part.tau == 0.5
        with pytest.raises(ConfigError, match="must be a name such as alpha, or a Config of parts_here"):
            Closed(part=5).part  # noqa: B018


@chz.chz
class Closed:
    part: Any = part("parts_here", "alpha", "of one class", of=Team)
