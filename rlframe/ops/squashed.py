"""The tanh-squashed normal with its gradients written out: what SAC does for each row of each update.

u = μ + σ ε, a = tanh u, log π(a) = Σ -ε²/2 - log σ - log √(2π) - log(1 - a²), where log(1 - tanh² u) is computed as
2 (log 2 - u - softplus(-2u)), which does not cancel at large u (Haarnoja et al. 2018, appendix C).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG_SQRT_TWO_PI = 0.5 * math.log(2 * math.pi)


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions a [n, d] and log π(a) [n] of standard normal noise ε [n, d]."""
    raw = torch.addcmul(mean, log_std.exp(), noise)
    folded = F.softplus(-2 * raw).add_(raw)  # log 2 - log(1 - a²) / 2
    density = torch.addcmul(log_std, noise, noise, value=0.5).sub_(folded, alpha=2).sum(-1)
    return raw.tanh_(), -noise.shape[-1] * (_LOG_SQRT_TWO_PI + 2 * math.log(2)) - density


def squashed_gradient(
    action: Tensor, log_std: Tensor, noise: Tensor, of_action: Tensor, of_log_prob: Tensor
) -> tuple[Tensor, Tensor]:
    """dL/dμ and dL/d log σ [n, d], by the noise, from dL/da [n, d] and dL/d log π (of n, or one for all).

    dL/du = (1 - a²) dL/da + 2a dL/d log π;   dL/dμ = dL/du;   dL/d log σ = σ ε dL/du - dL/d log π.
    """
    of_raw = torch.ops.aten.tanh_backward(of_action, action).addcmul_(action, of_log_prob, value=2)
    return of_raw, of_raw * log_std.exp() * noise - of_log_prob
