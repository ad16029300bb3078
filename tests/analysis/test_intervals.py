"""Bootstrap intervals against answers known in closed form."""

import numpy as np
import pytest

from rlframe.analysis.aggregates import interval, iqm, mean


def test_equal_seeds_have_an_interval_without_width() -> None:
    low, high = interval(mean, [np.full((2, 5), 3.0)])
    np.testing.assert_array_equal(low, [3.0, 3.0])
    np.testing.assert_array_equal(high, [3.0, 3.0])


def test_the_interval_of_two_seeds_is_their_range() -> None:
    low, high = interval(mean, [np.array([1.0, 5.0])])  # one of them is drawn twice with probability 1/4 each
    assert (low, high) == (1.0, 5.0)


def test_the_interval_of_many_seeds_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(1).normal(10.0, 2.0, size=400)
    low, high = interval(mean, [values])
    half_width = 1.96 * values.std() / np.sqrt(len(values))
    assert high - values.mean() == pytest.approx(half_width, rel=0.1)
    assert values.mean() - low == pytest.approx(half_width, rel=0.1)


def test_the_interval_of_coin_tosses_is_that_of_the_binomial_distribution() -> None:
    tosses = np.array([0.0, 1.0] * 10)  # the mean of 20 draws is k / 20, k ~ Binomial(20, 1/2)
    low, high = interval(mean, [tosses])
    assert (low, high) == (0.3, 0.7)  # P(k <= 5) = 0.0207 < 0.025 < P(k <= 6) = 0.0577


def test_points_are_independent_and_one_seed_has_no_width() -> None:
    values = np.array([[1.0, 2.0, 4.0], [10.0, 20.0, 40.0]])
    low, high = interval(mean, [values])
    np.testing.assert_allclose(low * [10.0, 1.0], low[::-1] * [1.0, 10.0])
    np.testing.assert_allclose(high[1], 10.0 * high[0])
    low, high = interval(mean, [values[:, :1]])
    np.testing.assert_array_equal([low, high], [values[:, 0], values[:, 0]])


def test_iqm_is_the_mean_of_the_middle_half() -> None:
    assert iqm([np.array([-99.0, 1.0, 3.0, 99.0])]) == 2.0
