"""RunnerConfig, the options that all runners have, and Limits, what ends a training early."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.config import choice, count, number, positive
from rlframe.envs import EnvConfig
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.runners.callbacks import Callback
from rlframe.runners.report import WINDOW
from rlframe.runners.stop_rule import StopRule
from rlframe.samplers import Sampler
from rlframe.system.distributed import TIMEOUT_S

if TYPE_CHECKING:
    from rlframe.runners.base import Runner

NONFINITE = ("stop", "skip")


class Clock(Enum):
    """What a runner counts n_steps and log_interval_steps in."""

    ENV_STEPS = "env_steps"  # runners that step environments
    UPDATES = "updates"  # runners that learn from data alone


@dataclass(frozen=True)
class Limits:
    """What ends a training early."""

    max_time_s: float = 0.0  # seconds of this start; 0: no limit
    nonfinite: str = "stop"  # stop | skip: at an update whose loss or gradient is NaN or Inf
    target_score: float = math.inf  # the training ends after the first row with this score; inf: none
    stop: str = ""  # a StopRule: the training ends after the first row for which it holds; empty: none

    def __post_init__(self) -> None:
        if not 0 <= self.max_time_s < math.inf or self.nonfinite not in NONFINITE:
            raise ValueError(
                f"runner.max_time_s={self.max_time_s} must be finite and at least 0, "
                f"runner.nonfinite={self.nonfinite!r} one of {', '.join(NONFINITE)}"
            )
        if math.isnan(self.target_score):
            raise ValueError("runner.target_score=nan must be a number, or inf for none")
        if self.stop:
            StopRule(self.stop)


NO_LIMITS = Limits()
NO_AFFINITY: Mapping[str, Any] = MappingProxyType({})


@chz.chz
class RunnerConfig:
    """Base of every runner's Config."""

    runner_class: ClassVar[Any]  # a subclass of Runner
    samples_in_background = False  # the sampler has its own process: n_slots, learner_cores and supervision() apply
    trains_in_ranks = False  # world_size may be above 1
    becomes_sync_rl = False  # with world_size above 1
    evolves = False  # for evolution strategies, and for nothing else

    n_steps: int = count(1_000_000, "env_steps to train, over all ranks")
    log_interval_steps: int = count(10_000, "env_steps between rows of the log, evaluations and snapshots")
    max_time_s: float = number(0.0, "seconds after which this start saves a snapshot and ends; 0: no limit")
    window: int = count(WINDOW, "training episodes, the last ones, that episode/return_mean and similar metrics are of")
    target_score: float = number(
        math.inf,
        "end once eval/return_mean, or episode/return_mean without evaluation, is this high; inf: never",
        low=-math.inf,
    )
    timeout_s: float = positive(TIMEOUT_S, "seconds that a rank waits for the others before the run ends (world_size)")
    nonfinite: str = choice("stop", NONFINITE, "what to do if a loss or gradient is NaN or Inf; skip skips the update")

    def limits(self, stop: str) -> Limits:
        return Limits(self.max_time_s, self.nonfinite, self.target_score, stop)

    def evaluates(self, n_episodes: int) -> bool:
        """Whether the runner evaluates, given eval.n_episodes."""
        return n_episodes > 0

    def make_envs(self, sampler: Any, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> Any:
        """The environments, or the worker processes that have them, as this sampler wants them."""
        return sampler.make_envs(env, seed, cpus)

    def make_sampler(self, sampler: Any, algo: Any, envs: Any, agent: Agent, seed: int) -> Sampler:
        """The sampler of these environments; `algo`: the algorithm's config."""
        made: Sampler = sampler.make_sampler(envs, agent, seed)
        sampler.follow_episodes(made)
        return made

    def make_runner(
        self,
        sampler: Any,
        agent: Agent,
        algo: Algorithm,
        evaluator: BaseEvaluator | None,
        callbacks: Sequence[Callback],
        stop: str = "",
    ) -> Runner:
        """The runner with these options; `stop`: see Limits."""
        steps, limits = (self.n_steps, self.log_interval_steps), self.limits(stop)
        return self.runner_class(sampler, agent, algo, *steps, evaluator, limits=limits, callbacks=callbacks)
