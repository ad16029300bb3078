"""StopRule: what conditions mean, and which are refused."""

import math
import re

import pytest

from rlframe.core.errors import ConfigError
from rlframe.experiment.settings import from_flat
from rlframe.runners.stop_rule import StopRule

ROW = {"env_steps": 60_000, "eval/return_mean": 480.0, "eval/since_best": 3, "algo/loss": math.nan, "mine/x": -2.0}
ROW |= {"mine-own/x.y": 4.0, "my_group/return": 4.0}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("eval/return_mean >= 475 and env_steps > 5e4", True),
        ("eval/return_mean >= 475 and env_steps > 5e5", False),
        ("eval/return_mean >= 500 or eval/since_best >= 3", True),
        ("not eval/return_mean >= 500", True),
        ("not (eval/return_mean > 0 or env_steps == 0)", False),
        ("mine/x < -1.5", True),
        ("-3 < mine/x and mine/x <= -2", True),
        ("mine-own/x.y > 3", True),
        ("my_group/return == 4", True),
        ("not episode/return_mean < 500", False),  # not in the row
        ("not (episode/return_mean < 500 and env_steps < 5)", True),  # whatever it is
        ("episode/return_mean > 0 or env_steps > 5", True),
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
        ("eval/return_mean + 1 > 3", "lacks a comparison"),
        ("eval/return_mean", "lacks a comparison"),
        ("env_steps is 3", "lacks a comparison"),
        ("env_steps >", "has '' where a metric or a number should be"),
        ("env_steps > > 3", "has '>' where a metric or a number should be"),
        ("env_steps = 3", "lacks a comparison"),
        ("env_steps > 3 updates > 5", "has 'updates' where and, or, or its end should be"),
        ("(env_steps > 3", "lacks a )"),
        ("env_steps > 3)", "has ')' where and, or, or its end should be"),
        ("3 > 2", "names no metric"),
        ("", "has '' where"),
        ("env_step > 3", "no metric 'env_step'; did you mean env_steps"),
        ("time/elapsed > 3", "no metric 'time/elapsed'; did you mean time/elapsed_s"),
        ("episode/retrun_mean > 3", "did you mean episode/return_mean"),
        ("eval/retrun_mean > 3", "did you mean eval/return_mean"),
        ("algo/los > 3", "did you mean algo/loss"),
        ("__import__('os').system('true') > 0", "there is no metric '__import__'"),
        ("(" * 5000 + "env_steps > 3", "is longer than 200 words"),
        ("env_steps > nan", "has 'nan' where a finite number should be"),
        ("-inf < env_steps", "has '-inf' where a finite number should be"),
        ("env_steps < 1e999", "has '1e999' where a finite number should be"),
    ],
)
def test_anything_else_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        StopRule(text)


def test_a_condition_knows_what_it_needs() -> None:
    assert StopRule("eval/return_mean > 3 and env_steps > 5").needs("eval") == "eval/return_mean"
    assert StopRule("eval/return_mean > 3 or eval/return_std < 1").needs("eval") == "eval/return_mean"
    assert StopRule("eval/return_mean > 3 or env_steps > 5").needs("eval") == ""
    assert StopRule("not (eval/return_mean < 3 or env_steps < 5)").needs("eval") == "eval/return_mean"
    assert StopRule("not (eval/return_mean < 3 and env_steps < 5)").needs("eval") == ""
    assert StopRule("eval/mine > 3").needs("eval") == ""
    with pytest.raises(ConfigError, match="this run does not evaluate, so that eval/return_mean is never known"):
        from_flat({"stop": "eval/return_mean > 3", "runner": "minibatch_rl"})


def test_the_metrics_that_are_missing_are_known() -> None:
    assert StopRule("eval/return_mine > 3 or env_steps > 5").missing(ROW) == ["eval/return_mine"]
