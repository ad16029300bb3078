"""Losses of the DQN family on independent rows, for each kind of value; soft targets; and value rescaling.

The losses share: `return_` [n], the n-step return; `bootstrap` [n], the factor γ^k on the next value, 0 after
termination. Targets are constants. Each returns the loss [n] and the error [n] >= 0, for prioritized replay.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def taken(q: Tensor, action: Tensor) -> Tensor:
    """Q(s, a) [..., n] of the actions a [n] that were taken, of Q(s, .) [..., n, A]."""
    return q.gather(-1, action.expand(q.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def expected_loss(
    q: Tensor, action: Tensor, target_q: Tensor, return_: Tensor, bootstrap: Tensor, huber_delta: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Huber loss of the TD error δ, whose gradient is the error clipped to ±huber_delta; the error |δ|; and Q(s, a).

    δ = G + γ^k Q'(s', a') - Q(s, a)   (Mnih et al. 2015, methods)

    Args:
        q: [n, A] or [n, A, 1] of all actions.    action: [n] int64.    target_q: [n] of the next action.
    """
    q = taken(q.flatten(1), action)
    loss, error = td_loss(q, torch.addcmul(return_, bootstrap, target_q.detach()), huber_delta)
    return loss, error, q.detach()


def td_loss(q: Tensor, target: Tensor, huber_delta: float = 1.0) -> tuple[Tensor, Tensor]:
    """Huber loss, quadratic up to `huber_delta`, and |target - q|, for `q` and `target` of the same shape."""
    return _huber(target - q, huber_delta), (target - q.detach()).abs()


def _huber(error: Tensor, delta: float) -> Tensor:
    """L_δ(u): u²/2 up to |u| = δ, then linear."""
    if delta == math.inf:
        return 0.5 * error.square()
    return F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)


def clip_target(target: Tensor, clip: Any) -> Tensor:
    """The targets within ±clip, a number or a tensor []; number inf: as they are."""
    if not isinstance(clip, Tensor) and clip == math.inf:
        return target
    return target.clamp(-clip, clip)


def categorical_loss(
    logits: Tensor, target_logits: Tensor, return_: Tensor, bootstrap: Tensor, v_min: float, v_max: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the projected target distribution; the error is their KL divergence.

    (Bellemare, Dabney & Munos 2017, arXiv 1707.06887, algorithm 1; the KL as priority: Hessel et al. 2018)

    Args:
        logits, target_logits: [..., n, N] and [n, N], for N returns spaced evenly from v_min to v_max.
    """
    target = project(target_logits.detach().softmax(-1), return_, bootstrap, v_min, v_max)
    cross_entropy = -(target * logits.log_softmax(-1)).sum(-1)
    entropy = -torch.special.xlogy(target, target).sum(-1)
    return cross_entropy, (cross_entropy.detach() - entropy).clamp_(min=0)


@torch.no_grad()
def project(probability: Tensor, return_: Tensor, bootstrap: Tensor, v_min: float, v_max: float) -> Tensor:
    """Φ: the distribution of G + γ^k Z on the support z, with each atom's mass split between its two neighbours.

    (Bellemare et al. 2017, eq. 7)

    Args:
        probability: [n, N], of Z on z = v_min ... v_max.
    Returns:
        [n, N], rows summing to 1.
    """
    n_atoms = probability.shape[-1]
    support = torch.linspace(v_min, v_max, n_atoms, dtype=probability.dtype, device=probability.device)
    moved = (return_.unsqueeze(-1) + bootstrap.unsqueeze(-1) * support).clamp(v_min, v_max)
    place = ((moved - v_min) * ((n_atoms - 1) / (v_max - v_min))).clamp(max=n_atoms - 1)  # b; rounding went beyond
    below = place.floor().clamp(max=n_atoms - 2)
    share = place - below  # of the upper neighbour
    index = below.nan_to_num(0.0).long()  # NaN is in the shares, so the loss becomes NaN
    projected = torch.zeros_like(probability)
    projected.scatter_add_(-1, index, probability * (1 - share))
    return projected.scatter_add_(-1, index + 1, probability * share)


def quantile_loss(
    theta: Tensor,
    target_theta: Tensor,
    return_: Tensor,
    bootstrap: Tensor,
    huber_delta: float = 1.0,
    clip: Any = math.inf,
    tau: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantile Huber loss, summed over quantiles, averaged over target samples; the error is |mean u|.

    ρ_τ(u) = |τ - 1{u < 0}| L_κ(u),   u_ij = G + γ^k θ'_j - θ_i,   τ_i = (2i + 1) / 2N
    (Dabney et al. 2018, arXiv 1710.10044, eq. 10 and algorithm 1)

    Args:
        theta, target_theta: [..., n, N] and [n, N] quantiles.    huber_delta: κ; inf: half the squared error.
        clip: of the targets (see clip_target).
        tau: other fractions of theta, [N] or [..., n, N] in [0, 1]; those of the target are its own.
            (Dabney, Ostrovski, Silver & Munos 2018, IQN, arXiv 1806.06923, section 3; their loss is divided by κ)
            The error is then mean |u_ij|, in proportion to that of the code of Beyond the Rainbow (arXiv 2411.03820).
    """
    target = clip_target(return_.unsqueeze(-1) + bootstrap.unsqueeze(-1) * target_theta.detach(), clip)
    u = target.unsqueeze(-2) - theta.unsqueeze(-1)
    if tau is None:
        n = theta.shape[-1]
        tau = (torch.arange(n, dtype=theta.dtype, device=theta.device) + 0.5) / n
        error = (target.mean(-1) - theta.detach().mean(-1)).abs()
    else:
        error = u.detach().abs().mean((-2, -1))
    weight = (tau.unsqueeze(-1) - (u.detach() < 0).to(u.dtype)).abs()
    loss = (weight * _huber(u, huber_delta)).mean(-1).sum(-1)
    return loss, error


def truncated(theta: Tensor, n_dropped: int) -> Tensor:
    """The atoms of all critics' quantiles in one, sorted, without the k n_dropped largest.

    (Kuznetsov, Shvechikov, Grishin & Vetrov 2020, TQC, arXiv 2005.04269, section 4: the truncated mixture)

    Args:
        theta: [k, n, N] of k critics.    n_dropped: of each critic, on average; below N.
    Returns:
        [n, k (N - n_dropped)].
    """
    k, _, n_atoms = theta.shape
    pooled = theta.transpose(0, 1).flatten(1).sort(-1).values
    return pooled[:, : k * (n_atoms - n_dropped)]


def soft_values(values: Tensor, q: Tensor, temperature: float) -> Tensor:
    """Σ_a π(a|s) (Z(s, a) - τ ln π(a|s)), π = softmax(Q / τ)   (Vieillard, Pietquin & Geist 2020, arXiv 2007.14430).

    Args:
        values: [n, A, N], Q-values or quantiles.    q: [n, A], -inf for forbidden actions.    temperature: τ.
    Returns:
        [n, N].
    """
    policy = (q / temperature).softmax(-1)
    entropy = torch.special.entr(policy).sum(-1, keepdim=True)
    return (policy.unsqueeze(-1) * values).sum(-2) + temperature * entropy


def log_policy_bonus(q: Tensor, action: Tensor, temperature: float, least: float) -> Tensor:
    """max(τ ln π(a|s), least) [n], π = softmax(Q / τ), of the actions taken [n]; arguments as in `soft_values`."""
    log_policy = (q / temperature).log_softmax(-1)
    return (temperature * taken(log_policy, action)).clamp(min=least)


_EPSILON = 1e-3  # of Kapturowski et al. 2019: keeps the inverse Lipschitz


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x) (√(|x| + 1) - 1) + ε x, ε = 10^-3   (Pohlen et al. 2018; Kapturowski et al. 2019, section 2.3)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + _EPSILON * x


def unscale(y: Tensor) -> Tensor:
    """h^-1(y) = sign(y) (((√(1 + 4ε (|y| + 1 + ε)) - 1) / 2ε)^2 - 1)   (Pohlen et al. 2018, proposition A.2).

    Computed in float64, since a difference of nearly equal numbers is divided by ε.
    """
    wide = y.double()
    root = (torch.sqrt(1 + 4 * _EPSILON * (wide.abs() + 1 + _EPSILON)) - 1) / (2 * _EPSILON)
    return (wide.sign() * (root.square() - 1)).to(y.dtype)
