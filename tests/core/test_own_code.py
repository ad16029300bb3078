"""Digests of own code: what changes them, and what does not."""

import functools
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlframe.core.objects import ObjectName, name_elsewhere, name_of
from rlframe.core.own_code import object_digest, own_code, source_digest

FILES = {
    "mine.py": "import os, torch\nfrom helpers import scale\nfrom parts.nets import Net\nentry = 'made:Env'\n",
    "helpers.py": "import mine\nscale = 1\n",  # in a circle
    "parts/__init__.py": "",
    "parts/nets.py": "from . import sizes\nclass Net:\n    def make(self):\n        from .late import x\n",
    "parts/sizes.py": "hidden = 64\n",
    "parts/late.py": "import importlib\nimportlib.import_module('lazy')\n",
    "made.py": "class Env: pass\n",
    "lazy.py": "",
    "other.py": "y = 1\n",
}


def write(folder: Path, files: dict[str, str] = FILES) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder / "mine.py")


def test_what_standard_input_defines_is_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    main = SimpleNamespace(__file__="<stdin>", Line=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[arg-type]
    assert name_elsewhere(ObjectName("__main__:Line", main.Line, "env"), ["python", "-"]) == ""


@pytest.mark.parametrize("name", FILES)
def test_an_edit_of_what_a_file_imports_is_an_edit_and_one_of_other_files_is_none(name: str, tmp_path: Path) -> None:
    mine = write(tmp_path)
    before = source_digest(mine)
    (tmp_path / name).write_text(FILES[name] + "z = 2\n")
    assert (source_digest(mine) == before) == (name == "other.py")


def test_a_file_is_the_same_in_another_folder_and_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {source_digest(write(tmp_path / folder)) for folder in ("a", "b")}
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert {source_digest("mine")} == digests
    assert source_digest("parts.nets") not in {"", *digests}
    assert "mine" not in sys.modules, "nothing is imported"


@pytest.mark.parametrize(
    "name",
    ["os", "json.decoder", "torch.nn", "gymnasium", "rlframe.algos.ppo", "__main__", "no_such", "./no.py", "a..b"],
)
def test_installed_missing_and_own_modules_of_rlframe_have_no_digest(name: str) -> None:
    assert source_digest(name) == ""


def test_a_module_is_read_where_an_import_would_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"pack/__init__.py": "", "pack/envs.py": "import tools_of", "pack/tools_of.py": "", "tools_of.py": ""}
    write(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    for name, is_edit in (("pack/tools_of.py", False), ("tools_of.py", True)):
        before = source_digest("pack.envs"), source_digest(str(tmp_path / "pack/envs.py"))
        (tmp_path / name).write_text("x = 1")
        after = source_digest("pack.envs"), source_digest(str(tmp_path / "pack/envs.py"))
        assert [a != b for a, b in zip(before, after, strict=True)] == [is_edit] * 2


def test_a_module_in_folders_without_init_is_read_where_nothing_has_imported_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the processes of other ranks, which know own classes by their names alone."""
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("outer_of_ranks/inner/deeper", "outer_of_ranks/inner"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "nets.py").write_text(f"folder = {folder!r}")
    for init in ([], ["outer_of_ranks/__init__.py"]):
        for file in init:
            (tmp_path / file).touch()
        digests = {source_digest(name) for name in ("outer_of_ranks.inner.nets", "outer_of_ranks.inner.deeper.nets")}
        assert len(digests - {""}) == 2
        assert source_digest("outer_of_ranks.inner.lost") == ""
    assert "outer_of_ranks" not in sys.modules


def test_a_path_may_have_any_character(tmp_path: Path) -> None:
    mine = write(tmp_path / "exp (1), lr=3")
    assert own_code({"env": f"{mine}:Env(size=3)"}) == {mine: source_digest(mine)}


def test_objects_of_one_name_are_known_with_their_places() -> None:
    one, other = (ObjectName("__main__:<lambda>()", f, "env.wrappers") for f in (lambda: 1, lambda: 2))
    found = [
        own_code(each)
        for each in (
            {"env.wrappers": [one, other]},
            {"env.wrappers": [other, one]},
            {"env": one, "eval.env": other},
            {"env": other, "eval.env": one},
        )
    ]
    assert len({each["__main__:<lambda>()"] for each in found}) == 4


def test_a_registered_id_counts_by_its_entry_point() -> None:
    specs = [gymnasium.envs.registration.EnvSpec("Mine-v0", entry_point=entry) for entry in (lambda: 1, lambda: 2)]
    found = [own_code({"env": ObjectName("Mine-v0", spec, "env")}) for spec in specs]
    assert found[0].keys() == found[1].keys() == {"Mine-v0"}
    assert found[0] != found[1]


def test_a_file_that_python_cannot_read_has_a_digest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class:")
    assert source_digest(str(tmp_path / "mine.py"))


def test_a_config_has_the_digests_of_its_own_names(tmp_path: Path) -> None:
    mine = write(tmp_path)
    given = ObjectName("tests.core.test_own_code:<lambda>()", lambda: 1, "env")
    config = {
        "algo": f"{mine}:Algo(size=3)",
        "callbacks": [f"{mine}:A", "rlframe.runners:Callback", given],
        "algo.learning_rate": "cosine(3e-4,1.5e-4)",
        "algo.optimizer": ObjectName("torch.optim.radam:RAdam", torch.optim.RAdam, "algo.optimizer"),
        "env": "ALE/Pong-v5",
        "affinity": "0:1",
        "runner.n_steps": 10,
    }
    assert own_code(config) == {mine: source_digest(mine), given: object_digest(given.value)}


def test_a_class_given_as_an_object_counts_as_its_name_does() -> None:
    name = name_of(Own)
    assert own_code({"env": ObjectName(name, Own, "env")}) == own_code({"env": name})
    assert own_code({"env": name}) == {"tests.core.test_own_code": source_digest("tests.core.test_own_code")}


class Own:
    def __init__(self, size: Any = 3) -> None:
        self.size = size


@dataclass
class Copied:
    name: str
    payload: bytes

    def __own_code__(self) -> str:
        return self.name


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


class Odd:
    """Of which nothing can be read."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OSError("no")


def linked(n: int) -> Own:
    made = Own()
    for _ in range(n):
        made = Own(made)
    return made


def rooms() -> Own:
    one, other = Own(set()), Own(set())
    one.size.add(other)
    other.size.add(one)
    return one


@functools.wraps(np.linspace)
def as_linspace(x: Any) -> Any:
    return x


def closure(x: Any) -> Callable[[], Any]:
    return lambda: x


def circle() -> Own:
    made = Own()
    made.size = made
    return made


SPEC = gymnasium.spec("CartPole-v1")
SAME = {
    "partials": (functools.partial(Own, size=[1, {"a": 2}]), functools.partial(Own, size=[1, {"a": 2}])),
    "closures": (closure(3), closure(3)),
    "instances": (Own(3), Own(3)),
    "circles": (circle(), circle()),
    "maps": (Own(np.arange(4)), Own(np.arange(4))),
    "generators": (Own(np.random.default_rng(1)), Own(np.random.default_rng(2))),
    "sets": (Own({"a", "b", "c"}), Own({"c", "b", "a"})),
    "payloads": (Copied("a", b"1"), Copied("a", b"2")),
    "specs": (SPEC, gymnasium.spec("CartPole-v1")),
    "sets in a circle": (rooms(), rooms()),
    "deep": (linked(5_000), linked(5_000)),
    "odd": (Own(Odd()), Own(Odd())),
    "locks": (Own(threading.Lock()), Own(threading.Lock())),
}
OTHER = {
    "lambdas of one module": (lambda: 1, lambda: 2),
    "namespaces": (SimpleNamespace(gain=1), SimpleNamespace(gain=2)),
    "paths": (Own(Path("a")), Own(Path("b"))),
    "ranges": (Own(range(3)), Own(range(9))),
    "dates": (Own(date(2020, 1, 1)), Own(date(2020, 1, 2))),
    "tensors": (Own(torch.tensor([1.0])), Own(torch.tensor([2.0]))),
    "spaces": (Own(gymnasium.spaces.Discrete(2)), Own(gymnasium.spaces.Discrete(3))),
    "boxes": (gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Box(-5, 5, (3,))),
    "wrapped": (gymnasium.wrappers.TimeLimit(SPEC.make(), 5), gymnasium.wrappers.TimeLimit(SPEC.make(), 6)),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "getters": (operator.itemgetter(1), operator.itemgetter(2)),
    "bound builtins": ({"a": 1}.get, {"a": 2}.get),
    "cached": (functools.cache(lambda: 1), functools.cache(lambda: 2)),
    "wrappers of installed functions": (as_linspace, np.linspace),
    "arrays": (Own(np.zeros(2)), Own(np.zeros(2, np.float32))),
    "arguments of partials": (functools.partial(Own, size=3), functools.partial(Own, size=4)),
    "closures": (closure(3), closure(4)),
    "attributes": (Own(3), Own(3.0)),
    "maps": (Own(np.arange(4)), Own(np.arange(4)[::-1])),
    "methods": (Own(3).__init__, Own(4).__init__),
    "names": (Copied("a", b""), Copied("b", b"")),
    "specs": (SPEC, gymnasium.spec("CartPole-v0")),
}


@pytest.mark.parametrize(("a", "b"), SAME.values(), ids=SAME)
def test_equal_objects_have_equal_digests(a: Any, b: Any) -> None:
    assert object_digest(a) == object_digest(b)


@pytest.mark.parametrize(("a", "b"), OTHER.values(), ids=OTHER)
def test_other_values_have_other_digests(a: Any, b: Any) -> None:
    assert object_digest(a) != object_digest(b)


NOTEBOOK = """
from functools import partial, cached_property
from dataclasses import dataclass
import abc, enum, functools
import gymnasium
from rlframe.core.own_code import object_digest

GAIN = {"left": 1.0, "right": {"up", "down", "in", "out", "near", "far"}}

def helper(x):
    return x * GAIN["left"]

class Kind(enum.Enum):
    A = "a"

class Base(abc.ABC):
    @abc.abstractmethod
    def size(self): ...

class Env(gymnasium.Env, Base):
    kind: Kind = Kind.A

    def __init__(self, size=3):
        self.np_random, self.shape = gymnasium.utils.seeding.np_random(None)[0], (size,)
        self._np_random_seed = id(self)

    @property
    def size(self):
        return [helper(x) for x in self.shape]  # REMARK

    @functools.cached_property
    def other(self):
        return "cached"

    def late(self):
        import os

@dataclass
class Setting:
    made: object = None
    n: int = 3

print(*map(object_digest, (Env, Env(), partial(Env, 3), lambda: Env(2), Setting(Env()))))
"""


def digests(text: str) -> list[str]:
    printed: list[str] = []
    exec(compile(text, "<cell>", "exec"), {"__name__": "__main__", "print": lambda *each: printed.extend(each)})
    return printed


def test_objects_of_a_script_are_known_by_the_code_that_they_use() -> None:
    first = digests(NOTEBOOK)
    assert len({*first}) == 5
    assert digests("# moved down\n" + NOTEBOOK.replace("REMARK", "OTHER REMARK")) == first
    edits = {
        '"left": 1.0': '"left": 2.0',
        "return x * GAIN": "return x + GAIN",
        '"a"': '"b"',
        '"cached"': '"other"',
        "(self, size=3)": "(self, *size)",
    }
    for before, after in edits.items():
        assert not {*first} & {*digests(NOTEBOOK.replace(before, after))}, before


def test_objects_of_a_script_have_the_same_digests_in_each_process() -> None:
    environ = {**os.environ, "PYTHONHASHSEED": "7"}  # sets are in another order there
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.split() == digests(NOTEBOOK)


def test_the_digest_of_a_tensor_is_of_its_numbers() -> None:
    def digest(*numbers: float, dtype: torch.dtype = torch.float32) -> str:
        kept.append(layer := torch.nn.Linear(2, 1))  # so that no address is used again
        layer.weight.data = torch.tensor([numbers], dtype=dtype)
        layer.bias.data.zero_()
        return object_digest(layer)

    kept: list[torch.nn.Module] = []
    assert digest(1, 2) == digest(1, 2)
    assert len({digest(1, 2), digest(1, 3), digest(1, 2, dtype=torch.bfloat16)}) == 3
    assert object_digest(torch.zeros(0)) == object_digest(torch.zeros(0))
    assert object_digest(torch.zeros(())) == object_digest(torch.zeros(()))
