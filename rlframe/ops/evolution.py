"""Evolution strategies: perturbations told by seeds, centred ranks, sums of perturbations, moments of episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def perturbation(seed: int, n: int) -> Array:
    """ε ~ N(0, I), float32 [n]: the same in every process that knows the seed (Salimans et al. 2017, algorithm 2)."""
    return np.random.default_rng(int(seed)).standard_normal(n, np.float32)


def weighted_sum(weights: Array, seeds: Sequence[int] | Array, n: int) -> Array:
    """Σ w_i ε(seed_i), float32 [n]; a perturbation of weight 0 is not drawn."""
    total = np.zeros(n, np.float32)
    for weight, seed in zip(weights.tolist(), seeds, strict=True):
        if weight:
            total += np.float32(weight) * perturbation(int(seed), n)
    return total


def centered_ranks(returns: Array) -> Array:
    """Ranks of `returns` from -0.5, the lowest, to 0.5, float32 of the same shape; equal returns share their mean rank.

    Without the mean, a generation whose returns are all equal would be told apart by the order of its members.
    """
    _, group, counts = np.unique(returns, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts + 1) / 2  # of each group, from 0
    ranks = mean_rank[group].reshape(returns.shape) / max(returns.size - 1, 1) - (0.5 if returns.size > 1 else 0.0)
    return np.asarray(ranks, np.float32)


def merged_moments(moments: Array) -> tuple[float, Array, Array]:
    """Number, mean and variance of all rows, from those of each part: [P, 3, ...], the number in every element."""
    n = moments[:, 0]
    total = n.sum(0)
    mean = (n * moments[:, 1]).sum(0) / total
    variance = (n * (moments[:, 2] + np.square(moments[:, 1] - mean))).sum(0) / total
    return float(total.reshape(-1)[0]), mean, variance
