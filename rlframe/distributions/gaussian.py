"""Distributions over Box actions: diagonal Gaussian, unbounded or squashed by tanh."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.core.struct import Tree
from rlframe.distributions.base import Distribution

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_MAX_ACTION = 1 - 1e-6  # larger |action| have no float32 pre-image under tanh


class DiagonalGaussian(Distribution):
    """Independent normals; params are mean and log standard deviation [..., 2d], actions [..., *shape] unclipped.

    Environments clip the action they execute; the log-probability is that of the unclipped sample.
    """

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
        """Computes the log-probability from the noise: 12 us instead of 31 for 8 rows."""
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


class TanhGaussian(Distribution):
    """tanh of a diagonal Gaussian, in (-1, 1), for bounded Box actions (Haarnoja et al. 2018, appendix C)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.gaussian = DiagonalGaussian((int(np.prod(shape)),))  # before squashing, flat
        self.param_size = self.gaussian.param_size

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return self.gaussian.noise(rng, lead)

    def sample(self, params: Tensor, noise: Tree) -> Tensor:
        return shaped(self.gaussian.sample(params, noise).tanh(), self.shape)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        raw = torch.atanh(flat(action, self.shape).clamp(-_MAX_ACTION, _MAX_ACTION))
        return self.gaussian.log_prob(params, raw) - _log_det_tanh(raw)

    def entropy(self, params: Tensor) -> Tensor:
        # an estimate, with the log-determinant at the mean
        return self.gaussian.entropy(params) + _log_det_tanh(params.chunk(2, -1)[0])


def shaped(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Actions [..., *shape] of numbers [..., d]."""
    return flat if len(shape) == 1 else flat.unflatten(-1, shape) if shape else flat.squeeze(-1)


def flat(action: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `shaped`."""
    return action if len(shape) == 1 else action.flatten(-len(shape)) if shape else action.unsqueeze(-1)


def _log_det_tanh(raw: Tensor) -> Tensor:
    """Sum of log(d tanh(x)/dx) = log(1 - tanh(x)²) = 2 (log 2 - x - softplus(-2x)), without cancellation at large x."""
    return (2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)
