"""Losses and weights of algorithms that learn from data of other policies: expectiles, advantage weights, CQL's gap."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def expectile_loss(error: Tensor, expectile: Any) -> Tensor:
    """L_2^τ(u) = |τ - 1{u < 0}| u², any shape   (Kostrikov et al. 2022, arXiv 2110.06169, eq. 5).

    Its mean is least over m, with u = x - m, at the τ-expectile of x: the mean for τ = 0.5, the largest x for τ -> 1.

    Args:
        error: u = target - prediction.    expectile: τ in (0, 1), a number or a tensor [].
    """
    return (expectile - (error.detach() < 0).to(error.dtype)).abs() * error.square()


@torch.no_grad()
def advantage_weight(advantage: Tensor, beta: Any, most: Any = math.inf) -> Tensor:
    """min(exp(β A), w), any shape: weights of log π(a|s) that make imitation prefer better actions; 1 for β = 0.

    (Wang et al. 2018, eq. 4; Kostrikov et al. 2022, eq. 7, whose code has w = 100)

    Args:
        advantage: A.    beta: β >= 0, a number or a tensor [].    most: w, the same.
    """
    return (beta * advantage).exp().clamp(max=most)


def conservative_gap(q: Tensor, q_of_data: Tensor, log_density: Any = 0.0) -> Tensor:
    """log Σ_a exp Q(s, a) - Q(s, a of the data): how far Q values other actions above those of the data.

    For drawn actions a_j ~ μ_j it is log Σ_j exp Q(s, a_j) / μ_j(a_j), an estimate of the integral by importance times
    their number (Kumar et al. 2020, arXiv 2006.04779, eq. 4 and appendix F, as in the authors' code).

    Args:
        q: [..., N], of all Discrete actions, -inf for forbidden ones, or of N drawn actions.    q_of_data: [...].
        log_density: log μ_j(a_j) [..., N]; 0: of all actions.
    Returns:
        [...].
    """
    return (q - log_density).logsumexp(-1) - q_of_data
