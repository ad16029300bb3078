"""The interface of action distributions, and the joint distribution over Dict and Tuple actions."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree, as_numpy, map_tree


class Distribution(ABC):
    """A family of distributions over one action space: pure functions of parameters and noise, without state.

    A sample is a deterministic function of both, and zero noise gives the mode: a greedy agent acts with zero noise.
    Each environment's noise comes from its own NumPy generator, for a whole batch at once, so its actions do not depend
    on the other environments or on the process it runs in.
    """

    param_size: int
    n_choices = 0  # of actions 0 to n - 1 whose logits are the params; 0: other actions
    has_log_std = False  # params are the mean and the log standard deviation of a normal
    joined: tuple[Distribution, ...] = ()  # independent ones that it consists of, each with params of its own

    @abstractmethod
    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        """Noise [*lead, ...] float32 for `sample`."""

    @abstractmethod
    def sample(self, params: Tensor, noise: Tree) -> Tree:
        """Actions [..., *act] from params [..., param_size]; differentiable if the family is reparameterised."""

    @abstractmethod
    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        """Log-probability (or log-density) [...] of `action`, summed over its dimensions."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats [...]; an estimate if the class says so."""

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        """KL(p || q) in nats [...], p with `params` and q with `other` [..., param_size].

        Raises:
            ConfigError: the family does not say.
        """
        raise ConfigError(f"{type(self).__name__} has no kl(params, other), the divergence of two; write it")

    def log_prob_entropy(self, params: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [...], for families that compute both faster together."""
        return self.log_prob(params, action), self.entropy(params)

    def act(self, params: Tensor, noise: Tree) -> tuple[Tree, Tensor]:
        """A sample and its log-probability, equal to what `log_prob` computes from the action."""
        action = self.sample(params, noise)
        return action, self.log_prob(params, action)

    def act_numpy(self, params: np.ndarray, noise: Tree) -> tuple[Tree, np.ndarray]:
        """`act` for NumPy arrays [B, ...]; some families override it with a faster version."""
        with torch.inference_mode():
            action, log_prob = self.act(torch.from_numpy(params), map_tree(torch.from_numpy, noise))
        return map_tree(as_numpy, action), log_prob.numpy()


class Joint(Distribution):
    """Independent parts with the keys of a Dict or Tuple action space; params are concatenated."""

    def __init__(self, parts: dict[str, Distribution] | tuple[Distribution, ...]) -> None:
        self.keys: tuple[str, ...] = tuple(parts) if isinstance(parts, dict) else ()
        self.parts = self.joined = tuple(parts.values()) if isinstance(parts, dict) else parts
        self.sizes = [part.param_size for part in self.parts]
        self.param_size = sum(self.sizes)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return tuple(part.noise(rng, lead) for part in self.parts)

    def sample(self, params: Tensor, noise: Tree) -> Tree:
        actions = [part.sample(p, n) for part, p, n in self._split(params, noise)]
        return dict(zip(self.keys, actions, strict=True)) if self.keys else tuple(actions)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        ordered = tuple(action[key] for key in self.keys) if self.keys else action
        return torch.stack([part.log_prob(p, a) for part, p, a in self._split(params, ordered)], -1).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        split = params.split(self.sizes, -1)
        return torch.stack([part.entropy(p) for part, p in zip(self.parts, split, strict=True)], -1).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        split = params.split(self.sizes, -1), other.split(self.sizes, -1)
        return torch.stack([part.kl(p, q) for part, p, q in zip(self.parts, *split, strict=True)], -1).sum(-1)

    def _split(self, params: Tensor, others: Tree) -> list[tuple[Distribution, Tensor, Tree]]:
        return list(zip(self.parts, params.split(self.sizes, -1), others, strict=True))
