"""Parsing of config fields, and their errors."""

from typing import Any

import chz
import numpy as np
import pytest
from chz.blueprint import InvalidBlueprintArg

from rlframe.core.config import ConfigError, choice, count, fraction, names, nearest, option, sizes


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


def test_nearest_names_up_to_three() -> None:
    assert nearest("ppoo", ["ppo", "a2c", "dqn"]) == "; did you mean ppo?"
    assert nearest("step", ["step_1", "steps", "stop", "step_12"]) == "; did you mean step_1 or steps or step_12?"
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
