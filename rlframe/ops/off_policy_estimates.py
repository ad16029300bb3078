"""What a policy is worth, from episodes of another policy: importance sampling, doubly robust, and intervals. NumPy.

Episodes i are rows [n, T], padded by 0 after their ends. ρ[t] = Π_{k<=t} π(a_k|s_k) / b(a_k|s_k) is the ratio of the
probabilities of the target policy π and the behaviour policy b up to step t; after the end of an episode it stays as
it was. Products are sums of logarithms, and weighted estimators divide by their largest weight before taking the
exponential, so no number of steps overflows; ratios of the others are cut at exp(LOG_LIMIT), where they mean nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Array = np.ndarray
LOG_LIMIT = 300.0  # of log ρ; squares and sums of exp(300) are still finite


@dataclass(frozen=True, eq=False)
class Terms:
    """An estimate Σ_k (Σ_i N[i, k]) / (Σ_i D[i, k]) and what each episode i adds to it; a mean where D is 1.

    It is nan where no episode has a weight.
    """

    numerator: Array  # N [n, K]
    denominator: Array  # D [n, K]

    def value(self) -> float:
        """The estimate."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((self.numerator.sum(0) / self.denominator.sum(0)).sum())

    def influence(self) -> Array:
        """ψ [n], of mean 0: n times the change of the estimate with the weight of an episode (Hampel 1974)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            total = self.denominator.mean(0)
            return ((self.numerator - self.numerator.mean(0) / total * self.denominator) / total).sum(-1)


def discounts(discount: float, T: int) -> Array:
    """γ^t [T]."""
    return discount ** np.arange(T)


def importance_sampling(log_ratio: Array, reward: Array, discount: float) -> Terms:
    """IS: mean_i ρ[T-1] Σ_t γ^t r[t], unbiased   (Precup, Sutton & Singh 2000, section 2).

    Args:
        log_ratio: log π(a_t|s_t) - log b(a_t|s_t) [n, T].    reward: [n, T].    discount: γ in [0, 1].
    """
    return _mean(_ratio(log_ratio)[:, -1] * (reward @ discounts(discount, reward.shape[1])))


def weighted_importance_sampling(log_ratio: Array, reward: Array, discount: float) -> Terms:
    """WIS: Σ_i ρ_i G_i / Σ_i ρ_i, consistent; biased towards b   (Precup, Sutton & Singh 2000, section 2)."""
    weight = _weight(log_ratio)[:, -1:]
    return Terms(weight * (reward @ discounts(discount, reward.shape[1]))[:, None], weight)


def per_decision(log_ratio: Array, reward: Array, discount: float) -> Terms:
    """PDIS: mean_i Σ_t γ^t ρ[t] r[t], unbiased   (Precup, Sutton & Singh 2000, section 3)."""
    return _mean((_ratio(log_ratio) * reward) @ discounts(discount, reward.shape[1]))


def weighted_per_decision(log_ratio: Array, reward: Array, discount: float) -> Terms:
    """WPDIS: Σ_t γ^t (Σ_i ρ_i[t] r_i[t]) / (Σ_i ρ_i[t]), consistent   (Thomas 2015, section 3.10, CWPDIS)."""
    weight = _weight(log_ratio)
    return Terms(weight * reward * discounts(discount, reward.shape[1]), weight)


def doubly_robust(log_ratio: Array, reward: Array, q: Array, v: Array, discount: float) -> Terms:
    """DR: mean_i Σ_t γ^t (ρ[t] (r[t] - q[t]) + ρ[t-1] v[t]), ρ[-1] = 1   (Jiang & Li 2016, eq. 10, unrolled).

    Unbiased if the ratios are right, whatever q and v are; their quality decides about the variance.

    Args:
        q: Q^π of the actions taken [n, T].    v: V^π of all observations [n, T+1]; at an episode's end, 0 where it
            terminated, and after that 0.
    """
    gamma, ratio = discounts(discount, v.shape[1]), _ratio(log_ratio)
    corrections = ratio * ((reward - q) * gamma[:-1] + v[:, 1:] * gamma[1:])
    return _mean(v[:, 0] + corrections.sum(-1))


def weighted_doubly_robust(log_ratio: Array, reward: Array, q: Array, v: Array, discount: float) -> Terms:
    """WDR: as DR with ρ_i[t] / mean_j ρ_j[t] instead of ρ_i[t]   (Thomas & Brunskill 2016, eq. 2)."""
    gamma, weight, n = discounts(discount, v.shape[1]), _weight(log_ratio), len(reward)
    corrections = weight * ((reward - q) * gamma[:-1] + v[:, 1:] * gamma[1:])
    return Terms(np.hstack([v[:, :1], corrections]), np.hstack([np.ones((n, 1)), weight]))


def effective_sample_size(log_ratio: Array) -> float:
    """(Σ_i ρ_i)² / Σ_i ρ_i² of whole episodes, from 1 to n (Kish 1965); nan if no episode has a weight."""
    weight = _weight(log_ratio)[:, -1]
    with np.errstate(invalid="ignore"):
        return float(weight.sum() ** 2 / np.square(weight).sum())


def mean_ratio(log_ratio: Array) -> float:
    """mean_i ρ[T-1], which is 1 in expectation if both probabilities are right and b does all that π may do."""
    return float(_ratio(log_ratio)[:, -1].mean())


def normal_interval(terms: Terms, variance: float = 0.0) -> tuple[float, float]:
    """95 %: the estimate -+ z √(s² / n + variance), where s² is the variance of the influence (the delta method).

    With recorded probabilities it covers as often as percentile and BCa intervals of the bootstrap, at no cost
    (docs/guides/estimates.md).

    `variance`: of what differs from dataset to dataset beside.
    """
    influence = terms.influence()
    half = NormalDist().inv_cdf(0.975) * math.sqrt(influence.var(ddof=1) / len(influence) + variance)
    return terms.value() - half, terms.value() + half


def _mean(x: Array) -> Terms:
    return Terms(x[:, None], np.ones((len(x), 1)))


def _ratio(log_ratio: Array) -> Array:
    """ρ [n, T]."""
    return np.exp(np.minimum(log_ratio.cumsum(-1), LOG_LIMIT))


def _weight(log_ratio: Array) -> Array:
    """ρ [n, T] over the largest of each step, which leaves ratios of sums as they are."""
    logs = log_ratio.cumsum(-1)
    largest = logs.max(0)
    return np.exp(logs - np.where(np.isfinite(largest), largest, 0.0))
