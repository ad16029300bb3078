"""Returns and advantages of a batch of rows [T, B], used by the on-policy algorithms, replay and R2D1.

All functions share these arguments:

    reward [T, B] float; terminated, truncated, valid [T, B] bool; value [T+1, B], whose row T bootstraps the end of
    the batch; discount γ and lambda_ λ, both in [0, 1]. Row t+1 always follows row t, also after the last step of an
    episode: it then holds the last observation and is not valid. A lost life is `terminated` with a valid row after it.

The TD error is δ[t] = r[t] + γ (1 - terminated[t]) V[t+1] - V[t]. Traces and sums are cut between rows t and t+1 if
row t is terminated or truncated, or if one of them is not valid.

Outputs are 0 on rows that are not valid, float32 (float64 for float64 values), and have no gradient. Inputs are not
modified. A ValueError names the argument with a wrong shape or range.
"""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def generalized_advantage(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    discount: float,
    lambda_: float,
) -> tuple[Tensor, Tensor]:
    """GAE(γ, λ), and the λ-return: advantage [T, B], return_ [T, B].

    A[t] = Σ_l (γλ)^l δ[t+l] = δ[t] + γλ A[t+1],   return_[t] = A[t] + V[t]
    (Schulman et al. 2016, arXiv 1506.02438, eq. 16)
    """
    _check(reward, value, terminated, truncated, valid, discount, lambda_)
    delta = _td_error(reward, value[:-1], value[1:], terminated, discount).mul_(valid)
    advantage = _accumulate(delta, _continues(terminated, truncated, valid).to(delta.dtype).mul_(discount * lambda_))
    return advantage, (advantage + value[:-1]).mul_(valid)


@torch.no_grad()
def lambda_return(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    discount: float,
    lambda_: float,
) -> Tensor:
    """TD(λ) return [T, B], from one-step (λ = 0) to Monte Carlo (λ = 1).

    G[t] = r[t] + γ (1 - terminated[t]) ((1 - λ) V[t+1] + λ G[t+1]),   G[t+1] = V[t+1] at a cut, G[T] = V[T]
    (Sutton & Barto 2018, eq. 12.18)
    """
    _check(reward, value, terminated, truncated, valid, discount, lambda_)
    continues = _continues(terminated, truncated, valid)
    bootstrap = (discount * value[1:]).masked_fill_(terminated, 0.0)
    return_ = (reward + bootstrap * (1.0 - lambda_ * continues.to(bootstrap.dtype))).mul_(valid)
    return _accumulate(return_, continues.to(return_.dtype).mul_(discount * lambda_))


def discounted_return(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, discount: float
) -> Tensor:
    """Monte Carlo return [T, B], bootstrapped from the value at truncations and at the end of the batch.

    G[t] = r[t] + γ G[t+1],   G[t+1] = 0 after termination, V[t+1] after truncation, G[T] = V[T]
    (Sutton & Barto 2018, eq. 3.9). Pass zeros as `value` for no bootstrap.
    """
    return lambda_return(reward, value, terminated, truncated, valid, discount, lambda_=1.0)


@torch.no_grad()
def n_step_return(
    reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, discount: float, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Discounted sum of up to n rewards, and the row and factor of the bootstrap.

    G[t] = r[t] + γ r[t+1] + ... + γ^(k-1) r[t+k-1],   k = min(n, steps to the episode's end, T - t)
    target[t] = G[t] + bootstrap[t] * V(row index[t]),   index[t] = t + k      (Sutton & Barto 2018, eq. 7.1)

    At a truncated end, row t+k is the episode's last observation. The cost is O(n T B).

    Returns:
        return_ [T, B]; bootstrap [T, B], γ^k, or 0 if terminated; index [T, B] int64 in 0..T, t on rows not valid.
    """
    _check(reward, None, terminated, truncated, valid, discount, 1.0)
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    T = reward.shape[0]
    continues = _continues(terminated, truncated, valid)
    return_ = torch.zeros_like(reward)
    k = torch.zeros_like(reward, dtype=torch.int64)
    no_bootstrap = ~valid
    reached = valid  # reached[t]: reward t+i belongs to the sum of row t, for t < T-i
    for i in range(min(n, T)):
        return_[: T - i] += discount**i * reward[i:] * reached
        k[: T - i] += reached
        no_bootstrap[: T - i] |= reached & terminated[i:]
        reached = reached[:-1] & continues[i : T - 1]
    bootstrap = torch.pow(discount, k.to(reward.dtype)).masked_fill_(no_bootstrap, 0.0)
    return return_, bootstrap, k + torch.arange(T, device=k.device)[:, None]


@torch.no_grad()
def v_trace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    discount: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    lambda_: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace targets vs [T, B] and policy-gradient advantages [T, B] for off-policy data. On-policy, vs = λ-return.

    vs[t] = V[t] + ρ[t] δ[t] + γ c[t] (vs[t+1] - V[t+1]),   ρ = min(rho_clip, π/μ),   c = λ min(c_clip, π/μ)
    advantage[t] = ρ[t] (r[t] + γ (1 - terminated[t]) vs[t+1] - V[t]),   vs[T] = V[T]
    (Espeholt et al. 2018, arXiv 1802.01561, remarks 1 and 2 and section 4.2)

    Args:
        log_rho: [T, B], log π(a|x) - log μ(a|x); ignored on rows not valid.    rho_clip, c_clip: ρ̄ >= c̄ > 0.
    """
    _check(reward, value, terminated, truncated, valid, discount, lambda_)
    _check_shape("log_rho", log_rho, reward.shape)
    if not rho_clip >= c_clip > 0:
        raise ValueError(f"rho_clip={rho_clip} and c_clip={c_clip} must satisfy rho_clip >= c_clip > 0")
    rho = log_rho.masked_fill(~valid, -torch.inf).exp()
    clipped_rho = rho.clamp(max=rho_clip)
    delta = clipped_rho * _td_error(reward, value[:-1], value[1:], terminated, discount)
    trace = rho.clamp(max=c_clip) * _continues(terminated, truncated, valid) * (discount * lambda_)
    correction = _accumulate(delta, trace)  # vs - V; 0 on rows not valid, so the next vs of a truncated row is V
    next_vs = value[1:] + torch.cat([correction[1:], torch.zeros_like(correction[:1])])
    advantage = clipped_rho * _td_error(reward, value[:-1], next_vs, terminated, discount)
    return (correction + value[:-1]).mul_(valid), advantage


def _td_error(reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, discount: float) -> Tensor:
    return reward + (discount * next_value).masked_fill_(terminated, 0.0) - value


def _continues(terminated: Tensor, truncated: Tensor, valid: Tensor) -> Tensor:
    """Whether row t+1 continues row t: [T, B] bool, False on the last row of the batch."""
    continues = terminated.logical_or(truncated).logical_not_().logical_and_(valid)
    continues[:-1] &= valid[1:]
    continues[-1] = False
    return continues


def _accumulate(x: Tensor, decay: Tensor) -> Tensor:
    """y[t] = x[t] + decay[t] y[t+1] with y[T] = 0, computed in place of x.

    [128, 8] on one core of an EPYC takes 19 us; doubling in torch 69, a loop over time in NumPy 87, in torch 260.
    [2048, 1]: 31, 112, 2300, 5700. On a GPU it is log2(T) rounds of two kernels instead of T.
    """
    if x.device.type == "cpu":
        _double(x.numpy(), decay.numpy())
    else:
        _double(x, decay)
    return x


def _double(x: Any, decay: Any) -> None:
    """Add the next 1, 2, 4, ... rows to each row: every round doubles the number of terms in x[t]."""
    T, step = len(x), 1
    while step < T:
        x[:-step] += decay[: T - step] * x[step:]
        decay = decay[:-step] * decay[step:]
        step *= 2


def _check(
    reward: Tensor,
    value: Tensor | None,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    discount: float | Tensor,
    lambda_: float | Tensor,
) -> None:
    if reward.ndim != 2 or 0 in reward.shape:
        raise ValueError(f"reward must be [T, B] with T, B > 0, got shape {tuple(reward.shape)}")
    for name, mask in (("terminated", terminated), ("truncated", truncated), ("valid", valid)):
        _check_shape(name, mask, reward.shape)
        if mask.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {mask.dtype}")
    if value is not None:
        _check_shape("value", value, (reward.shape[0] + 1, reward.shape[1]))
    for name, number in (("discount", discount), ("lambda_", lambda_)):
        if not isinstance(number, Tensor) and not 0.0 <= number <= 1.0:  # a tensor may be on a device
            raise ValueError(f"{name}={number} must lie in [0, 1]")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(tensor.shape)}")
