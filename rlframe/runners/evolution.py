"""Evolution: play a generation of perturbed policies, learn from their returns, repeat; `runner=evolution`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.algos import evolution
from rlframe.core.config import AUTO, count
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.envs import EnvConfig, Envs
from rlframe.evaluation.evaluator import BaseEvaluator, EvaluationStopped
from rlframe.evaluation.population import PopulationSampler, make_single_envs
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.runners.base import Runner
from rlframe.runners.callbacks import Callback
from rlframe.runners.config import NO_AFFINITY, NO_LIMITS, Limits, RunnerConfig
from rlframe.system.affinity import Affinity


class EvolutionRl(Runner):
    """A stop request ends a generation at once. The resumed run plays the episodes that had not ended."""

    sampler: PopulationSampler
    algo: evolution.Evolution

    def __init__(
        self,
        sampler: PopulationSampler,
        agent: Agent,
        algo: evolution.Evolution,
        n_steps: int,
        log_interval_steps: int = 10_000,
        evaluator: BaseEvaluator | None = None,
        limits: Limits = NO_LIMITS,
        callbacks: Sequence[Callback] = (),
        affinity: Affinity | Mapping[str, Any] = NO_AFFINITY,
    ) -> None:
        if not isinstance(sampler, PopulationSampler) or not isinstance(algo, evolution.Evolution):
            raise TypeError(
                f"Evolution needs a PopulationSampler and an evolution strategy, got {type(sampler).__name__} and "
                f"{type(algo).__name__}"
            )
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps, evaluator, limits, callbacks, affinity)
        if self.ranks.world_size > 1:
            raise ConfigError(f"world_size={self.ranks.world_size}: evolution has one rank; raise sampler.n_workers")

    def iterate(self) -> None:
        with suppress(EvaluationStopped):
            self._generation()

    def _generation(self) -> None:
        with self.log.timers("sampling"):
            self.sampler.propose(self.algo.ask(), self.stop.__bool__)
            samples = self.sampler.collect()
        with self.log.timers("learning"):
            self.algo.receive(samples)
            self.update()
        self.received(samples)
        self.record_episodes()

    def options(self) -> dict[str, Any]:
        return {"max_length": self.sampler.max_length}


@chz.chz
class Config(RunnerConfig):
    """How long to train, and how often to evaluate and log; eval.n_episodes=0: no evaluation."""

    runner_class = EvolutionRl
    evolves = True

    max_length: int = count(200_000, "env steps after which an episode is cut, as a time limit would")

    def make_envs(self, sampler: Any, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> Envs | WorkerPool:
        """One environment in each worker, or with sampler=serial in this process."""
        n_workers = len(cpus) if sampler.worker_count() == AUTO else sampler.worker_count()
        return make_single_envs(env, seed_int(seed, Role.ENV, 0), n_workers, cpus, sampler.supervision())

    def make_sampler(self, sampler: Any, algo: Any, envs: Any, agent: Agent, seed: int) -> PopulationSampler:
        discount = 1.0 if math.isnan(sampler.discount) else sampler.discount
        return PopulationSampler(envs, agent, algo.directions, self.max_length, discount, seed)
