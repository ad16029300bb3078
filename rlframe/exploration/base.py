"""The interface of exploration: what chooses among Q-values, what adds noise to actions, their Configs and levels.

A kind has one scale, its level: a rate of random actions, a standard deviation, a temperature. The level may be a
schedule, and may differ between environments, spaced logarithmically from the first to the last (Horgan et al. 2018).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import chz
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.core.config import key_of, nearest
from rlframe.core.errors import ConfigError
from rlframe.core.parts import OWN, ROOTS, Part, part, part_name
from rlframe.core.ranks import current_ranks, first_env_of_rank
from rlframe.core.schedule import Scheduled, curve, scheduled
from rlframe.core.struct import Struct, Tree, fill
from rlframe.core.types import AgentInputs, Array, Samples
from rlframe.models import ModelConfig

PACKAGE = "rlframe.exploration"
Evaluated = tuple[Array, Tree, "ExploreState"]
HIGHEST = 1e30  # of a level without a bound of its own; times any noise still finite in float32
_NEVER = 1e-12  # least level of a ladder; 1 - 1e-12 rounds to 1 in float32


@dataclass(frozen=True, eq=False)
class ExploreState(Struct):
    """What exploration carries from row to row of an environment."""

    env: Tree  # [B] float32, index of the environment over all ranks; () if all have the same level
    own: Tree  # of the kind; () if it has none


class Exploration(nn.Module, ABC):
    """How an agent acts other than greedily. Its level is set by the algorithm; its state travels with the agent's.

    Zero noise must act greedily, whatever the level and the state: evaluation acts so.
    """

    level: Tensor  # [3] of the first and of the last environment, and the index of the last one of all ranks
    scale = ""  # name of its level: of a field of its Config, and of a metric
    kind = ""  # value of algo.explore= that it was made by; empty: not known

    def __init__(self, graded: bool = False) -> None:
        """`graded`: the level differs between environments."""
        super().__init__()
        self.graded = graded
        self.register_buffer("level", torch.tensor([0.0, 0.0, 1.0]))

    def set_level(self, first: float, last: float, n_envs: int) -> None:
        """Set the level of environment 0 and of the last one; n_envs counts the environments of all ranks."""
        fill(self.level, (first, last, max(n_envs - 1, 1)))

    def level_of(self, level: Array, state: ExploreState, xp: Any) -> Array:
        """The level of each row, [] or [B]: first^(1 - i/(N-1)) last^(i/(N-1)) for environment i of N.

        `level`: the buffer, or its NumPy view where `xp`, the module of all arrays, is numpy.
        """
        if not self.graded:
            return level[0]
        logs = xp.log(level.clip(_NEVER, None))
        return xp.exp(logs[0] + (logs[1] - logs[0]) * (state.env / level[2]))

    def follow(self, model: Any, samples: Samples, before: int, after: int) -> None:
        """Adapt to a batch that the learner received; the same on all ranks.

        Args:
            model: the network that acts.    samples: [T, B], of this rank; each column one agent's.
            before, after: time steps of each environment before the batch and after it.
        """

    def counters(self) -> dict[str, float]:
        """Metrics of its state, named with their group, for each row of the log."""
        return {}

    @abstractmethod
    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        """Noise of one environment, NumPy arrays [*lead, ...] of float32 or int64; () for none."""

    def own_state(self, n: int) -> Tree:
        """The kind's own state [n, ...] of environments at their start, float32 tensors; () for none.

        An episode that starts later has `first` set in its inputs, where the kind forgets its state.
        """
        return ()

    def initial_state(self, env_ids: Sequence[int]) -> ExploreState:
        """State of the environments with these global indices at their start."""
        device = self.level.device
        env = torch.tensor(list(env_ids), dtype=torch.float32, device=device) if self.graded else ()
        own = self.own_state(len(env_ids))
        return ExploreState(env, own).to(device)


class QExploration(Exploration):
    """Chooses among Discrete actions by their Q-values."""

    def __init__(self, n_actions: int, masked: bool, graded: bool = False) -> None:
        """`masked`: observations have an action mask."""
        super().__init__(graded)
        self.n_actions, self.masked = n_actions, masked

    @abstractmethod
    def choose(
        self, q: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        """Actions [B] and the next state.

        Args:
            q: [B, A], -inf for forbidden actions.    noise: as of `noise`, [B, ...].
            level: see `level_of`.    xp: the module of all arrays, torch or numpy.
        """

    def log_probabilities(self, q: Array, level: Array, xp: Any) -> Array | None:
        """Of all actions [..., A], chosen by q [..., A], -inf for forbidden ones, at a level [...]; None: not known."""
        return None


class ActionNoise(Exploration):
    """Changes the actions in [-1, 1] that a policy takes."""

    changes = True  # False: `perturb` would return the actions as they are, and is not called
    samples = True  # a stochastic policy samples its actions; False: they are its mode

    def __init__(self, size: int, graded: bool = False) -> None:
        """`size`: numbers of an action."""
        super().__init__(graded)
        self.size = size

    @property
    def log_prob_known(self) -> bool:
        """Whether the policy's log-probability of its action is right."""
        return self.samples and not self.changes

    def network(self, model: Any, n: int = 0) -> Any:
        """What `evaluate` needs of the policy's network, in torch, or for n NumPy rows; None if it has no such form."""
        return model.numpy_forward(n) if n else model

    def evaluate(
        self, network: Any, inputs: AgentInputs, sampled: Tree, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> Evaluated:
        """The policy's parameters [B, P], the noise [B, size] that it samples with or (), and the next state.

        Args:
            network: as of `network`.    sampled: the noise that was drawn for the policy.
            level, xp: as of `perturb`.
        """
        return network(inputs.observation), sampled, state

    @abstractmethod
    def perturb(
        self, action: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        """Actions [B, size] in [-1, 1] in place of the policy's, and the next state; arguments as of `choose`."""


class NetworkNoise(ActionNoise, ABC):
    """Changes the policy that acts, not its actions: its parameters, or the noise that it samples with."""

    changes = samples = False

    @abstractmethod
    def evaluate(
        self, network: Any, inputs: AgentInputs, sampled: Tree, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> Evaluated:
        pass

    def perturb(
        self, action: Array, inputs: AgentInputs, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> tuple[Array, ExploreState]:
        return action, state


@chz.chz
class ExploreConfig:
    """Base class of the Configs of exploration; each makes what the algorithm needs, or raises ConfigError."""

    def make_q(self, n_actions: int, masked: bool) -> QExploration:
        """For Discrete actions with Q-values."""
        raise ConfigError(f"algo.explore={self.kind()} does not choose among Discrete actions by Q-values")

    def make_noise(self, size: int) -> ActionNoise:
        """For the actions of a policy: `size` numbers in [-1, 1]."""
        raise ConfigError(f"algo.explore={self.kind()} is not for actions of numbers")

    def make_for(self, model: Any, size: int, seed: int) -> ActionNoise:
        """As `make_noise`, for a policy with this network; `seed`: that of the run."""
        return self.make_noise(size)

    def make_head(self, last: nn.Linear, stochastic: bool, learn_features: bool) -> nn.Module:
        """The network's last layers where `needs_features` is set: `last`, or those of a policy with a deviation."""
        return last

    def kind(self) -> str:
        """The value of algo.explore= that names it."""
        return part_name(self, PACKAGE)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        """Level of the first and of the last environment; of the last, 0: as of the first."""
        return 0.0, 0.0

    @property
    def graded(self) -> bool:
        """Whether environments have levels of their own."""
        last = self.levels()[1]
        return last != 0.0 and not _is_nan(last)

    @property
    def needs_features(self) -> bool:
        """Whether noise depends on the input of the policy's last layer."""
        return False

    @property
    def noisy_layers(self) -> bool:
        """Whether the head of a Q-network is to have noisy layers."""
        return False


def unknown_probabilities(what: str) -> ConfigError:
    """For estimates of a policy whose actions, as `what` says, have probabilities that are not known."""
    return ConfigError(
        f"the probabilities of this agent's actions {what} are not known; explore=false estimates its greedy policy, "
        f"by estimate=fqe"
    )


def check_features(explore: ExploreConfig, model: ModelConfig, is_box: bool, action_space: Any) -> None:
    """Raise ConfigError if exploration by the policy's features does not fit the actions or the model."""
    if not explore.needs_features:
        return
    if not is_box and isinstance(action_space, spaces.Box):
        raise ConfigError(
            f"algo.explore={explore.kind()} is for Gaussian policies, not model.distribution={model.distribution}; "
            f"use gaussian"
        )
    if not is_box:
        raise ConfigError(f"algo.explore={explore.kind()} is for one Box of actions, not {action_space}")
    if model.log_std or model.state_dependent_std:
        given = f"log_std={model.log_std:g}" if model.log_std else "state_dependent_std=true"
        raise ConfigError(
            f"model.{given} has no meaning with algo.explore={explore.kind()}, whose deviation depends on the state; "
            f"set algo.explore.log_std"
        )


def last(of: str, high: float = math.inf, default: float = 0.0) -> Any:
    """A field for the level of the last environment; `of`: the name of that of the first."""
    more = "; nan: the algorithm's" if math.isnan(default) else ""
    return scheduled(
        default, f"{of} of the last environment, others spaced logarithmically; 0: as all{more}", high=high
    )


def _fitted(explore: Any, algorithm: Any, kinds: Sequence[str], numbers: Mapping[str, Scheduled]) -> Any:
    """The Config with the algorithm's numbers where it has none. Raises ConfigError unless it fits the algorithm."""
    kind, key = part_name(explore, PACKAGE), key_of(algorithm, "explore")
    algo = f"algo={part_name(algorithm, ROOTS['algo'])}"
    is_own = not type(explore).__module__.startswith(f"{PACKAGE}.") and OWN in kinds
    if kind not in kinds and not is_own:
        raise ConfigError(f"{key}={kind} does not fit {algo}, which takes {', '.join(kinds)}{nearest(kind, kinds)}")
    fields = {name: getattr(explore, name) for name in chz.chz_fields(explore)}
    for name, given in fields.items():
        of = name.removesuffix("_last")
        if of in ("epsilon", "std") and of not in numbers and given != 0.0 and not _is_nan(given):
            raise ConfigError(f"{key}.{name}={given} has no meaning for {algo}; use {key}.{next(iter(numbers))}")
    open_ = {
        name: numbers.get(name, 0.0 if name.endswith("_last") else math.nan)
        for name, given in fields.items()
        if _is_nan(given)
    }
    return chz.replace(explore, **open_) if open_ else explore


def _is_nan(given: Any) -> bool:
    return isinstance(given, float) and math.isnan(given)


def config_of(given: ExploreConfig | str) -> ExploreConfig:
    """A Config, or that of a name with its defaults: `epsilon`, or module:Class for a class of the user's own.

    Raises:
        ConfigError: there is no such kind or class.
    """
    return Part(PACKAGE, given).make(given) if isinstance(given, str) else given


def explore(default: str, kinds: Sequence[str], numbers: Mapping[str, Scheduled] = MappingProxyType({})) -> Any:
    """A field of an algorithm's Config for its exploration: a name or a Config.

    Args:
        kinds: the names that fit the algorithm.    numbers: those of this algorithm where nan is given.
    """
    own = "; own is a class of yours, module:Class" if OWN in kinds else ""
    return part(
        PACKAGE,
        default,
        f"{' | '.join(kinds)}: how it explores{own}",
        of=ExploreConfig,
        finish=partial(_fitted, kinds=kinds, numbers=numbers),
        fitting=kinds,
        classes="the class of a QExploration or ActionNoise",
    )


class ExplorationSchedule:
    """Sets the level of an agent's exploration by env_steps."""

    def __init__(self, explore: ExploreConfig | str, n_steps: float, n_envs: int) -> None:
        """Args:
        n_steps: env_steps of the run.
        n_envs: environments of this rank; levels are graded over those of all ranks.

        Raises:
            ConfigError: the level is nan, that of an algorithm.
        """
        config = config_of(explore)
        first, last = config.levels()
        if _is_nan(first):
            raise ConfigError(
                f"algo.explore={config.kind()} has no level; set it, or take `explore` of an algorithm's Config, which "
                f"has its own"
            )
        self.kind, self.graded = config.kind(), config.graded
        self.first = curve(first, n_steps)
        self.last = curve(last, n_steps) if config.graded else self.first
        self.n_own, self.n_envs = n_envs, n_envs * current_ranks().n_samplers

    def check(self, exploration: Exploration) -> None:
        """Raise ConfigError if the agent's exploration was made by another config."""
        if exploration.kind and (exploration.kind, exploration.graded) != (self.kind, self.graded):
            of = {True: " with levels of its own for each environment", False: ""}
            raise ConfigError(
                f"the agent was made with explore={exploration.kind}{of[exploration.graded]}, and the algorithm with "
                f"explore={self.kind}{of[self.graded]}; give both the same"
            )

    def apply(self, exploration: Exploration, env_steps: int) -> None:
        """Set the level for `env_steps`."""
        exploration.set_level(self.first(env_steps), self.last(env_steps), self.n_envs)

    def metrics(self, exploration: Exploration, env_steps: int) -> dict[str, float]:
        """The level of the first environment, for the log: algo/epsilon, or algo/exploration of other kinds."""
        if not exploration.scale:
            return {}
        name = "epsilon" if exploration.scale == "epsilon" else "exploration"
        return {f"algo/{name}": self.first(env_steps)}

    def least_exploring(self, env_steps: int) -> range:
        """Of this rank's environments those with the lowest levels: of an eighth of all, at least one.

        None of them if all have the same level. Indices count from this rank's first environment.
        """
        if self.first(env_steps) == self.last(env_steps):
            return range(0)
        n, before = max(self.n_envs // 8, 1), first_env_of_rank(self.n_own)
        is_last = self.last(env_steps) < self.first(env_steps)
        return range(self.n_envs - n - before, self.n_envs - before) if is_last else range(-before, n - before)
