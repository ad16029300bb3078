"""What an action distribution is: pure functions of one parameter tensor and of noise drawn beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from rlframe.core.struct import Tree, as_numpy, map_tree


class Distribution(ABC):
    """A family of distributions over one canonical action space. Stateless; picks no random numbers itself.

    Sampling is a deterministic function of parameters and noise, and *zero noise gives the mode*: acting greedily is
    acting without noise, so there is no mode flag. Noise is drawn a whole batch at a time from each environment's own
    NumPy generator, so what one environment draws depends on neither the batch nor the process it lives in.
    """

    param_size: int

    @abstractmethod
    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        """Float32 noise [*lead, ...] for `sample`."""

    @abstractmethod
    def sample(self, params: Tensor, noise: Tree) -> Tree:
        """Actions [..., *act] from params [..., param_size]; differentiable where the family is reparameterised."""

    @abstractmethod
    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        """Log-probability (density for continuous actions) of `action`, summed over its dimensions: [...]."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats [...]; an estimate where no closed form exists, as its class says."""

    def log_prob_entropy(self, params: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
        """Both, where one costs less beside the other."""
        return self.log_prob(params, action), self.entropy(params)

    @abstractmethod
    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        """KL(params || other) in nats [...]."""

    def act(self, params: Tensor, noise: Tree) -> tuple[Tree, Tensor]:
        """A sample, and its log-probability as `log_prob` will find it again from the action."""
        action = self.sample(params, noise)
        return action, self.log_prob(params, action)

    def act_numpy(self, params: np.ndarray, noise: Tree) -> tuple[Tree, np.ndarray]:
        """`act` for rows [B, ...] of NumPy arrays; through torch, unless the family knows a faster way."""
        with torch.inference_mode():
            action, log_prob = self.act(torch.from_numpy(params), map_tree(torch.from_numpy, noise))
        return map_tree(as_numpy, action), log_prob.numpy()

    def sample_log_prob(self, params: Tensor, noise: Tree) -> tuple[Tree, Tensor]:
        """A sample and its log-probability together."""
        action = self.sample(params, noise)
        return action, self.log_prob(params, action)
