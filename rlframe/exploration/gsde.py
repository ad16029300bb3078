"""Smooth Exploration for Robotic Reinforcement Learning (gSDE). Raffin, Kober, Stulp, 2022.

https://arxiv.org/abs/2005.05719

The noise ε(s) = φ(s) (σ ⊙ E) is a linear function of φ, the policy's features before its last layer. The matrix E of
standard normals is kept for some steps, so that a state is explored in one way for so long. SAC, PPO and A2C learn σ.
Their losses see the distribution of an action over all E, a normal whose deviation depends on the state, so their
equations stay as they are. SAC's actions in updates are independent draws from it (the authors' code makes those of a
batch with one matrix). TD3 adds the noise to its action, with a fixed σ.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch
from torch import nn

from rlframe.core.config import count, number
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import in_state
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Struct, Tree, as_numpy
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import Evaluated, ExploreConfig, ExploreState, NetworkNoise, last
from rlframe.models.heads import StateDependentHead

_LOG_STD, _SIGMA = -2.0, 0.05  # where none is given


@chz.chz
class GsdeConfig(ExploreConfig):
    """For SAC, TD3 and the policy-gradient algorithms, with one Box of actions."""

    IN_STATE = in_state("log_std", "sigma_last")

    interval: int = count(8, "env steps that a noise matrix is kept, at most an episode; 0: whole episodes", low=0)
    log_std: float = number(math.nan, "initial log of the learned σ; nan: -2, and td3 learns none", low=-20, high=2)
    sigma: Scheduled = scheduled(
        math.nan, "σ of td3: its noise has the standard deviation σ times the norm of the features; nan: 0.05", high=100
    )
    sigma_last: Scheduled = last("σ", high=100)

    @property
    def needs_features(self) -> bool:
        return True

    def make_head(self, last: nn.Linear, stochastic: bool, learn_features: bool) -> nn.Module:
        if stochastic:
            return StateDependentHead(last, _LOG_STD if math.isnan(self.log_std) else self.log_std, learn_features)
        return last

    def make_for(self, model: Any, size: int, seed: int) -> Gsde:
        head, interval = model.head, self.interval or math.inf
        learned = isinstance(head, StateDependentHead)
        if learned and (self.sigma == self.sigma or self.graded):  # not NaN
            given = f"sigma={self.sigma}" if self.sigma == self.sigma else f"sigma_last={self.sigma_last}"
            raise ConfigError(f"algo.explore.{given} is for td3; here σ is learned: set algo.explore.log_std")
        if not learned and not math.isnan(self.log_std):
            raise ConfigError(f"algo.explore.log_std={self.log_std:g}: td3 learns no σ; set algo.explore.sigma")
        return LearnedGsde(head, interval) if learned else FixedGsde((head.in_features, size), interval, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return (self.sigma if self.sigma == self.sigma else _SIGMA), self.sigma_last


@dataclass(frozen=True, eq=False)
class GsdeNoise(Struct):
    """Noise of a row; zeros act greedily, whatever matrix is kept."""

    matrix: Array  # [B, F, size] standard normal, taken where the one before ends
    active: Array  # [B, 1] ones


class Gsde(NetworkNoise, ABC):
    """Base class: keeps a matrix E [features, size] for each environment, with its age in rows."""

    def __init__(self, shape: tuple[int, int], interval: float, graded: bool = False) -> None:
        """`interval`: rows that a matrix is kept; inf: an episode."""
        super().__init__(shape[1], graded)
        self.shape, self.interval = shape, interval

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> GsdeNoise:
        return GsdeNoise(rng.standard_normal((*lead, *self.shape), np.float32), np.ones((*lead, 1), np.float32))

    def own_state(self, n: int) -> Tree:
        return torch.zeros(n, *self.shape), torch.full((n,), math.inf)  # so that the first row draws

    def network(self, model: Any, n: int = 0) -> Any:
        return model.numpy_with_features(n) if n else model.with_features

    def evaluate(
        self, network: Any, inputs: AgentInputs, sampled: Tree, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> Evaluated:
        params, features = network(inputs.observation)
        return params, *self.correlate(params, features, inputs, noise, state, level, xp)

    def correlate(
        self,
        params: Array,
        features: Array,
        inputs: AgentInputs,
        noise: GsdeNoise,
        state: ExploreState,
        level: Array,
        xp: Any,
    ) -> tuple[Array, ExploreState]:
        """The noise [B, size] that the policy samples with for these parameters and features, and the next state."""
        matrix, age = state.own
        fresh = inputs.first | (age >= self.interval)
        matrix = xp.where(fresh[:, None, None], noise.matrix, matrix)
        age = xp.where(fresh, xp.ones_like(age), age + 1)
        sigma = self.sigma(level, state, xp)
        added = noise.active * (features[:, None, :] @ (sigma * matrix))[:, 0]
        return self.of_policy(added, params, xp), ExploreState(state.env, (matrix, age))

    @abstractmethod
    def sigma(self, level: Array, state: ExploreState, xp: Any) -> Array:
        """σ, which fits E [B, features, size]."""

    @abstractmethod
    def of_policy(self, added: Array, params: Array, xp: Any) -> Array:
        """The noise [B, size] that the policy is to sample with, so that it adds `added`."""


class LearnedGsde(Gsde):
    """σ is that of the network's head. The policy multiplies its noise by the deviation, which this divides by."""

    def __init__(self, head: StateDependentHead, interval: float) -> None:
        super().__init__((head.mean.in_features, head.mean.out_features), interval)
        self._head = (head,)  # in a tuple: its parameter belongs to the network

    def sigma(self, level: Array, state: ExploreState, xp: Any) -> Array:
        log_std = self._head[0].log_std.detach()
        return xp.exp(as_numpy(log_std) if xp is np else log_std)

    def of_policy(self, added: Array, params: Array, xp: Any) -> Array:
        return added * xp.exp(-params[:, self.size :])


class FixedGsde(Gsde):
    """σ is the level."""

    scale = "sigma"

    def sigma(self, level: Array, state: ExploreState, xp: Any) -> Array:
        sigma = self.level_of(level, state, xp)
        return sigma[:, None, None] if self.graded else sigma

    def of_policy(self, added: Array, params: Array, xp: Any) -> Array:
        return added
