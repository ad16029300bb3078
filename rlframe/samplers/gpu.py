"""GpuSampler: worker processes step the environments, and this process acts for all of them on the agent's device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.core.arguments import checked
from rlframe.core.config import AUTO, count, number
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import first_env_of_rank
from rlframe.core.seeding import Role, generators, new_round, spawned
from rlframe.rollout.collector import Collector, worker_collector
from rlframe.rollout.inference import noise_state
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers.base import LocalInferenceSampler, WorkersConfig, name_of_collector


@chz.chz
class Config(WorkersConfig):
    """For policies that gain from a GPU or from one large batch. The device may also be the CPU."""

    acts_on_device = True

    n_groups: int = count(1, "groups of workers; with 2, one group steps while the agent acts for the other")

    wait_s: float = number(math.inf, "seconds that a step waits for more environments once one is ready; inf: for all")

    @chz.validate
    def _check_waiting(self) -> None:
        for key, given in {"complete_episodes=true": self.complete_episodes, "env_restarts": self.env_restarts}.items():
            if given and self.wait_s < math.inf:
                raise ConfigError(f"sampler.wait_s={self.wait_s:g} cannot be used with sampler.{key}; leave one out")

    @chz.validate
    def _check_groups(self) -> None:
        if self.n_workers != AUTO and self.n_groups > self.n_workers:
            raise ConfigError(
                f"sampler.n_groups={self.n_groups} must be from 1 to sampler.n_workers={self.n_workers}: "
                f"each group needs a worker"
            )

    def make_sampler(self, envs: WorkerPool, agent: Agent, seed: int) -> GpuSampler:
        given = self.batch_T, seed, self.decorrelation_steps, self.n_groups, self.wait_s
        return GpuSampler(envs, agent, *given, self.collector_class())


class GpuSampler(LocalInferenceSampler):
    """The agent acts for one group of workers at a time, while the other groups step."""

    @checked
    def __init__(
        self,
        envs: WorkerPool,
        agent: Agent,
        batch_T: int,
        seed: int = 0,
        decorrelation_steps: int = 0,
        n_groups: int = 1,
        wait_s: float = math.inf,
        collector: type[Collector] = Collector,
    ) -> None:
        """`wait_s`: see FirstReadyStepper. Then one seed does not give one history, nor a resume the same episodes."""
        workers: dict[str, Any] = {"n_workers": len(envs.workers), "n_groups": n_groups}
        sizes: dict[str, Any] = {"batch_T": batch_T, "batch_B": envs.n, "decorrelation_steps": decorrelation_steps}
        config = Config(**sizes, **workers, wait_s=wait_s, collector=name_of_collector(collector))
        if wait_s < math.inf and agent.recurrent:
            raise ConfigError(
                f"sampler.wait_s={wait_s:g} is for policies without memory, which would see rows in which an "
                f"environment waits; use model.memory=none or leave it out"
            )
        first = first_env_of_rank(envs.n)
        rngs = generators(seed, Role.NOISE, envs.n, first)
        made = worker_collector(envs, agent, batch_T, rngs, True, n_groups, first, wait_s, collector)
        made.decorrelate(decorrelation_steps, seed, first)
        backend = f"{envs.backend}, in {n_groups} groups" if n_groups > 1 else envs.backend
        super().__init__(envs, made, rngs, backend)
        self.workers = envs
        self.seed, self.config, self._waits = seed, config, wait_s < math.inf

    def state_dict(self) -> dict[str, Any]:
        """Without environments whose steps may not be finished: their episodes start anew."""
        return {"noise": noise_state(self.rngs)} if self._waits else super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        reasons = super().load_state_dict(state)
        self.workers.number_from(new_round(spawned(self.rngs)))
        return reasons
