"""StopRule: what conditions mean, and which are refused."""

import math

import pytest

from rlframe.core.errors import ConfigError
from rlframe.runners.stop_rule import StopRule

ROW = {"env_steps": 60_000, "eval/return_mean": 480.0, "eval/since_best": 3, "algo/loss": math.nan, "mine/x": -2.0}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("eval/return_mean >= 475 and env_steps > 5e4", True),
        ("eval/return_mean >= 475 and env_steps > 5e5", False),
        ("eval/return_mean >= 500 or eval/since_best >= 3", True),
        ("not eval/return_mean >= 500", True),
        ("not (eval/return_mean > 0 or env_steps == 0)", False),
        ("mine/x < -1.5", True),
        ("-3 < mine/x <= -2", True),
        ("env_steps != 60_000", False),
        ("algo/loss < 1 or algo/loss > 1", False),  # NaN
        ("episode/return_mean > 0", False),  # not in the row
        (" env_steps>=6e4 ", True),
    ],
)
def test_a_condition_holds_as_it_reads(text: str, holds: bool) -> None:
    assert StopRule(text)(ROW) is holds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eval/return_mean + 1 > 3", "neither a metric nor a number"),
        ("eval/return_mean", "is not a comparison"),
        ("eval/return_mean > 'x'", "neither a metric nor a number"),
        ("__import__('os').system('true') > 0", "neither a metric nor a number"),
        ("env_steps >", "cannot be read"),
        ("env_steps is 3", "is not a comparison"),
        ("env_steps > True", "neither a metric nor a number"),
        ("env_step > 3", "no metric 'env_step'; did you mean env_steps"),
        ("time/elapsed > 3", "no metric 'time/elapsed'; did you mean time/elapsed_s"),
        ("(" * 5000 + "env_steps > 3", "cannot be read"),
    ],
)
def test_anything_else_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        StopRule(text)
