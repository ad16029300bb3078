"""Values that are passed on, such as env_kwargs: what is written of them is read as the same."""

import json
import math
from typing import Any

import pytest

from rlframe.core.errors import ConfigError
from rlframe.core.yaml import format_value, from_json, parse_value, to_json
from rlframe.experiment.settings import from_flat, to_flat

VALUES: list[Any] = [
    {0: 0.5, 1: 2.0},
    {1: "a", "1": "b"},
    {True: None, (0, 1): [1e-5, -0.0]},
    (2, (3,), [{"shape": (4,)}]),
    math.inf,
    [-math.inf, {"limit": math.inf}],
    {"!tuple": [1], "!float": "inf"},
    ["two\nlines", " \n", "", {"a\x85b": "c\r\nd\u2028"}],
]


def types_of(value: Any) -> Any:
    """With the type of each part, as 0, 0.0 and False are equal."""
    if isinstance(value, dict):
        return dict, [(types_of(key), types_of(each)) for key, each in value.items()]
    return (type(value), list(map(types_of, value))) if isinstance(value, list | tuple) else (type(value), value)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_that_is_passed_on_is_the_same_after_json_yaml_and_params(value: Any) -> None:
    written = json.dumps(to_json(value), allow_nan=False)
    assert types_of(from_json(json.loads(written))) == types_of(value)
    assert types_of(from_json(parse_value(written))) == types_of(value)
    assert types_of(from_json(parse_value(format_value(to_json(value))))) == types_of(value)
    config = json.loads(json.dumps(to_flat(from_flat({"env_kwargs": {"x": value}})), allow_nan=False))
    assert types_of(from_flat(config).env_kwargs["x"]) == types_of(value)


def test_a_text_of_several_lines_is_written_in_one() -> None:
    assert format_value({"text": "one\ntwo", "plain": "it's"}) == '{text: "one\\ntwo", plain: it\'s}'


def test_nan_is_passed_on_as_a_number() -> None:
    assert math.isnan(from_flat(to_flat(from_flat({"env_kwargs.x": math.nan}))).env_kwargs["x"])


@pytest.mark.parametrize("value", [{"!tuple": 3}, {"!float": "wide"}, {"!pairs": [1]}, {"!pairs": [[[], 1]]}], ids=str)
def test_what_nothing_has_written_so_is_an_error_with_its_key(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"env_kwargs: \{'x': \{'!.*\} has one of !tuple, !float, !pairs, but not as"):
        from_flat({"env_kwargs": {"x": value}})
