"""Elo ratings and the probabilities of opponents, against computations by hand."""

import numpy as np
import pytest

from rlframe.ops.ratings import elo_ratings, elo_update, expected_score, hard_opponents


def test_four_hundred_points_are_ten_times_the_odds() -> None:
    assert expected_score(400, 0) == pytest.approx(10 / 11)
    assert expected_score(0, 400) == pytest.approx(1 / 11)
    assert expected_score(7, 7) == 0.5


def test_a_rating_moves_by_what_a_result_differs_from_the_expected_one() -> None:
    assert elo_update(0, 0, 1, k=16) == 8
    assert elo_update(400, 0, 1, k=11) == pytest.approx(401)  # 11 (1 - 10/11)
    assert elo_update(400, 0, 0.5, k=22) == pytest.approx(400 - 9)  # 22 (1/2 - 10/11)


def test_ratings_of_a_table_expect_its_results() -> None:
    """Of two players, 3 of 4 points with one drawn game added are 3.5 of 5: odds of 7 to 3."""
    ratings = elo_ratings(np.array([[0, 3.0], [1.0, 0]]), np.array([[0, 4], [4, 0]]))
    assert ratings[0] - ratings[1] == pytest.approx(400 * np.log10(7 / 3), abs=1e-3)
    assert ratings.sum() == pytest.approx(0, abs=1e-6)


def test_ratings_are_finite_for_who_always_won_and_add_up_along_a_chain() -> None:
    scores = np.array([[0, 9.0, 0], [0, 0, 9.0], [0, 0, 0]])
    games = np.array([[0, 9, 0], [9, 0, 9], [0, 9, 0]])
    ratings = elo_ratings(scores, games)
    step = 400 * np.log10(9.5 / 0.5)
    assert ratings == pytest.approx([step, 0, -step], abs=1e-2)


def test_opponents_are_drawn_by_how_often_they_win() -> None:
    assert hard_opponents([0.5, 0.75, 1.0], power=1) == pytest.approx([2 / 3, 1 / 3, 0])
    assert hard_opponents([0.5, 0.75, 1.0], power=2) == pytest.approx([0.8, 0.2, 0])
    assert hard_opponents([0.5, 0.75], power=0) == pytest.approx([0.5, 0.5])
    assert hard_opponents([1.0, 1.0], power=1) == pytest.approx([0.5, 0.5]), "all are beaten: any of them"
