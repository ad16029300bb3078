"""Joint distributions over Dict and Tuple actions; `make_distribution` chooses one for an action space."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.core.struct import Tree
from rlframe.distributions.base import Distribution
from rlframe.distributions.categorical import Bernoulli, Categorical, MultiCategorical
from rlframe.distributions.gaussian import DiagonalGaussian, TanhGaussian


class Joint(Distribution):
    """Independent parts with the keys of a Dict or Tuple action space; params are concatenated."""

    def __init__(self, parts: dict[str, Distribution] | tuple[Distribution, ...]) -> None:
        self.keys: tuple[str, ...] = tuple(parts) if isinstance(parts, dict) else ()
        self.parts: tuple[Distribution, ...] = tuple(parts.values()) if isinstance(parts, dict) else parts
        self.sizes = [part.param_size for part in self.parts]
        self.param_size = sum(self.sizes)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return tuple(part.noise(rng, lead) for part in self.parts)

    def sample(self, params: Tensor, noise: Tree) -> Tree:
        actions = [part.sample(p, n) for part, p, n in self._split(params, noise)]
        return dict(zip(self.keys, actions, strict=True)) if self.keys else tuple(actions)

    def log_prob(self, params: Tensor, action: Tree) -> Tensor:
        ordered = tuple(action[key] for key in self.keys) if self.keys else action
        return _total([part.log_prob(p, a) for part, p, a in self._split(params, ordered)])

    def entropy(self, params: Tensor) -> Tensor:
        return _total([part.entropy(p) for part, p in zip(self.parts, params.split(self.sizes, -1), strict=True)])

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        return _total([part.kl(p, q) for part, p, q in self._split(params, other.split(self.sizes, -1))])

    def _split(self, params: Tensor, others: Tree) -> list[tuple[Distribution, Tensor, Tree]]:
        return list(zip(self.parts, params.split(self.sizes, -1), others, strict=True))


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms, -1).sum(-1)


def make_distribution(space: Space, squash: bool = False) -> Distribution:
    """The distribution for an action space; for Box a Gaussian, or a tanh-Gaussian if `squash`.

    Raises:
        ValueError: the space is not supported, or `squash` with an unbounded Box.
    """
    match space:
        case spaces.Dict():
            return Joint({key: make_distribution(sub, squash) for key, sub in space.spaces.items()})
        case spaces.Tuple():
            return Joint(tuple(make_distribution(sub, squash) for sub in space.spaces))
        case spaces.Discrete():
            return Categorical(int(space.n))
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return MultiCategorical(tuple(int(n) for n in space.nvec))
        case spaces.MultiBinary():
            return Bernoulli(tuple(space.shape))
        case spaces.Box() if not squash:
            return DiagonalGaussian(tuple(space.shape))
        case spaces.Box() if space.is_bounded():
            return TanhGaussian(tuple(space.shape))
        case spaces.Box():
            raise ValueError(f"squash=true needs finite action bounds, got {space}; use squash=false")
    raise ValueError(
        f"action space {space} is not supported; use Discrete, MultiDiscrete, MultiBinary, Box, Dict, Tuple"
    )
