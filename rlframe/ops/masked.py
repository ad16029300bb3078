"""Statistics over valid rows, for losses and metrics; `valid` masks out rows without an action (see Samples).

x, prediction and target have any shape; `valid` is bool of the same shape, or a ValueError gives both shapes.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x over valid rows, 0 if there are none. The gradient of the other rows is 0."""
    _check_shape(x, valid)
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def mean_weights(valid: Tensor) -> Tensor:
    """Weights [..., n] float32 whose dot product with x [..., n] is the mean of x over valid rows.

    Faster than `masked_mean`, but x must be finite on all rows.
    """
    return valid / valid.sum(-1, keepdim=True).clamp(min=1)


def masked_normalize(
    x: Tensor,
    valid: Tensor,
    total: Callable[[Tensor], Tensor] = lambda x: x,
    dim: int | None = None,
    epsilon: float = 1e-8,
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
    return centred / ((total(centred.square().sum(dim, keepdim=True)) / n).sqrt() + epsilon)


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
