"""Acting by generalised state-dependent exploration: noise that is a linear function of the policy's features.

Raffin, Kober, Stulp 2022, Smooth Exploration for Robotic Reinforcement Learning (https://arxiv.org/abs/2005.05719).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlframe.core.struct import Struct
from rlframe.core.types import Array


@dataclass(frozen=True, eq=False)
class NoiseMatrix(Struct):
    """State of an environment: the matrix E that its noise is made with."""

    matrix: Array  # [B, F, d] standard normal
    age: Array  # [B] float32: rows since it was drawn


def initial_matrix(n: int, shape: tuple[int, int], device: torch.device) -> NoiseMatrix:
    """The state of n environments before their first row, which draws."""
    return NoiseMatrix(torch.zeros(n, *shape, device=device), torch.zeros(n, device=device))


def held(state: NoiseMatrix, first: Any, drawn: Any, interval: float, xp: Any) -> NoiseMatrix:
    """The matrices for these rows: new ones at the start of an episode and after `interval` rows, else as before.

    Args:
        first: [B] bool.    drawn: [B, F, d] standard normal.    xp: the module of all arrays, torch or numpy.
    """
    fresh = first | (state.age >= interval)
    matrix = xp.where(fresh[:, None, None], drawn, state.matrix)
    return NoiseMatrix(matrix, xp.where(fresh, xp.ones_like(state.age), state.age + 1))


def state_dependent(features: Any, sigma: Any, matrix: Any) -> Any:
    """ε(s) = φ(s) (σ ⊙ E) [B, d], of features [B, F], σ [F, d] or a number, and matrices [B, F, d]; torch or NumPy."""
    return (features[:, None, :] @ (sigma * matrix))[:, 0]
