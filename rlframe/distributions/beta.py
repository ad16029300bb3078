"""Beta distribution over bounded Box actions."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.core.struct import Tree
from rlframe.distributions.base import Distribution
from rlframe.distributions.gaussian import flat, shaped

_TRIES = 6  # of the rejection sampling; each is accepted with a probability of at least 0.95
_EDGE = 1e-6  # actions stay this far from ±1, where the density may be 0
_LEAST = 1e-6  # least alpha - 1 and beta - 1, so that there is a mode


class Beta(Distribution):
    """2 x - 1 of independent x ~ Beta(α, β), in (-1, 1), with one mode (Chou, Maturana & Scherer 2017).

    Params [..., 2d] are those of α = 1 + softplus(.) and β likewise. x is a ratio of two gamma variables, each found by
    rejection among `_TRIES` proposals (Marsaglia & Tsang 2000), which the noise holds. `sample` is not to be
    differentiated.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.size = shape, int(np.prod(shape))
        self.param_size = 2 * self.size

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        """[*lead, 2, _TRIES, 2d] standard normal: a proposal, and what its acceptance depends on; zeros: the mode."""
        return rng.standard_normal((*lead, 2, _TRIES, self.param_size), dtype=np.float32)

    def sample(self, params: Tensor, noise: Tree) -> Tensor:
        shapes = _shapes(params)
        alpha, beta = shapes.chunk(2, -1)
        mode = (alpha - 1) / (alpha + beta - 2)
        one, other = _gamma(shapes, noise).chunk(2, -1)
        x = torch.where((noise == 0).flatten(-3).all(-1, keepdim=True), mode, one / (one + other))
        return shaped((2 * x - 1).clamp(_EDGE - 1, 1 - _EDGE), self.shape)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        shapes = _shapes(params)
        alpha, beta = shapes.chunk(2, -1)
        x = (1 + flat(action, self.shape)) / 2
        powers = (alpha - 1) * x.clamp(_EDGE / 2).log() + (beta - 1) * (1 - x).clamp(_EDGE / 2).log()
        return (powers - _log_beta(shapes) - math.log(2)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        shapes = _shapes(params)
        total = _total(shapes)
        parts = _total((shapes - 1) * torch.digamma(shapes))
        return (_log_beta(shapes) - parts + (total - 2) * torch.digamma(total) + math.log(2)).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        shapes, others = _shapes(params), _shapes(other)
        nearer, total = shapes - others, _total(shapes)
        parts = _total(nearer * torch.digamma(shapes)) - _total(nearer) * torch.digamma(total)
        return (_log_beta(others) - _log_beta(shapes) + parts).sum(-1)


def _shapes(params: Tensor) -> Tensor:
    """α and β [..., 2d]."""
    return 1 + F.softplus(params).clamp(_LEAST)


def _total(pairs: Tensor) -> Tensor:
    """What is for α plus what is for β [..., d]."""
    of_alpha, of_beta = pairs.chunk(2, -1)
    return of_alpha + of_beta


def _log_beta(shapes: Tensor) -> Tensor:
    """log of the beta function [..., d] of α and β."""
    return _total(torch.lgamma(shapes)) - torch.lgamma(_total(shapes))


def _gamma(shape: Tensor, noise: Tensor) -> Tensor:
    """Gamma variables [..., k] of shapes [..., k] >= 1: the first proposal that is accepted, or the first of all."""
    normal, other = noise.unbind(-3)  # [..., _TRIES, k]
    d = shape.unsqueeze(-2) - 1 / 3
    v = (1 + normal / (9 * d).sqrt()).clamp(1e-6) ** 3
    log_uniform = torch.special.log_ndtr(other)
    accepted = log_uniform < 0.5 * normal.square() + d * (1 - v + v.log())
    first = accepted.int().argmax(-2, keepdim=True)
    return (d * v).gather(-2, first).squeeze(-2)
