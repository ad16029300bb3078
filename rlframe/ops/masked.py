"""Statistics over the rows that count: `valid` is False where a row's action was ignored (see core.types.Samples)."""

from collections.abc import Callable

import torch
from torch import Tensor


def _itself(x: Tensor) -> Tensor:
    return x


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x over valid rows; 0 if there is none. Differentiable; no gradient reaches the other rows.

    Args:
        x: any shape.    valid: the same shape, bool.
    Raises:
        ValueError: the shapes differ.
    """
    _check_shape(x, valid)
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def mean_weights(valid: Tensor) -> Tensor:
    """By which rows [..., n] are weighted in means over the valid ones, float32 [..., n]; 0 for the others.

    For what is finite on all rows, a dot product with these does what `masked_mean` does, in fewer steps.
    """
    return valid / valid.sum(-1, keepdim=True).clamp(min=1)


def masked_normalize(
    x: Tensor,
    valid: Tensor,
    total: Callable[[Tensor], Tensor] = _itself,
    dim: int | None = None,
    epsilon: float = 1e-8,
) -> Tensor:
    """(x - mean) / (std + ε) with mean and population std over valid rows; 0 on the others.

    Args:
        x: any shape.    valid: the same shape, bool.
        dim: the dimension that is normalised over, for each index of the others apart; None: all together.
        total: adds a tensor up over processes that normalise together, each its own rows.
    Raises:
        ValueError: the shapes differ.
    """
    _check_shape(x, valid)
    sums = torch.stack([torch.where(valid, x, 0.0).sum(dim, keepdim=True), valid.sum(dim, keepdim=True)])
    sum_, n = total(sums).unbind()
    n = n.clamp(min=1)
    centred = torch.where(valid, x - sum_ / n, 0.0)
    return centred / ((total(centred.square().sum(dim, keepdim=True)) / n).sqrt() + epsilon)


@torch.no_grad()
def explained_variance(prediction: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """1 - Var[target - prediction] / Var[target] over valid rows: 1 is perfect, 0 a constant's worth, below 0 worse.

    0 where the target does not vary.

    Args:
        prediction, target: any one shape.    valid: the same shape, bool.
    Raises:
        ValueError: the shapes differ.
    """
    error_variance, variance = (_variance(x, valid) for x in (target - prediction, target))
    return torch.where(variance > 0, 1.0 - error_variance / variance, 0.0)


def _variance(x: Tensor, valid: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, valid)).square(), valid)


def _check_shape(x: Tensor, valid: Tensor) -> None:
    if x.shape != valid.shape:
        raise ValueError(f"x and valid must have one shape, got {tuple(x.shape)} and {tuple(valid.shape)}")
