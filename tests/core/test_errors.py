"""Texts of messages."""

import math

import pytest

from rlframe.core.errors import decimals


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (500.0, "500.0"),
        (-1234.56, "-1234.6"),
        (0.953, "0.953"),
        (-0.6, "-0.6"),
        (9.2501, "9.250"),
        (0.0, "0.0"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_a_return_near_zero_has_three_decimals(x: float, text: str) -> None:
    assert decimals(x) == text
