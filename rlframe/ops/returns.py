"""Returns and advantages over [T, B] rows in which the end of an episode is a row of its own.

Shared by every function here:

    Rows. `reward, terminated, truncated, valid` are [T, B]; `value` is [T+1, B], its row T the bootstrap of the batch's
    end. The successor of row t is always row t+1, also after the last step of an episode: that row holds the last
    observation, `valid` False. A lost life is `terminated` with a valid row after it.

    TD error.  δ[t] = r[t] + γ (1 - terminated[t]) V[t+1] - V[t], and nothing flows from row t+1 into row t where
    `terminated | truncated`, or where either row is not valid.

    Outputs are 0 on rows that are not valid, float32 (float64 for float64 values), without gradient. Inputs are never
    changed. A ValueError names the argument whose shape or range is wrong.
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
    """GAE(γ, λ) and the λ-return it implies.

    A[t] = Σ_l (γλ)^l δ[t+l] = δ[t] + γλ A[t+1],   return_[t] = A[t] + V[t]
    (Schulman et al. 2016, arXiv 1506.02438, eq. 16)

    Args:
        reward, terminated, truncated, valid: [T, B].    value: [T+1, B].
        discount, lambda_: γ and λ, in [0, 1].
    Returns:
        advantage [T, B]; return_ [T, B].
    """
    _check(reward, value, terminated, truncated, valid, discount, lambda_)
    delta = _td_error(reward, value[:-1], value[1:], terminated, discount).mul_(valid)
    advantage = _accumulate(delta, _flows(terminated, truncated, valid).to(delta.dtype).mul_(discount * lambda_))
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
    """TD(λ) return, from one-step (λ = 0) to Monte Carlo (λ = 1).

    G[t] = r[t] + γ (1 - terminated[t]) ((1 - λ) V[t+1] + λ G[t+1]),   G[t+1] = V[t+1] where nothing flows, G[T] = V[T]
    (Sutton & Barto 2018, eq. 12.18)

    Args:
        reward, terminated, truncated, valid: [T, B].    value: [T+1, B].
        discount, lambda_: γ and λ, in [0, 1].
    Returns:
        return_ [T, B].
    """
    _check(reward, value, terminated, truncated, valid, discount, lambda_)
    flows = _flows(terminated, truncated, valid)
    bootstrap = (discount * value[1:]).masked_fill_(terminated, 0.0)
    return_ = (reward + bootstrap * (1.0 - lambda_ * flows.to(bootstrap.dtype))).mul_(valid)
    return _accumulate(return_, flows.to(return_.dtype).mul_(discount * lambda_))


def discounted_return(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, discount: float
) -> Tensor:
    """Monte Carlo return, completed by the value where an episode was truncated or the batch ends.

    G[t] = r[t] + γ G[t+1],   G[t+1] = 0 after termination, V[t+1] after truncation, G[T] = V[T]
    (Sutton & Barto 2018, eq. 3.9)

    Args:
        reward, terminated, truncated, valid: [T, B].    value: [T+1, B]; zeros to do without a bootstrap.
        discount: γ, in [0, 1].
    Returns:
        return_ [T, B].
    """
    return lambda_return(reward, value, terminated, truncated, valid, discount, lambda_=1.0)


@torch.no_grad()
def n_step_return(
    reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, discount: float, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Discounted sum of up to n rewards, and where and how strongly to bootstrap.

    G[t] = r[t] + γ r[t+1] + ... + γ^(k-1) r[t+k-1],   k = min(n, steps to the episode's end, T - t)
    target[t] = G[t] + bootstrap[t] * V(row index[t]),   index[t] = t + k      (Sutton & Barto 2018, eq. 7.1)

    The row t+k of a truncated episode is its last observation. Costs O(n T B).

    Args:
        reward, terminated, truncated, valid: [T, B].
        discount: γ, in [0, 1].    n: rewards to sum, at least 1.
    Returns:
        return_ [T, B]; bootstrap [T, B], γ^k, or 0 if terminated; index [T, B] int64 in 0..T, t on rows not valid.
    """
    _check(reward, None, terminated, truncated, valid, discount, 1.0)
    if n < 1:
        raise ValueError(f"n={n} rewards cannot be summed; n must be at least 1")
    T = reward.shape[0]
    flows = _flows(terminated, truncated, valid)
    return_ = torch.zeros_like(reward)
    k = torch.zeros_like(reward, dtype=torch.int64)
    no_bootstrap = ~valid
    reached = valid  # reached[t]: reward t+i belongs to the sum of row t, for t < T-i
    for i in range(min(n, T)):
        return_[: T - i] += discount**i * reward[i:] * reached
        k[: T - i] += reached
        no_bootstrap[: T - i] |= reached & terminated[i:]
        reached = reached[:-1] & flows[i : T - 1]
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
    """V-trace value targets and policy-gradient advantages for data of another policy.

    vs[t] = V[t] + ρ[t] δ[t] + γ c[t] (vs[t+1] - V[t+1]),   ρ = min(rho_clip, π/μ),   c = λ min(c_clip, π/μ)
    advantage[t] = ρ[t] (r[t] + γ (1 - terminated[t]) vs[t+1] - V[t]),   vs[T] = V[T]
    (Espeholt et al. 2018, arXiv 1802.01561, remarks 1 and 2 and section 4.2)

    On-policy, vs is the λ-return.

    Args:
        log_rho: [T, B], log π(a|x) - log μ(a|x); anything on rows not valid.
        reward, terminated, truncated, valid: [T, B].    value: [T+1, B].
        discount, lambda_: γ and λ, in [0, 1].    rho_clip, c_clip: ρ̄ >= c̄ > 0.
    Returns:
        vs [T, B]; advantage [T, B].
    """
    _check(reward, value, terminated, truncated, valid, discount, lambda_)
    _check_shape("log_rho", log_rho, reward.shape)
    if not rho_clip >= c_clip > 0:
        raise ValueError(f"rho_clip={rho_clip} and c_clip={c_clip} must satisfy rho_clip >= c_clip > 0")
    rho = log_rho.masked_fill(~valid, -torch.inf).exp()
    clipped_rho = rho.clamp(max=rho_clip)
    delta = clipped_rho * _td_error(reward, value[:-1], value[1:], terminated, discount)
    trace = rho.clamp(max=c_clip) * _flows(terminated, truncated, valid) * (discount * lambda_)
    correction = _accumulate(delta, trace)  # vs - V; 0 on rows not valid, so that a truncated row's next vs is V
    next_vs = value[1:] + torch.cat([correction[1:], torch.zeros_like(correction[:1])])
    advantage = clipped_rho * _td_error(reward, value[:-1], next_vs, terminated, discount)
    return (correction + value[:-1]).mul_(valid), advantage


def _td_error(reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, discount: float) -> Tensor:
    return reward + (discount * next_value).masked_fill_(terminated, 0.0) - value


def _flows(terminated: Tensor, truncated: Tensor, valid: Tensor) -> Tensor:
    """Whether row t+1 continues row t: [T, B] bool. The batch's last row has nothing after it."""
    flows = terminated.logical_or(truncated).logical_not_().logical_and_(valid)
    flows[:-1] &= valid[1:]
    flows[-1] = False
    return flows


def _accumulate(x: Tensor, decay: Tensor) -> Tensor:
    """y[t] = x[t] + decay[t] y[t+1] with y[T] = 0, in x's own memory.

    [128, 8] on one core of an EPYC: this 19 us; the same doubling in torch ops 69, a loop over time in NumPy 87, in
    torch 260. [2048, 1]: 31, 112, 2300, 5700. On a GPU it is log2(T) rounds of two kernels instead of T.
    """
    if x.device.type == "cpu":
        _double(x.numpy(), decay.numpy())
    else:
        _double(x, decay)
    return x


def _double(x: Any, decay: Any) -> None:
    """Fold each row's next 1, 2, 4 ... rows into it: after a round every x[t] sums twice as many terms."""
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
    discount: float,
    lambda_: float,
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
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name}={number} must lie in [0, 1]")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(tensor.shape)}")
