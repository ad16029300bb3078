"""What the numbers of a Q-network's head say of returns - their mean, a distribution, quantiles - and their loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from rlframe.ops.q_learning import QLoss, categorical_loss, expected_loss, quantile_loss


class QValue(ABC):
    """How `n_atoms` numbers for each action become its Q-value. Stateless."""

    n_atoms: int

    @abstractmethod
    def q(self, values: Tensor) -> Tensor:
        """Q [..., A] from the head's output [..., A, n_atoms]."""

    @abstractmethod
    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        """The same in NumPy."""

    @abstractmethod
    def loss(self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor) -> QLoss:
        """Loss and error [n], and the gradient [n, n_atoms] (see ops.q_learning).

        Args:
            values: [n, n_atoms] of the action taken.    target: [n, n_atoms] of the next action.
            return_, bootstrap: [n].
        """


def of_actions(values: Tensor, action: Tensor) -> Tensor:
    """The numbers [n, n_atoms] of an action [n] each, of those of all actions [n, A, n_atoms]."""
    return values.gather(1, _places(values, action)).squeeze(1)


def to_actions(values: Tensor, action: Tensor, gradient: Tensor) -> Tensor:
    """From the gradient of `of_actions` [n, n_atoms] that of the values [n, A, n_atoms]."""
    return torch.zeros_like(values).scatter_(1, _places(values, action), gradient.unsqueeze(1))


def _places(values: Tensor, action: Tensor) -> Tensor:
    return action.view(-1, 1, 1).expand(-1, 1, values.shape[-1])


class Expected(QValue):
    """The expected return itself (Mnih et al. 2015)."""

    n_atoms = 1

    def q(self, values: Tensor) -> Tensor:
        return values.squeeze(-1)

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        return values[..., 0]

    def loss(self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor) -> QLoss:
        loss, error, gradient = expected_loss(values.squeeze(-1), target.squeeze(-1), return_, bootstrap)
        return QLoss(loss, error, gradient.unsqueeze(-1))


class Categorical(QValue):
    """Logits of a distribution over `n_atoms` returns spaced evenly from v_min to v_max (Bellemare et al. 2017)."""

    def __init__(self, n_atoms: int, v_min: float, v_max: float) -> None:
        """Raises:
        ValueError: fewer than two atoms, or an empty range.
        """
        if n_atoms < 2 or not v_min < v_max:
            raise ValueError(
                f"algo.n_atoms={n_atoms} must be at least 2 and algo.v_min={v_min} below algo.v_max={v_max}"
            )
        self.n_atoms, self.v_min, self.v_max = n_atoms, v_min, v_max
        self.support = torch.linspace(v_min, v_max, n_atoms)  # z

    def q(self, values: Tensor) -> Tensor:
        if values.is_cpu:
            return values.softmax(-1) @ self.support
        # Copied to a GPU, the support would be waited for at each update.
        return values.softmax(-1) @ torch.linspace(self.v_min, self.v_max, self.n_atoms, device=values.device)

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        weights = np.exp(values - values.max(-1, keepdims=True))
        return (weights * self.support.numpy()).sum(-1) / weights.sum(-1)

    def loss(self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor) -> QLoss:
        return categorical_loss(values, target, return_, bootstrap, self.v_min, self.v_max)


class Quantile(QValue):
    """Returns at the quantile midpoints (2i + 1) / 2N (Dabney et al. 2018)."""

    def __init__(self, n_atoms: int) -> None:
        """Raises:
        ValueError: no quantile.
        """
        if n_atoms < 1:
            raise ValueError(f"algo.n_atoms={n_atoms} must be at least 1")
        self.n_atoms = n_atoms

    def q(self, values: Tensor) -> Tensor:
        return values.mean(-1)

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        return values.mean(-1)

    def loss(self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor) -> QLoss:
        return quantile_loss(values, target, return_, bootstrap)
