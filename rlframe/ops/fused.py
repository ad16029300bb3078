"""Parts of losses whose gradient is written out because that pays: each beside the plain function it must equal.

`fused(plain, closed_form)` is the plain function as one autograd node. A loss stays ordinary torch and calls these like
any other function; inside `plain_networks()` they are the plain functions. tests/ops/test_fused.py compares every pair.
For a few hundred rows on a CPU, NumPy's calls cost a third of torch's, so some closed forms are in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.kernels.matmul import on_cpu
from rlframe.kernels.mlp import as_node, is_plain

Tensors = tuple[Tensor, ...]
Backward = Callable[..., tuple[Any, ...]]  # dL/d results to dL/d arguments, the last ones left out if constants
_LOG_SQRT_TWO_PI = 0.5 * math.log(2 * math.pi)


def fused(
    plain: Callable[..., Tensors],
    closed_form: Callable[..., tuple[Tensors, Backward]],
    on_cpu_only: bool = False,
    n_constant: int = 0,
) -> Callable[..., Any]:
    """`plain`, from arguments to a tuple of tensors, as one autograd node.

    Args:
        closed_form: the same results, and their backward, of the same arguments; dL/d a result is None where the loss
            does not depend on it.    on_cpu_only: it is in NumPy.
        n_constant: how many of the results, the last ones, have no gradient.
    """

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensors:
            results, ctx.closed_form_backward = closed_form(*arguments)
            ctx.n = len(arguments)
            ctx.set_materialize_grads(False)
            if n_constant:
                ctx.mark_non_differentiable(*results[-n_constant:])
            return results

        @staticmethod
        def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Any, ...]:
            if torch.is_grad_enabled():
                raise RuntimeError("a fused gradient cannot be differentiated again; use `with plain_networks():`")
            found = ctx.closed_form_backward(*of_results)
            return *found, *(None,) * (ctx.n - len(found))

    node = as_node(Node)

    @wraps(plain)
    def call(*arguments: Any) -> Any:
        if is_plain() or not torch.is_grad_enabled() or (on_cpu_only and not on_cpu(arguments[0])):
            return plain(*arguments)
        return node(*arguments)

    call.plain = plain  # type: ignore[attr-defined]
    return call


def _log_prob_entropy(logits: Tensor, action: Tensor) -> Tensors:
    log_p = F.log_softmax(logits, -1)
    taken = log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return taken, -(log_p.exp() * log_p).sum(-1)


def _log_prob_entropy_closed(logits: Tensor, action: Tensor) -> tuple[Tensors, Backward]:
    """d log p_a = 1_a - p,  dH = -p (log p + H)."""
    log_p = torch.log_softmax(logits.detach(), -1).numpy().reshape(-1, logits.shape[-1])
    p = np.exp(log_p)
    entropy = -np.einsum("na,na->n", p, log_p)
    taken = action.numpy().reshape(-1) + np.arange(0, log_p.size, log_p.shape[1])  # places in flat arrays

    def backward(of_log_prob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor]:
        found = np.zeros_like(p)
        if of_entropy is not None:
            found -= (log_p + entropy[:, None]) * of_entropy.numpy().reshape(-1, 1)
        if of_log_prob is not None:
            of_taken = of_log_prob.numpy().reshape(-1)
            found -= of_taken[:, None]
        found *= p
        if of_log_prob is not None:
            found.reshape(-1)[taken] += of_taken
        return (torch.from_numpy(found).view_as(logits),)

    return tuple(torch.from_numpy(x).view_as(action) for x in (log_p.reshape(-1)[taken], entropy)), backward


log_prob_entropy = fused(_log_prob_entropy, _log_prob_entropy_closed, on_cpu_only=True)
"""(logits [..., A], action [...] int64) to log p(action) and entropy in nats, [...] each, of a categorical."""


def squashed_sample(params: Tensor, noise: Tensor, low: float, high: float) -> Tensors:
    """The tanh-squashed normal: (params [n, 2d], noise [n, d], low, high) to actions a [n, d] and log π(a) [n].

    `params` are μ and log σ side by side, log σ clamped to [low, high]; `noise` is standard normal and constant.
    u = μ + σ ε, a = tanh u, log π(a) = Σ -ε²/2 - log σ - log √(2π) - log(1 - a²), where log(1 - tanh² u) is computed as
    2 (log 2 - u - softplus(-2u)), which does not cancel at large u (Haarnoja et al. 2018, appendix C).
    """
    mean, log_std = params.chunk(2, -1)
    log_std = log_std.clamp(low, high)
    raw = torch.addcmul(mean, log_std.exp(), noise)
    folded = F.softplus(-2 * raw) + raw  # log 2 - log(1 - a²) / 2
    density = (torch.addcmul(log_std, noise, noise, value=0.5) - 2 * folded).sum(-1)
    return raw.tanh(), -noise.shape[-1] * (_LOG_SQRT_TWO_PI + 2 * math.log(2)) - density


def _squashed_samples(params: Tensor, next_params: Tensor, noise: Tensor, low: float, high: float) -> Tensors:
    n = len(params)
    action, log_prob = squashed_sample(torch.cat([params, next_params.detach()]), noise, low, high)
    return action[:n], log_prob[:n], action[n:].detach(), log_prob[n:].detach()


def _squashed_closed(
    params: Tensor, next_params: Tensor, noise: Tensor, low: float, high: float
) -> tuple[Tensors, Backward]:
    """dL/du = (1 - a²) dL/da + 2a dL/d log π;   dL/dμ = dL/du;   dL/d log σ = σ ε dL/du - dL/d log π, 0 if clamped."""
    results = _squashed_samples(params.detach(), next_params, noise, low, high)
    action = results[0].detach()  # another object: no reference cycle

    def backward(of_action: Tensor | None, of_log_prob: Tensor | None, *_: None) -> tuple[Tensor]:
        of_action = torch.zeros_like(action) if of_action is None else of_action
        of_log_prob = (action.new_zeros(len(action)) if of_log_prob is None else of_log_prob).unsqueeze(-1)
        of_raw = torch.ops.aten.tanh_backward(of_action, action).addcmul_(action, of_log_prob, value=2)
        given = params.detach()[:, noise.shape[-1] :]
        log_std = given.clamp(low, high)
        of_log_std = (of_raw * log_std.exp() * noise[: len(action)] - of_log_prob) * (given == log_std)
        return (torch.cat([of_raw, of_log_std], -1),)

    return results, backward


squashed_samples = fused(_squashed_samples, _squashed_closed, n_constant=2)
"""`squashed_sample` of a batch [n, 2d], and of its next rows without gradient, at once.

(params, next_params, noise [2 n, d], low, high) to actions, log π, and those of the next rows as constants.
"""


def _squared_error(q: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (0.5 * (weight * (q - target).square()).mean(-1).sum(),)


def _squared_error_closed(q: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensors, Backward]:
    error = q.detach().numpy() - target.numpy()
    share = np.float32(1 / error.shape[-1])
    weighted = error * weight.numpy()

    def backward(of_loss: Tensor) -> tuple[Tensor]:
        return (torch.from_numpy(weighted * (share * np.float32(of_loss.item()))),)

    return (torch.from_numpy(np.asarray(0.5 * share * np.vdot(weighted, error))),), backward


squared_error = fused(_squared_error, _squared_error_closed, on_cpu_only=True)
"""(Q [k, n] of k critics, target y [n], weight w [n], both constant) to the loss [], Σ_i ½ mean w (Q_i - y)²."""


def _soft_objective(q: Tensor, log_prob: Tensor, temperature: Tensor) -> Tensors:
    return (temperature * log_prob - q.min(0).values).mean(), log_prob.detach().mean()


def _soft_objective_closed(q: Tensor, log_prob: Tensor, temperature: Tensor) -> tuple[Tensors, Backward]:
    values, alpha, n = q.detach().numpy(), np.float32(temperature.item()), log_prob.numel()
    least, mean = values.argmin(0), np.add.reduce(log_prob.detach().numpy()) / np.float32(n)
    loss = alpha * mean - np.add.reduce(np.minimum.reduce(values)) / np.float32(n)

    def backward(of_loss: Tensor, _: None) -> tuple[Tensor, Tensor]:
        share = np.float32(of_loss.item() / n)
        of_q = np.zeros(values.shape, np.float32)
        of_q[least, np.arange(n)] = -share
        return torch.from_numpy(of_q), torch.from_numpy(np.full(n, alpha * share, np.float32))

    return (torch.from_numpy(np.asarray(loss)), torch.from_numpy(np.asarray(mean))), backward


soft_objective = fused(_soft_objective, _soft_objective_closed, on_cpu_only=True, n_constant=1)
"""(Q [k, n], log π [n], α [] constant) to mean (α log π - min_i Q_i) [], and mean log π as a constant.

(Haarnoja et al. 2018, arXiv 1812.05905, eq. 9)
"""


def _quantile_huber(theta: Tensor, target: Tensor, delta: float = 1.0) -> tuple[Tensor]:
    u, weight = _quantile_errors(theta, target)
    return ((weight * F.huber_loss(u, torch.zeros_like(u), reduction="none", delta=delta)).mean(-1).sum(-1),)


def _quantile_errors(theta: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """u [n, N, N'] and |τ - 1{u < 0}|."""
    n = theta.shape[-1]
    tau = (torch.arange(n, dtype=theta.dtype, device=theta.device) + 0.5) / n
    u = target.unsqueeze(-2) - theta.unsqueeze(-1)
    return u, (tau.unsqueeze(-1) - (u.detach() < 0).to(u.dtype)).abs()


def _quantile_huber_closed(theta: Tensor, target: Tensor, delta: float = 1.0) -> tuple[Tensors, Backward]:
    u, weight = _quantile_errors(theta, target)
    clipped = u.clamp(-delta, delta)
    loss = (weight * clipped * (u - clipped / 2)).mean(-1).sum(-1)
    return (loss,), lambda of_loss: (-of_loss.unsqueeze(-1) * (weight * clipped).mean(-1),)


quantile_huber = fused(_quantile_huber, _quantile_huber_closed)
"""(theta [n, N], target [n, N'] constant, κ) to the loss ([n],): Σ_i mean_j ρ_τi(target_j - theta_i).

ρ_τ(u) = |τ - 1{u < 0}| L_κ(u),  τ_i = (2i + 1) / 2N   (Dabney et al. 2018, arXiv 1710.10044, eq. 10)
"""


def _td_huber(values: Tensor, action: Tensor, target: Tensor, delta: float = 1.0) -> Tensors:
    q = values.flatten(1).gather(1, action.unsqueeze(1)).squeeze(1)
    return F.huber_loss(q, target, reduction="none", delta=delta), (target - q.detach()).abs(), q.detach()


def _td_huber_closed(values: Tensor, action: Tensor, target: Tensor, delta: float = 1.0) -> tuple[Tensors, Backward]:
    every = values.detach().numpy().reshape(-1)
    taken = np.arange(0, every.size, values.shape[1]) + action.numpy()  # places in the flat array
    q = every[taken]
    error = q - target.numpy()
    bound = np.float32(delta)
    clipped = np.minimum(np.maximum(error, -bound), bound)

    def backward(of_loss: Tensor, *_: Tensor) -> tuple[Tensor]:
        found = np.zeros(every.shape, np.float32)
        found[taken] = clipped * of_loss.numpy()
        return (torch.from_numpy(found).view_as(values),)

    results = clipped * (error - 0.5 * clipped), np.abs(error), q
    return tuple(map(torch.from_numpy, results)), backward


td_huber = fused(_td_huber, _td_huber_closed, on_cpu_only=True, n_constant=2)
"""(Q [n, A] or [n, A, 1], action [n] int64, target [n] constant, κ) to the Huber loss of δ, |δ| and Q(s, a), [n] each.

δ = target - Q(s, a); the loss's gradient is the error clipped to ±κ (Mnih et al. 2015, methods, with κ = 1).
"""
