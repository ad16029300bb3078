"""Scores of several tasks and seeds: aggregates, performance profiles, probability of improvement, and intervals.

All as in Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, NeurIPS 2021 (arXiv
2108.13264). `scores` has an array [..., n_seeds] for each task, normalised so that tasks compare; tasks may have
different numbers of seeds. Every statistic reduces the last axis and the tasks.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rlframe.core.seeding import Role, generator

Scores = Sequence[np.ndarray]
N_RESAMPLES = 2_000


def mean(scores: Scores) -> np.ndarray:
    """The mean over tasks of their means over seeds."""
    return np.mean([task.mean(axis=-1) for task in scores], axis=0)


def median(scores: Scores) -> np.ndarray:
    """The median over tasks of their means over seeds."""
    return np.median([task.mean(axis=-1) for task in scores], axis=0)


def iqm(scores: Scores) -> np.ndarray:
    """Interquartile mean: of all runs of all tasks without the lowest and highest quarter (rounded down)."""
    runs = np.sort(np.concatenate(scores, axis=-1), axis=-1)
    cut = runs.shape[-1] // 4
    return np.asarray(runs[..., cut : runs.shape[-1] - cut].mean(axis=-1))


CENTERS = {"mean": mean, "iqm": iqm}  # of the seeds of one experiment


def optimality_gap(scores: Scores) -> np.ndarray:
    """How much the scores, those above 1 cut to it, are below 1 in the mean."""
    return 1 - mean([np.minimum(task, 1) for task in scores])


def profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """The fraction of runs with a score above each threshold, the mean over tasks: [n_thresholds, ...]."""
    above = [(task > thresholds.reshape(-1, *(1,) * task.ndim)).mean(axis=-1) for task in scores]
    return np.mean(above, axis=0)


def probability_of_improvement(x: Scores, y: Scores) -> np.ndarray:
    """How probable it is that a run of x scores above one of y on the same task, the mean over tasks; ties are a half.

    On each task it is the Mann-Whitney U statistic over the number of pairs.
    """
    differences = [a[..., :, None] - b[..., None, :] for a, b in zip(x, y, strict=True)]
    return np.mean([(np.sign(each) + 1).mean(axis=(-2, -1)) / 2 for each in differences], axis=0)


def interval(statistic: Callable[..., np.ndarray], *groups: Scores) -> tuple[np.ndarray, np.ndarray]:
    """The 2.5 % and 97.5 % percentiles of a statistic of groups of scores over bootstrap resamples (Efron 1979).

    They are stratified: seeds of every task of every group are resampled by themselves. They are always the same.

    Returns:
        low, high: of the statistic's shape.
    """
    rng = generator(0, Role.NOISE)

    def resampled(task: np.ndarray) -> np.ndarray:
        n = task.shape[-1]
        return task[..., rng.integers(n, size=(N_RESAMPLES, n))]

    values = statistic(*([resampled(task) for task in scores] for scores in groups))
    low, high = np.percentile(values, [2.5, 97.5], axis=-1)
    return low, high
