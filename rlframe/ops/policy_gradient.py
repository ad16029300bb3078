"""Policy-gradient losses row by row (clipped surrogate, clipped value error, KL), and statistics over valid rows.

In the statistics x, prediction and target have any shape; `valid` is bool of the same shape, or a ValueError gives both
shapes. It masks out rows without an action (see Samples).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LARGEST_LOG = 88.7  # whose exponential is finite in float32


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """r = exp(log r), finite: the gradient of a row that is clipped is then 0, and not 0 times inf, which is NaN."""
    return log_ratio.clamp(max=_LARGEST_LOG).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: Any) -> Tensor:
    """min(r A, clip(r, 1 - ε, 1 + ε) A), to be ascended (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    Args:
        ratio, advantage: r and A, any one shape.    clip: ε, a number or a tensor [].
    """
    return torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def clipped_value_error(value: Tensor, old_value: Tensor, return_: Tensor, clip: Any) -> Tensor:
    """Half the squared error of the value; with a finite clip the larger of that and of the clipped value's.

    So a value may always return towards the target, and only moves beyond the clip lose their gradient.

    Args:
        value, old_value, return_: V, V when acting, and its target, any one shape.
        clip: largest move of V from V when acting, in units of return, a number or a tensor []; number inf: none.
    """
    error = 0.5 * (value - return_).square()
    if not isinstance(clip, Tensor) and math.isinf(clip):
        return error
    moved = old_value + (value - old_value).clamp(-clip, clip)
    return torch.max(error, 0.5 * (moved - return_).square())


def kl_from_ratio(log_ratio: Tensor) -> Tensor:
    """Of the new policy from the old, row by row: r - 1 - log r, unbiased and never negative (Schulman 2020)."""
    return log_ratio.exp() - 1 - log_ratio


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x over valid rows, 0 if there are none. The gradient of the other rows is 0."""
    _check_shape(x, valid)
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def mean_weights(valid: Tensor) -> Tensor:
    """Weights [..., n] float32 whose dot product with x [..., n] is the mean of x over valid rows.

    Faster than `masked_mean`, but x must be finite on all rows.
    """
    return valid / valid.sum(-1, keepdim=True).clamp(min=1)


_EPSILON = 1e-8  # of a standard deviation


def masked_normalize(
    x: Tensor, valid: Tensor, total: Callable[[Tensor], Tensor] = lambda x: x, dim: int | None = None
) -> Tensor:
    """(x - mean) / (std + ε) with mean and population std over valid rows; 0 on the others.

    Args:
        total: sums a tensor over the processes that normalise their rows together.
        dim: the dimension to normalise over; None for all of them.
    """
    _check_shape(x, valid)
    sums = torch.stack([torch.where(valid, x, 0.0).sum(dim, keepdim=True), valid.sum(dim, keepdim=True)])
    sum_, n = total(sums).unbind()
    n = n.clamp(min=1)
    centred = torch.where(valid, x - sum_ / n, 0.0)
    return centred / ((total(centred.square().sum(dim, keepdim=True)) / n).sqrt() + _EPSILON)


@torch.no_grad()
def explained_variance(prediction: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """1 - Var[target - prediction] / Var[target] over valid rows; 0 if the target is constant.

    1 is a perfect prediction, 0 is as good as a constant.
    """
    error_variance, variance = _variance(target - prediction, valid), _variance(target, valid)
    return torch.where(variance > 0, 1.0 - error_variance / variance, 0.0)


def _variance(x: Tensor, valid: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, valid)).square(), valid)


def _check_shape(x: Tensor, valid: Tensor) -> None:
    if x.shape != valid.shape:
        raise ValueError(f"x and valid must have the same shape, got {tuple(x.shape)} and {tuple(valid.shape)}")
