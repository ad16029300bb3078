"""Exploration by noise on actions of numbers, none, and the kinds that Q-values and actions share; your own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch
from torch import Tensor

from rlframe.core.config import count, fraction, number, option, positive
from rlframe.core.errors import ConfigError, naming, shortened
from rlframe.core.field_effects import in_state
from rlframe.core.names import find_class
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Struct, Tree
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import HIGHEST, ActionNoise, ExploreConfig, ExploreState, QExploration, last
from rlframe.exploration.q import Durations, Greedy, HeldAction, HoldState


@chz.chz
class StochasticConfig(ExploreConfig):
    """The policy's own sampling, without more: of PPO, A2C, PG, IMPALA, APPO and SAC.

    The policy's distribution decides everything.
    """

    def make_noise(self, size: int) -> Stochastic:
        return Stochastic(size)


class Stochastic(ActionNoise):
    """Nothing is added to the sampled actions."""

    changes = False

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return ()

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        return action, state


@chz.chz
class GaussianConfig(ExploreConfig):
    """Gaussian noise, uncorrelated in time (Fujimoto et al. 2018), on actions in [-1, 1].

    For DDPG, TD3 and SAC with Box actions.
    """

    IN_STATE = in_state("std_last")

    std: Scheduled = scheduled(
        float("nan"), "standard deviation on actions in [-1, 1]; nan: the algorithm's", high=HIGHEST
    )
    std_last: Scheduled = last("standard deviation", high=HIGHEST)
    clip: float = positive(math.inf, "largest magnitude of the noise, before it is added; inf: any")

    def make_noise(self, size: int) -> Gaussian:
        return Gaussian(size, self.clip, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.std, self.std_last


class Gaussian(ActionNoise):
    """a + clip(std ε, -c, c),  ε ~ N(0, 1), clipped to [-1, 1]."""

    scale = "std"

    def __init__(self, size: int, clip: float = math.inf, graded: bool = False) -> None:
        """`clip`: c, inf for none."""
        super().__init__(size, graded)
        self.clip = clip

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal((*lead, self.size), np.float32)

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        std = self.level_of(level, state, xp)
        return _added(action, (std[..., None] if self.graded else std) * noise, self.clip), state


def _added(action: Array, noise: Array, clip: float) -> Array:
    """clip(a + clip(noise, -c, c), -1, 1) [B, size]."""
    return (action + (noise if clip == math.inf else noise.clip(-clip, clip))).clip(-1, 1)


@chz.chz
class OrnsteinUhlenbeckConfig(ExploreConfig):
    """Ornstein-Uhlenbeck noise, correlated in time (Lillicrap et al. 2016, section 3), on actions in [-1, 1].

    Defaults are the paper's (section 7). For DDPG, TD3 and SAC with Box actions.
    """

    IN_STATE = in_state("sigma_last")

    sigma: Scheduled = scheduled(0.2, "standard deviation of a step of the noise", high=HIGHEST)
    sigma_last: Scheduled = last("standard deviation", high=HIGHEST)
    theta: float = fraction(0.15, "part of the noise that is forgotten a step; 1: uncorrelated")
    clip: float = positive(math.inf, "largest magnitude of the noise, before it is added; inf: any")

    def make_noise(self, size: int) -> OrnsteinUhlenbeck:
        return OrnsteinUhlenbeck(size, self.theta, self.clip, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.sigma, self.sigma_last


@dataclass(frozen=True, eq=False)
class WalkNoise(Struct):
    """Noise of a row; zeros act greedily."""

    step: Array  # [B, size] float32, standard normal
    active: Array  # [B, 1] float32, ones


class OrnsteinUhlenbeck(ActionNoise):
    """a + clip(σ x, -c, c),  x <- (1 - θ) x + ε,  ε ~ N(0, 1), clipped to [-1, 1]; x is 0 at the start of an episode.

    x itself is not clipped.
    """

    scale = "sigma"

    def __init__(self, size: int, theta: float, clip: float = math.inf, graded: bool = False) -> None:
        """`theta`: part of x that is forgotten a step.    `clip`: c, inf for none."""
        super().__init__(size, graded)
        self.theta, self.clip = theta, clip

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> WalkNoise:
        return WalkNoise(rng.standard_normal((*lead, self.size), np.float32), np.ones((*lead, 1), np.float32))

    def own_state(self, n: int) -> Tensor:
        return torch.zeros(n, self.size)

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: WalkNoise, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        x = (1 - self.theta) * (state.own * ~inputs.first[:, None]) + noise.step
        sigma = self.level_of(level, state, xp)
        offset = (sigma[:, None] if self.graded else sigma) * x * noise.active
        return _added(action, offset, self.clip), ExploreState(state.env, x)


@dataclass(frozen=True, eq=False)
class HeldNormal(Struct):
    """Noise of a row; zeros act greedily, whatever is held."""

    normal: Array  # [B, size] float32
    duration: Array  # [B] int64, at least 1


class HeldNoise(ActionNoise):
    """a + std ε,  ε ~ N(0, 1) kept for k steps, clipped to [-1, 1]."""

    scale = "std"

    def __init__(self, size: int, durations: Durations, graded: bool = False) -> None:
        """`durations`: of a draw, in steps."""
        super().__init__(size, graded)
        self.durations = durations

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> HeldNormal:
        normal = rng.standard_normal((*lead, self.size), np.float32)
        return HeldNormal(normal, self.durations.draw(rng, lead))

    def own_state(self, n: int) -> HoldState:
        return HoldState(torch.zeros(n, self.size), torch.zeros(n, dtype=torch.int64))

    def held(self, inputs: AgentInputs, noise: HeldNormal, state: ExploreState, xp: Any) -> tuple[Array, ExploreState]:
        """ε of each row [B, size], kept or drawn, 0 where it acts greedily; and the next state."""
        left = state.own.left * ~inputs.first
        held = xp.where(left[:, None] > 0, state.own.held, noise.normal)
        left = (xp.where(left > 0, left, noise.duration) - 1).clip(0, None)
        return held * (noise.duration[:, None] > 0), ExploreState(state.env, HoldState(held, left))

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: HeldNormal, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        held, state = self.held(inputs, noise, state, xp)
        std = self.level_of(level, state, xp)
        return (action + (std[:, None] if self.graded else std) * held).clip(-1, 1), state


@chz.chz
class NoiseHoldConfig(ExploreConfig):
    """Temporally-Extended Epsilon-Greedy Exploration. Dabney, Ostrovski, Barreto, 2021. ICLR, arXiv 2006.01782.

    A random action, or a draw of Gaussian noise on the actions of a policy, is kept for k steps, k from a truncated
    zeta distribution: p(k) in proportion to k^-mu. `epsilon` is for the DQN family, `std` for DDPG, TD3 and SAC. The
    defaults of k are the paper's (section 4).
    """

    IN_STATE = in_state("epsilon_last", "std_last")

    epsilon: Scheduled = scheduled(math.nan, "rate at which a random action begins; nan: the algorithm's", high=1)
    epsilon_last: Scheduled = last("rate", high=1, default=math.nan)
    std: Scheduled = scheduled(math.nan, "standard deviation on actions in [-1, 1]; nan: the algorithm's", high=HIGHEST)
    std_last: Scheduled = last("standard deviation", high=HIGHEST)
    mu: float = number(2.0, "exponent of the zeta distribution; large: one step")
    longest: int = count(10_000, "most steps that a draw is kept; 1: one step", high=10**6)

    def make_q(self, n_actions: int, masked: bool) -> HeldAction:
        return HeldAction(n_actions, masked, Durations(self.mu, self.longest), self.graded)

    def make_noise(self, size: int) -> HeldNoise:
        return HeldNoise(size, Durations(self.mu, self.longest), self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        of_noise = isinstance(self.epsilon, float) and math.isnan(self.epsilon)
        return (self.std, self.std_last) if of_noise else (self.epsilon, self.epsilon_last)


class NoNoise(Stochastic):
    """The policy's mode."""

    samples = False


@chz.chz
class NoneConfig(ExploreConfig):
    """No exploration: greedy actions, or those that random first steps take.

    Of the policy gradients the mode of the policy, whose log-probability is learned from as if it had been sampled.
    """

    def make_q(self, n_actions: int, masked: bool) -> Greedy:
        return Greedy(n_actions, masked)

    def make_noise(self, size: int) -> NoNoise:
        return NoNoise(size)


@chz.chz
class OwnExplorationConfig(ExploreConfig):
    """Exploration of your own: a subclass of QExploration or ActionNoise, such as ./mine.py:Chaos.

    Written algo.explore=module:Class for short.
    """

    IN_STATE = in_state("level_last")

    name: str = option("", "module:Class or ./file.py:Class, a subclass of QExploration or ActionNoise")
    kwargs: Mapping[str, Any] = chz.field(default_factory=dict, doc="of the class: algo.explore.kwargs.name=value")
    level: Scheduled = scheduled(1.0, "rate or scale, which its level_of returns", high=HIGHEST)
    level_last: Scheduled = last("level", high=HIGHEST)

    @chz.validate
    def _check(self) -> None:
        if self.name:
            self.load()

    def load(self) -> type[QExploration] | type[ActionNoise]:
        """The class.

        Raises:
            ConfigError: there is none of this name, or it is no exploration.
        """
        key, cls = f"algo.explore={self.name}", find_class(self.name, "algo.explore")
        if not (isinstance(cls, type) and issubclass(cls, QExploration | ActionNoise)):
            raise ConfigError(f"{key} is no subclass of rlframe.exploration.QExploration or ActionNoise")
        return cls

    def make_q(self, n_actions: int, masked: bool) -> QExploration:
        return self._made(QExploration, "Q-values", n_actions, masked)

    def make_noise(self, size: int) -> ActionNoise:
        return self._made(ActionNoise, "actions of numbers", size)

    def _made(self, base: type, of: str, *arguments: Any) -> Any:
        cls: Any = self.load()
        if not issubclass(cls, base):
            raise ConfigError(f"algo.explore={self.name}: for {of} it must be a subclass of {base.__name__}")
        with naming(f"algo.explore={self.name} cannot be made"):
            try:
                made = cls(*arguments, graded=self.graded, **self.kwargs)
                made.scale = made.scale or "level"
                return made
            except TypeError as error:
                hint = "its arguments are algo.explore.kwargs.name=value"
                raise ConfigError(f"algo.explore={self.name}: {shortened(str(error))}; {hint}") from None

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.level, self.level_last
