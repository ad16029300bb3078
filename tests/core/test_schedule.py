"""Schedules: the text, the numbers by env_steps, and fields of configs that take them."""

import json
import math
import pickle
from typing import Any

import chz
import pytest

from rlframe.algos import ppo, sac
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import Schedule, curve
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.experiment.trust import foreign
from rlframe.study.plan import read_grid

RUN = 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linear(1,0.2)", {-5: 1.0, 0: 1.0, 500: 0.6, 1000: 0.2, 9999: 0.2}),
        ("linear(1.0, 0.05, 0.1)", {0: 1.0, 50: 0.525, 100: 0.05, 1000: 0.05}),
        ("linear(0,1,200)", {100: 0.5, 200: 1.0, 1000: 1.0}),
        ("linear(0,1,4e3)", {1000: 0.25}),
        ("linear(-1,1)", {500: 0.0}),
        ("cosine(2,0)", {0: 2.0, 250: 1 + math.sqrt(0.5), 500: 1.0, 1000: 0.0}),
        ("exponential(1e-2,1e-4)", {0: 1e-2, 500: 1e-3, 1000: 1e-4, 2000: 1e-4}),
        ("piecewise(0:1e-3,5e2:1e-4)", {0: 1e-3, 250: 5.5e-4, 500: 1e-4, 1000: 1e-4}),
        ("piecewise(0.1:3,0.5:1,0.5:0)", {0: 3.0, 100: 3.0, 300: 2.0, 499.999: 1.00001, 500: 0.0}),
    ],
)
def test_a_schedule_has_its_numbers(text: str, expected: dict[float, float]) -> None:
    schedule = Schedule.parse(text).over(RUN)
    assert [schedule(step) for step in expected] == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-12)


def test_a_constant_is_always_the_same() -> None:
    assert {curve(3e-4, RUN)(step) for step in (0, 73, RUN, 10**9)} == {3e-4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("liner(1,0)", "'liner' is not a schedule .*did you mean linear"),
        ("high", "'high' is neither a number nor a schedule such as linear"),
        ("linear(1,0", "neither a number nor a schedule"),
        ("linear(1)", r"write linear\(first,last\) or linear\(first,last,end\)"),
        ("linear(1,2,3,4)", r"write linear\(first,last\)"),
        ("linear(1,x)", "'x' is not a number"),
        ("linear(1,inf)", "inf in a schedule must be finite"),
        ("linear(1,nan)", "nan in a schedule must be finite"),
        ("linear(1,0,0)", "the end 0 of a schedule must be above 0"),
        ("cosine(1,0,-5)", "the end -5 of a schedule must be above 0"),
        ("exponential(1,0)", "an exponential schedule needs numbers above 0"),
        ("piecewise(1,0)", r"write piecewise\(0:value,place:value"),
        ("piecewise()", r"write piecewise"),
        ("piecewise(5e5:1,0:2)", "the places 500000, 0 of a schedule must ascend"),
        ("linear(1,0,1.5)", "the place 1.5 of a schedule is neither a part of the run, up to 1, nor a whole number"),
        ("piecewise(-1:1,5:2)", "must ascend from 0 on"),
        ("piecewise(0:1,0.5:2,300:3)", "must be all env_steps, or all parts of the run"),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as of_script:
        ppo.Config(learning_rate=text)
    with pytest.raises(ConfigError, match=message) as of_command:
        from_flat({"algo.learning_rate": text})
    for error in (of_script, of_command):
        assert str(error.value).startswith("algo.learning_rate=")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("algo", "key", "text", "message"),
    [
        ("ppo", "learning_rate", "linear(1e-3,-1)", "must be at least 0 and finite"),
        ("ppo", "discount", "piecewise(0:0.9,0.5:1.01,1:0.9)", "must be from 0 to 1"),
        ("ppo", "max_grad_norm", "linear(0.5,0)", "must be above 0, or inf"),
        ("sac", "tau", "cosine(0,2)", "must be from 0 to 1"),
        ("sac", "temperature", "linear(1,0.1)", "changes what is learned; add algo.learn_temperature=false"),
        ("dqn", "v_max", "linear(1,2)", "the same for the whole run; it cannot be a schedule"),
        ("dqn", "replay_ratio", "linear(1,2)", "the same for the whole run; it cannot be a schedule"),
        ("dqn", "explore.epsilon", "linear(2,0)", "must be from 0 to 1"),
    ],
)
def test_every_point_of_a_schedule_keeps_to_the_bounds_of_its_field(
    algo: str, key: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        from_flat({"algo": algo, f"algo.{key}": text})
    assert "\n" not in str(error.value)


def test_a_config_takes_text_schedules_and_numbers_alike() -> None:
    text = "linear(1e-3, 0)"
    one, other = ppo.Config(learning_rate=text), ppo.Config(learning_rate=Schedule.parse(text))
    assert one.learning_rate == other.learning_rate == Schedule.parse(text)
    assert one == pickle.loads(pickle.dumps(one)) == chz.replace(one, epochs=4)
    assert ppo.Config(learning_rate="1e-3").learning_rate == 1e-3
    assert math.isnan(float(sac.Config().target_entropy))  # type: ignore[arg-type]


def test_params_json_has_the_text_and_can_be_launched_again() -> None:
    given: dict[str, Any] = {
        "algo": "dqn",
        "algo.learning_rate": "piecewise(0:1e-3,5e5:1e-4)",
        "algo.explore.epsilon": "cosine(1,0.05,0.1)",
        "algo.beta": 0.4,
    }
    flat = json.loads(json.dumps(to_flat(from_flat(given))))
    assert {key: flat[key] for key in given} == given
    assert to_flat(from_flat(flat)) == flat
    assert not foreign({key: flat[key] for key in flat if key.startswith("algo")})
    assert foreign({"algo.explore.epsilon": "evil(./code.py:run)"})


def test_a_sweep_is_split_at_commas_outside_of_parentheses() -> None:
    grid = read_grid({"sweep.algo.learning_rate": "linear(1e-3,0),3e-4,piecewise(0:1,1:0)"})
    assert grid.swept["algo.learning_rate"] == ("linear(1e-3,0)", "3e-4", "piecewise(0:1,1:0)")
