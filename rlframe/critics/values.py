"""What the numbers of a critic mean: the expected return, a categorical distribution of it, or its quantiles."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.ops.q_learning import categorical_loss, clip_target, expected_loss, quantile_loss, td_loss

KINDS = ("expected", "categorical", "quantile")


class Value(ABC):
    """How `n_atoms` numbers become a Q-value, and how they learn from a target; stateless.

    Targets are G + γ^k Z' of the return's distribution Z' that comes next: `return_` [n] is G, `bootstrap` [n] is γ^k,
    or 0 after termination.
    """

    n_atoms: int
    n_cosines = 0  # by which the network is told at which fractions the numbers are quantiles; 0: it is not

    def made_with(self) -> dict[str, Any]:
        """Its settings by name; values with the same ones are equal."""
        name = type(self).__name__.removesuffix("Value").lower()
        return {"value": name} | {key: x for key, x in vars(self).items() if isinstance(x, int | float)}

    @abstractmethod
    def q(self, values: Any) -> Any:
        """Q [...] from values [..., n_atoms]."""

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        """The same in NumPy; here by what torch and NumPy call alike."""
        return self.q(values)

    @abstractmethod
    def loss(
        self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor, clip: Any = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Loss and error >= 0 [..., n] of values [..., n, n_atoms]; only the loss has a gradient.

        Args:
            target: [n, n_atoms] of the next action.    clip: largest magnitude of a target, a number or a tensor [].
        """

    def at(self, *tau: Tensor) -> Value:
        """This value where its numbers are quantiles at the fractions tau [n, n_atoms], if any are given."""
        return self

    def loss_of_actions(
        self, values: Tensor, action: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, error and Q-value [n] of the actions taken [n] int64, of the values of all actions [n, A, n_atoms]."""
        taken = of_actions(values, action)
        return *self.loss(taken, target, return_, bootstrap), self.q(taken.detach())

    def of_best(self, values: Tensor, chooser: Tensor) -> Tensor:
        """Values [n, n_atoms] of the action that is best in `chooser`; both [n, A, n_atoms]."""
        return of_actions(values, self.q(chooser).argmax(-1))

    def least(self, values: Tensor) -> Tensor:
        """Values [n, n_atoms] of the critic with the least Q-value, of values [k, n, n_atoms]."""
        index = self.q(values).argmin(0)[None, :, None].expand(1, -1, values.shape[-1])
        return values.gather(0, index).squeeze(0)


def of_actions(values: Tensor, action: Tensor) -> Tensor:
    """Values [..., n, n_atoms] of one action [n] per row, from the values of all actions [..., n, A, n_atoms]."""
    *rows, _, n_atoms = values.shape
    index = action.expand(rows)[..., None, None].expand(*rows, 1, n_atoms)
    return values.gather(-2, index).squeeze(-2)


class ExpectedValue(Value):
    """The expected return itself, by the Huber loss (Mnih et al. 2015); ½ δ² where huber_delta is inf."""

    n_atoms = 1

    def __init__(self, huber_delta: float = 1.0) -> None:
        """`huber_delta`: |error| above which the loss is linear."""
        self.huber_delta = huber_delta

    def q(self, values: Any) -> Any:
        return values.squeeze(-1)

    def of_best(self, values: Tensor, chooser: Tensor) -> Tensor:
        return values.amax(1) if chooser is values else super().of_best(values, chooser)

    def least(self, values: Tensor) -> Tensor:
        return values.amin(0)

    def loss(
        self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor, clip: Any = math.inf
    ) -> tuple[Tensor, Tensor]:
        y = clip_target(torch.addcmul(return_, bootstrap, target.detach().squeeze(-1)), clip)
        return td_loss(values.squeeze(-1), y.expand(values.shape[:-1]), self.huber_delta)

    def loss_of_actions(
        self, values: Tensor, action: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return expected_loss(values, action, target.squeeze(-1), return_, bootstrap, self.huber_delta)


class CategoricalValue(Value):
    """Logits of a distribution over `n_atoms` returns spaced evenly from v_min to v_max (Bellemare et al. 2017).

    Raises:
        ValueError: fewer than two atoms, or an empty range.
    """

    def __init__(self, n_atoms: int, v_min: float, v_max: float) -> None:
        if n_atoms < 2 or not v_min < v_max:
            raise ValueError(
                f"algo.n_atoms={n_atoms} must be at least 2 and algo.v_min={v_min} below algo.v_max={v_max}"
            )
        self.n_atoms, self.v_min, self.v_max = n_atoms, v_min, v_max
        self.support = torch.linspace(v_min, v_max, n_atoms)  # z

    def q(self, values: Tensor) -> Tensor:
        if values.is_cpu:
            return values.softmax(-1) @ self.support
        # Made on the GPU: a copy would make each update wait.
        return values.softmax(-1) @ torch.linspace(self.v_min, self.v_max, self.n_atoms, device=values.device)

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        weights = np.exp(values - values.max(-1, keepdims=True))
        return (weights * self.support.numpy()).sum(-1) / weights.sum(-1)

    def loss(
        self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor, clip: Any = math.inf
    ) -> tuple[Tensor, Tensor]:
        return categorical_loss(values, target, return_, bootstrap, self.v_min, self.v_max)


class QuantileValue(Value):
    """Returns at the quantile midpoints (2i + 1) / 2N, N = n_atoms >= 1 (Dabney et al. 2018)."""

    def __init__(self, n_atoms: int, huber_delta: float = 1.0, tau: Tensor | None = None) -> None:
        """`tau`: other fractions than the midpoints, [n, n_atoms] of each row."""
        if n_atoms < 1:
            raise ValueError(f"algo.n_atoms={n_atoms} must be at least 1")
        self.n_atoms, self.huber_delta, self.tau = n_atoms, huber_delta, tau

    def q(self, values: Any) -> Any:
        return values.mean(-1)

    def loss(
        self, values: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor, clip: Any = math.inf
    ) -> tuple[Tensor, Tensor]:
        return quantile_loss(values, target, return_, bootstrap, self.huber_delta, clip, self.tau)


class ImplicitValue(QuantileValue):
    """Returns at fractions that each update draws (IQN, Dabney et al. 2018); see q_network.Fractions.

    The Q-value is the mean of those that the network was asked for; acting asks for the midpoints, as QuantileValue.
    """

    def __init__(self, n_atoms: int, n_cosines: int = 64, huber_delta: float = 1.0) -> None:
        super().__init__(n_atoms, huber_delta)
        self.n_cosines = n_cosines

    def at(self, *tau: Tensor) -> Value:
        return QuantileValue(tau[0].shape[-1], self.huber_delta, tau[0]) if tau else self
