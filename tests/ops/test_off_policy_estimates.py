"""Off-policy estimates agree with written-out sums, and their intervals with the spread over datasets."""

import math

import numpy as np
import pytest

from rlframe.ops import off_policy_estimates as ops

P, B = np.array([0.9, 0.1]), np.array([0.4, 0.6])  # target and behaviour, of two actions in every state


def bandit(n: int, T: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log ratios and rewards [n, T] of episodes in which each step is a bandit that pays action 0 with 1."""
    action = (np.random.default_rng(seed).random((n, T)) > B[0]).astype(int)
    return np.log(P / B)[action], 1.0 - action


def test_each_estimator_is_its_equation_written_out() -> None:
    log_ratio, reward = bandit(7, 3, 0)
    rng, gamma, n = np.random.default_rng(1), 0.9, 7
    q, v = rng.normal(size=(7, 3)), np.hstack([rng.normal(size=(7, 3)), np.zeros((7, 1))])
    rho = np.exp(log_ratio).cumprod(1)
    before = np.hstack([np.ones((7, 1)), rho[:, :-1]])
    G = [sum(gamma**t * reward[i, t] for t in range(3)) for i in range(n)]
    steps = [(i, t) for i in range(n) for t in range(3)]
    w, w_before = rho / rho.sum(0), before / before.sum(0)
    expected = {
        "is": sum(rho[i, 2] * G[i] for i in range(n)) / n,
        "wis": sum(rho[i, 2] * G[i] for i in range(n)) / rho[:, 2].sum(),
        "pdis": sum(gamma**t * rho[i, t] * reward[i, t] for i, t in steps) / n,
        "wpdis": sum(gamma**t * w[i, t] * reward[i, t] for i, t in steps),
        "dr": sum(gamma**t * (rho[i, t] * (reward[i, t] - q[i, t]) + before[i, t] * v[i, t]) for i, t in steps) / n,
        "wdr": sum(gamma**t * (w[i, t] * (reward[i, t] - q[i, t]) + w_before[i, t] * v[i, t]) for i, t in steps),
    }
    found = {
        "is": ops.importance_sampling(log_ratio, reward, gamma),
        "wis": ops.weighted_importance_sampling(log_ratio, reward, gamma),
        "pdis": ops.per_decision(log_ratio, reward, gamma),
        "wpdis": ops.weighted_per_decision(log_ratio, reward, gamma),
        "dr": ops.doubly_robust(log_ratio, reward, q, v, gamma),
        "wdr": ops.weighted_doubly_robust(log_ratio, reward, q, v, gamma),
    }
    assert {name: terms.value() for name, terms in found.items()} == pytest.approx(expected, rel=1e-12)
    assert all(abs(terms.influence().mean()) < 1e-12 for terms in found.values())


def test_right_values_leave_doubly_robust_no_variance() -> None:
    log_ratio, reward = bandit(50, 4, 0)
    v = np.tile(P[0] * np.arange(4, -1, -1.0), (50, 1))  # discount 1
    q = reward + v[:, 1:]
    terms = ops.doubly_robust(log_ratio, reward, q, v, 1.0)
    assert ops.normal_interval(terms) == pytest.approx((3.6, 3.6))


@pytest.mark.parametrize("wrong", [0.0, 5.0])
def test_doubly_robust_is_right_whatever_the_values_are(wrong: float) -> None:
    log_ratio, reward = bandit(50_000, 2, 0)
    q, v = np.full((50_000, 2), wrong), np.full((50_000, 3), wrong)
    v[:, 2] = 0
    low, high = ops.normal_interval(ops.doubly_robust(log_ratio, reward, q, v, 1.0))
    assert low < 1.8 < high
    assert high - low < 0.4


def test_500_steps_of_far_policies_do_not_overflow() -> None:
    log_ratio, reward = np.full((20, 500), 5.0), np.ones((20, 500))
    log_ratio[1:] -= np.arange(1, 20)[:, None]
    for method in (ops.importance_sampling, ops.per_decision):
        assert math.isfinite(method(log_ratio, reward, 0.99).value())
        assert all(map(math.isfinite, ops.normal_interval(method(log_ratio, reward, 0.99))))
    of_one = sum(0.99**t for t in range(500))
    assert ops.weighted_importance_sampling(log_ratio, reward, 0.99).value() == pytest.approx(of_one)
    assert ops.weighted_per_decision(log_ratio, reward, 0.99).value() == pytest.approx(of_one)
    assert ops.effective_sample_size(log_ratio) == pytest.approx(1.0)


def test_an_action_that_the_target_never_takes_ends_the_weight_of_its_episode() -> None:
    log_ratio = np.array([[0.0, 0.0], [-np.inf, 0.0]])
    reward = np.array([[1.0, 1.0], [7.0, 7.0]])
    assert ops.weighted_importance_sampling(log_ratio, reward, 1.0).value() == 2.0
    assert ops.effective_sample_size(log_ratio) == 1.0
    assert math.isnan(ops.weighted_importance_sampling(log_ratio[1:], reward[1:], 1.0).value())


def test_the_interval_is_as_wide_as_the_estimates_of_datasets_are_apart() -> None:
    found = [ops.weighted_per_decision(*bandit(400, 3, seed), 1.0) for seed in range(100)]
    intervals = [ops.normal_interval(terms) for terms in found]
    widths = np.array([high - low for low, high in intervals])
    assert widths.mean() == pytest.approx(2 * 1.96 * np.std([terms.value() for terms in found]), rel=0.2)
    assert sum(low < 2.7 < high for low, high in intervals) >= 90
    wide = ops.normal_interval(found[0], variance=1.0)
    assert wide[1] - wide[0] > 2 * 1.96
