"""Distributions over discrete actions: Categorical, MultiCategorical (several independent ones) and Bernoulli."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.core.struct import Tree
from rlframe.distributions.base import Distribution, Joint


def gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard Gumbel noise, float32: -log of an exponential (Maddison et al. 2017, the Gumbel-max trick)."""
    exponential = rng.standard_exponential(shape, dtype=np.float32)
    return -np.log(np.maximum(exponential, np.finfo(np.float32).tiny))


class Categorical(Distribution):
    """Over {0, ..., n-1}; params are logits [..., n]."""

    def __init__(self, n: int) -> None:
        self.param_size = self.n_choices = n

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return gumbel(rng, (*lead, self.param_size))

    def sample(self, params: Tensor, noise: Tree) -> Tensor:
        return (params + noise).argmax(-1)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        return F.log_softmax(params, -1).gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def act_numpy(self, params: np.ndarray, noise: Tree) -> tuple[np.ndarray, np.ndarray]:
        action = (params + noise).argmax(-1)
        shifted = params - params.max(-1, keepdims=True)
        log_prob = shifted[np.arange(len(action)), action] - np.log(np.exp(shifted).sum(-1))
        return action, log_prob

    def entropy(self, params: Tensor) -> Tensor:
        log_p = F.log_softmax(params, -1)
        return -(log_p.exp() * log_p).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        log_p, log_q = F.log_softmax(params, -1), F.log_softmax(other, -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def log_prob_entropy(self, params: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(params, -1)
        taken = log_p.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        return taken, -(log_p.exp() * log_p).sum(-1)


class MultiCategorical(Distribution):
    """Over the product of {0, ..., n_i - 1}; params are concatenated logits [..., sum(n)], actions [..., len(n)]."""

    def __init__(self, n: tuple[int, ...]) -> None:
        self.n, self.param_size = n, sum(n)
        self.joint = Joint(tuple(Categorical(k) for k in n))

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return gumbel(rng, (*lead, self.param_size))

    def sample(self, params: Tensor, noise: Tree) -> Tensor:
        return torch.stack([part.argmax(-1) for part in (params + noise).split(self.n, -1)], -1)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        return self.joint.log_prob(params, action.unbind(-1))

    def entropy(self, params: Tensor) -> Tensor:
        return self.joint.entropy(params)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        return self.joint.kl(params, other)


class Bernoulli(Distribution):
    """Independent bits [..., *shape]; params are their flattened logits [..., prod(shape)]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.param_size = shape, int(np.prod(shape))

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return rng.logistic(size=(*lead, self.param_size)).astype(np.float32)

    def sample(self, params: Tensor, noise: Tree) -> Tensor:
        return (params + noise > 0).to(torch.int8).unflatten(-1, self.shape)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        bits = action.flatten(-len(self.shape)).to(params.dtype)
        return -F.binary_cross_entropy_with_logits(params, bits, reduction="none").sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(params, params.sigmoid(), reduction="none").sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        return (params.sigmoid() * (params - other) - F.softplus(params) + F.softplus(other)).sum(-1)
