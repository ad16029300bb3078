"""Ranks, sums of perturbations and moments, against known numbers."""

import numpy as np

from rlframe.ops.evolution import centered_ranks, merged_moments, perturbation, weighted_sum


def test_ranks_are_known_numbers_and_equal_returns_share_their_mean_rank() -> None:
    np.testing.assert_allclose(centered_ranks(np.array([[3.0, -1.0], [9.0, 7.0]])), [[-1 / 6, -0.5], [0.5, 1 / 6]])
    np.testing.assert_allclose(centered_ranks(np.array([5.0, 2.0, 5.0])), [0.25, -0.5, 0.25])
    assert not centered_ranks(np.full((4, 2), 500.0)).any(), "equal returns tell nothing"
    assert not centered_ranks(np.array([[7.0]])).any()


def test_a_perturbation_is_told_by_its_seed_and_sums_are_those_of_the_vectors() -> None:
    one, other = perturbation(7, 1000), perturbation(8, 1000)
    assert np.array_equal(one, perturbation(7, 1000))
    assert one.dtype == np.float32
    assert abs(one.mean()) < 0.1
    assert abs(one.std() - 1) < 0.1
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
    np.testing.assert_allclose(weighted_sum(np.array([2.0, 0.0, -1.0]), [7, 9, 8], 1000), 2 * one - other, rtol=1e-6)


def test_moments_of_parts_are_those_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, (n, 4)) for n in (5, 1, 30)]
    of_each = np.stack([np.stack([np.full(4, len(x)), x.mean(0), x.var(0)]) for x in parts])
    n, mean, variance = merged_moments(of_each)
    rows = np.concatenate(parts)
    assert n == 36
    np.testing.assert_allclose([mean, variance], [rows.mean(0), rows.var(0)], rtol=1e-12)
