"""Aggregates over tasks and seeds against rliable 1.2.0, whose output for these scores is written here."""

from functools import partial

import numpy as np
import pytest

from rlframe.analysis.aggregates import (
    interval,
    iqm,
    mean,
    median,
    optimality_gap,
    probability_of_improvement,
    profile,
)

X = np.array([[0.10, 0.20, 0.35, 0.05, 0.50], [0.55, 0.40, 0.70, 0.65, 0.45], [1.20, 0.90, 1.05, 0.80, 1.40]])
Y = np.array([[0.15, 0.20, 0.30, 0.25], [0.30, 0.50, 0.35, 0.60], [0.95, 0.70, 1.05, 0.60]])


def test_aggregates_are_those_of_rliable() -> None:
    statistics = (mean, median, iqm, optimality_gap)
    found = [[float(statistic(list(scores))) for statistic in statistics] for scores in (X, Y)]
    np.testing.assert_allclose(
        found,
        [
            [0.62, 0.55, 0.588888888888889, 0.42333333333333345],
            [0.49583333333333335, 0.4375, 0.44166666666666665, 0.5083333333333335],
        ],
        rtol=1e-12,
    )


def test_profiles_and_probability_of_improvement_are_those_of_rliable() -> None:
    thresholds = np.array([0, 0.2, 0.5, 0.9, 1.2])
    np.testing.assert_allclose(profile(list(X), thresholds), [1, 0.8, 8 / 15, 0.2, 1 / 15])
    np.testing.assert_allclose(profile(list(Y), thresholds), [1, 10 / 12, 5 / 12, 2 / 12, 0])
    assert probability_of_improvement(list(X), list(Y)) == pytest.approx(0.6666666666666666)  # with three ties
    assert probability_of_improvement(list(Y), list(X)) == pytest.approx(0.3333333333333333)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        (mean, (0.5367, 0.7067)),
        (median, (0.45, 0.65)),
        (iqm, (0.5056, 0.6722)),
        (optimality_gap, (0.36, 0.4867)),
    ],
)
def test_intervals_are_near_those_of_rliable(statistic, expected) -> None:  # 50,000 resamples there
    np.testing.assert_allclose(interval(statistic, list(X)), expected, atol=0.012)


def test_the_interval_of_an_improvement_resamples_both_sides() -> None:
    low, high = interval(probability_of_improvement, list(X), list(Y))
    np.testing.assert_allclose([low, high], [0.45, 0.8667], atol=0.02)


def test_every_point_of_a_curve_or_profile_has_its_interval() -> None:
    curve = [np.stack([task, 2 * task]) for task in X]  # [2 points, n_seeds] of each task
    low, high = interval(iqm, curve)
    np.testing.assert_allclose([low[1], high[1]], [2 * low[0], 2 * high[0]])
    low, high = interval(partial(profile, thresholds=np.array([-1.0, 0.3, 9.0])), list(X))
    np.testing.assert_array_equal(low[[0, 2]], [1, 0])
    np.testing.assert_array_equal(high[[0, 2]], [1, 0])
    assert low[1] < 11 / 15 < high[1]


def test_tasks_may_have_different_numbers_of_seeds_and_weigh_alike() -> None:
    scores = [np.array([0.0, 1.0]), np.array([2.0])]
    assert mean(scores) == 1.25
    assert optimality_gap(scores) == 0.25
    np.testing.assert_array_equal(profile(scores, np.array([0.5, 1.5])), [0.75, 0.5])
    np.testing.assert_array_equal(interval(mean, scores), [1.0, 1.5])  # each with probability 1/4


def test_the_interval_of_coin_tosses_is_that_of_the_binomial_distribution() -> None:
    tosses = np.array([0.0, 1.0] * 10)  # the mean of 20 draws is k / 20, k ~ Binomial(20, 1/2)
    assert interval(mean, [tosses]) == (0.3, 0.7)  # P(k <= 5) = 0.0207 < 0.025 < P(k <= 6) = 0.0577
