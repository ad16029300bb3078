"""Distributions over Box actions: diagonal Gaussian, unbounded or squashed by tanh."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.core.struct import Tree
from rlframe.distributions.base import Distribution

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_MAX_ACTION = 1 - 1e-6  # larger |action| have no float32 pre-image under tanh


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The tanh-squashed normal: μ, log σ and noise ε [n, d] to actions a [n, d] and log π(a) [n].

    `noise` is standard normal and constant.
    u = μ + σ ε, a = tanh u, log π(a) = Σ -ε²/2 - log σ - log √(2π) - log(1 - a²), where log(1 - tanh² u) is computed as
    2 (log 2 - u - softplus(-2u)), which does not cancel at large u (Haarnoja et al. 2018, appendix C).
    """
    raw = torch.addcmul(mean, log_std.exp(), noise)
    folded = F.softplus(-2 * raw) + raw  # log 2 - log(1 - a²) / 2
    density = (torch.addcmul(log_std, noise, noise, value=0.5) - 2 * folded).sum(-1)
    return raw.tanh(), -noise.shape[-1] * (_HALF_LOG_TWO_PI + 2 * math.log(2)) - density


def normal_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL(p || q) [...] of independent normals [..., d]: Σ log(σ_q / σ_p) + (σ_p² + (μ_p - μ_q)²) / (2 σ_q²) - 1/2."""
    wider, moved = 2 * (log_std - other_log_std), (mean - other_mean) * (-other_log_std).exp()
    return 0.5 * (wider.exp() + moved.square() - 1 - wider).sum(-1)


class DiagonalGaussian(Distribution):
    """Independent normals; params are mean and log standard deviation [..., 2d], actions [..., *shape] unclipped.

    Environments clip the action they execute; the log-probability is that of the unclipped sample.
    """

    has_log_std = True

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.size = shape, int(np.prod(shape))
        self.param_size = 2 * self.size

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return rng.standard_normal((*lead, self.size), dtype=np.float32)

    def sample(self, params: Tensor, noise: Tree) -> Tensor:
        mean, log_std = params.chunk(2, -1)
        return shaped(mean + log_std.exp() * noise, self.shape)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        mean, log_std = params.chunk(2, -1)
        scaled = (flat(action, self.shape) - mean) * (-log_std).exp()
        return (-0.5 * scaled**2 - log_std - _HALF_LOG_TWO_PI).sum(-1)

    def act(self, params: Tensor, noise: Tree) -> tuple[Tensor, Tensor]:
        """Computes the log-probability from the noise, which is faster."""
        mean, log_std = params.chunk(2, -1)
        action = shaped(torch.addcmul(mean, log_std.exp(), noise), self.shape)
        return action, (-0.5 * noise.square() - log_std).sum(-1) - self.size * _HALF_LOG_TWO_PI

    def act_numpy(self, params: np.ndarray, noise: Tree) -> tuple[np.ndarray, np.ndarray]:
        mean, log_std = params[:, : self.size], params[:, self.size :]
        action = mean + np.exp(log_std) * noise
        log_prob = (-0.5 * np.square(noise) - log_std).sum(-1) - np.float32(self.size * _HALF_LOG_TWO_PI)
        return action.reshape(-1, *self.shape), log_prob

    def entropy(self, params: Tensor) -> Tensor:
        return (params.chunk(2, -1)[1] + 0.5 + _HALF_LOG_TWO_PI).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        return normal_kl(*params.chunk(2, -1), *other.chunk(2, -1))


class TanhGaussian(Distribution):
    """tanh of a diagonal Gaussian, in (-1, 1), for bounded Box actions (Haarnoja et al. 2018, appendix C)."""

    has_log_std = True

    def __init__(
        self, shape: tuple[int, ...], log_std: tuple[float, float] = (-math.inf, math.inf), by_tanh: bool = False
    ) -> None:
        """Args:
        log_std: range of the log standard deviation.
        by_tanh: tanh brings what the network says into it, with a gradient everywhere; else it is clipped.
        """
        self.shape, self.log_std, self.by_tanh = shape, log_std, by_tanh
        self.gaussian = DiagonalGaussian((int(np.prod(shape)),))  # before squashing, flat
        self.size, self.param_size = self.gaussian.size, self.gaussian.param_size

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return self.gaussian.noise(rng, lead)

    def sample(self, params: Tensor, noise: Tree) -> Tensor:
        return shaped(self.sample_flat(params, noise, torch), self.shape)

    def sample_flat(self, params: Any, noise: Any, xp: Any) -> Any:
        """Actions [..., d] of arrays of `xp`, torch or numpy."""
        mean, log_std = self._split(params)
        return xp.tanh(mean + xp.exp(log_std) * noise)

    def sample_with_log_prob(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [n, *act] and their log-probabilities [n], of a batch [n, P].

        Computed from the noise [n, d], standard normal, and so exact also where tanh saturates.
        """
        action, log_prob = squashed_sample(*self._split(params), noise)
        return action.view(-1, *self.shape), log_prob

    def mode(self, params: Tensor) -> Tensor:
        """Actions [..., *act] of zero noise."""
        return shaped(params[..., : self.size].tanh(), self.shape)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        return self.log_prob_flat(params, flat(action, self.shape), torch)

    def log_prob_flat(self, params: Any, action: Any, xp: Any) -> Any:
        """The same of actions [..., d] of arrays of `xp`, torch or numpy."""
        mean, log_std = self._split(params)
        raw = xp.arctanh(action.clip(-_MAX_ACTION, _MAX_ACTION))
        scaled = (raw - mean) * xp.exp(-log_std)
        return (-0.5 * scaled * scaled - log_std - _HALF_LOG_TWO_PI - _log_slope(raw, xp)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """That of the Gaussian plus the mean of log(1 - tanh² u), by the trapezoidal rule over u."""
        mean, log_std = self._split(params)
        noise = torch.linspace(-5, 5, 21, dtype=mean.dtype, device=mean.device)
        slope = _log_slope(mean[..., None] + log_std.exp()[..., None] * noise, torch) @ (-0.5 * noise**2).softmax(-1)
        return (log_std + 0.5 + _HALF_LOG_TWO_PI + slope).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        """That of the Gaussians, as tanh maps both alike."""
        return normal_kl(*self._split(params), *self._split(other))

    def _split(self, params: Any) -> tuple[Any, Any]:
        """Mean and log standard deviation [..., d]."""
        mean, log_std, (low, high) = params[..., : self.size], params[..., self.size :], self.log_std
        if not self.by_tanh:
            return mean, log_std.clip(low, high)
        tanh = np.tanh if isinstance(log_std, np.ndarray) else torch.tanh
        return mean, low + (0.5 * (high - low)) * (1 + tanh(log_std))


def shaped(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Actions [..., *shape] of numbers [..., d]."""
    return flat if len(shape) == 1 else flat.unflatten(-1, shape) if shape else flat.squeeze(-1)


def flat(action: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `shaped`."""
    return action if len(shape) == 1 else action.flatten(-len(shape)) if shape else action.unsqueeze(-1)


def _log_slope(raw: Any, xp: Any) -> Any:
    """log(1 - tanh(x)²) = 2 (log 2 - |x| - log(1 + exp(-2|x|))), without cancellation at large x."""
    size = abs(raw)
    return 2 * (math.log(2) - size - xp.log1p(xp.exp(-2 * size)))
