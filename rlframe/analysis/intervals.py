"""Mean or interquartile mean over seeds, and its 95 % bootstrap interval."""

import numpy as np

from rlframe.core.seeding import Role, generator

N_RESAMPLES = 2_000


def center(values: np.ndarray, kind: str = "mean") -> np.ndarray:
    """Mean over the seeds, axis -2; for iqm without the lowest and highest quarter (rounded down)."""
    cut = values.shape[-2] // 4 if kind == "iqm" else 0
    ordered = np.sort(values, axis=-2) if cut else values
    mean: np.ndarray = ordered[..., cut : values.shape[-2] - cut, :].mean(axis=-2)
    return mean


def bootstrap(values: np.ndarray, kind: str = "mean") -> tuple[np.ndarray, np.ndarray]:
    """The 2.5 % and 97.5 % percentiles of the center over resampled seeds, always the same (Efron 1979).

    Args:
        values: [n_seeds, n_points].
    Returns:
        low, high: [n_points]; with one seed both are its values.
    """
    n_seeds = len(values)
    if n_seeds == 1:
        return values[0], values[0]
    draws = generator(0, Role.NOISE).integers(n_seeds, size=(N_RESAMPLES, n_seeds))
    columns = np.array_split(np.arange(values.shape[1]), max(1, values.size // 1_000))  # to bound memory
    bands = [np.percentile(center(values[:, part][draws], kind), [2.5, 97.5], axis=0) for part in columns]
    low, high = np.concatenate(bands, axis=1)
    return low, high
