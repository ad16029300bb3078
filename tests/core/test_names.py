"""Names of Python objects in settings, with and without arguments."""

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rlframe.core.config import entries_of
from rlframe.core.errors import ConfigError
from rlframe.core.imports import check_loaded
from rlframe.core.names import find_attribute, find_class, made_by
from rlframe.core.objects import pickled

number = 3


class Limit:
    def __init__(self, high: Any, name: str = "x", pair: Any = ()) -> None:
        self.given = high, name, pair


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("high=1e-3", (1e-3, "x", ())),
        ("high=2, name=eval/return_mean, pair=[1,2]", (2, "eval/return_mean", [1, 2])),
        ("high={a: 1, b: [2,3]},name='s3://a:b(c)'", ({"a": 1, "b": [2, 3]}, "s3://a:b(c)", ())),
    ],
)
def test_arguments_after_a_name_are_those_of_the_call(arguments: str, given: Any) -> None:
    name = f"{__name__}:Limit({arguments})"
    assert isinstance(find_attribute(name, "callbacks"), partial)
    assert made_by(name, "callbacks", Limit, "Limit").given == given


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Limit(hihg=1)", "unexpected keyword argument 'hihg'; did you mean high?"),
        ("Limit(1)", "'1' is no argument; write name\\(key=value,key=value\\)"),
        ("Limit(high=[1)", "callbacks=.*Limit\\(high=\\[1\\): "),
        ("number(high=1)", "3 takes no arguments"),
        ("Limt(high=1)", "has no Limt; did you mean Limit?"),
        ("Limit(high=1", "has no Limit\\(high=1; its arguments lack the last bracket"),
    ],
)
def test_arguments_that_a_name_does_not_take_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_attribute(f"{__name__}:{name}", "callbacks")


def test_a_part_says_which_keys_its_arguments_are() -> None:
    with pytest.raises(ConfigError, match=r"Limit and algo\.explore\.kwargs\.high=VALUE"):
        find_class(f"{__name__}:Limit(high=1)", "algo.explore")


def test_lists_of_names_are_divided_outside_of_arguments() -> None:
    assert entries_of("[a:B(x=[1,2],y=3),c:D]") == ["a:B(x=[1,2],y=3)", "c:D"]
    assert entries_of("""[a:B(x="1, ]", y='2)'),c:D]""") == ["""a:B(x="1, ]", y='2)')""", "c:D"]
    assert entries_of("[it's,that's]") == ["it's", "that's"]


def test_a_file_that_was_edited_since_it_was_imported_is_no_longer_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_by_hand.py"
    names = ("edited_by_hand", str(file))
    file.write_text("x = 1\n")
    assert [find_attribute(f"{name}:x", "env") for name in names] == [1, 1]
    check_loaded([*names, "ppo", "not_imported", "./not_here.py"])
    file.write_text("x = 22\n")
    for name in names:
        with pytest.raises(ConfigError, match=r"has changed since this process imported it; restart, or importlib"):
            check_loaded([name])
    importlib.reload(sys.modules["edited_by_hand"])
    assert find_attribute("edited_by_hand:x", "env") == 22
    check_loaded(names)


def test_pickling_leaves_a_module_that_the_user_sends_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that other processes cannot import, as its folder is not on sys.path."""
    spec = importlib.util.spec_from_file_location("elsewhere", tmp_path / "elsewhere.py")
    assert spec is not None
    assert spec.loader is not None
    (tmp_path / "elsewhere.py").write_text("class Walk: pass")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    try:
        assert b"elsewhere" in pickled(module.Walk, "env", "elsewhere:Walk")
        assert "elsewhere" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert b"Walk" in pickled(module.Walk, "env", "elsewhere:Walk")
    assert not cloudpickle.list_registry_pickle_by_value()
