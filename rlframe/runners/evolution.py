"""Evolution: play a generation of perturbed policies, learn from their returns, repeat; `runner=evolution`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.algos import evolution
from rlframe.core.config import AUTO, count
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.envs import EnvConfig
from rlframe.evaluation.evaluator import EvaluationStopped
from rlframe.evaluation.players import Players, make_players
from rlframe.evaluation.population import PopulationSampler
from rlframe.runners.base import Runner
from rlframe.runners.config import RunnerConfig
from rlframe.system.affinity import Affinity


class EvolutionRl(Runner):
    """A stop request ends a generation at once. The resumed run plays the episodes that had not ended."""

    sampler: PopulationSampler

    def prepare(self) -> None:
        """Raises:
        ConfigError: sampler or algorithm are not those of an evolution strategy, or there are several ranks.
        """
        if not isinstance(self.sampler, PopulationSampler) or not isinstance(self.algo, evolution.Evolution):
            raise ConfigError(
                f"EvolutionRl needs a PopulationSampler and an evolution strategy, got {type(self.sampler).__name__} "
                f"and {type(self.algo).__name__}"
            )
        if self.ranks.world_size > 1:
            raise ConfigError(f"world_size={self.ranks.world_size}: evolution has one rank; raise sampler.n_workers")
        self.strategy = self.algo

    def iterate(self) -> None:
        with suppress(EvaluationStopped):
            self._generation()

    def _generation(self) -> None:
        with self.log.timers("sampling"):
            self.sampler.propose(self.strategy.ask(), self.stop.__bool__)
            batches = self.collect()
        self.receive(batches)
        with self.log.timers("learning"):
            self.update(self.learner)


@chz.chz
class EvolutionRlConfig(RunnerConfig):
    """EvolutionRl: play a generation of perturbed policies, learn from their returns, repeat."""

    runner_class = EvolutionRl
    evolves = True

    max_length: int = count(200_000, "env steps after which an episode is cut, as a time limit would")

    def make_envs(self, sampler: Any, env: EnvConfig, seed: int, affinity: Affinity) -> Players:
        """One environment in each worker, or with sampler=serial in this process."""
        cpus = affinity.workers
        n_workers = len(cpus) if sampler.worker_count() == AUTO else sampler.worker_count()
        return make_players(env, seed_int(seed, Role.ENV, 0), n_workers, cpus, sampler.supervision())

    def make_sampler(
        self, sampler: Any, algo: Any, envs: Any, agent: Agent, seed: int, devices: Sequence[str] = ("cpu",)
    ) -> PopulationSampler:
        discount = 1.0 if math.isnan(sampler.discount) else sampler.discount
        return PopulationSampler(envs, agent, algo.directions, self.max_length, discount, seed)
