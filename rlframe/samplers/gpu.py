"""GpuSampler: worker processes step the environments, this process acts for all of them on the agent's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.core.config import AUTO, count
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, generators
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs.workers import EnvWorkers
from rlframe.samplers.base import Sampler, load_noise, noise_state
from rlframe.samplers.collector import remote_collector
from rlframe.samplers.workers import WorkersConfig


@chz.chz
class Config(WorkersConfig):
    """For policies that are worth a device of their own, or one batched pass; the device may be the CPU too."""

    n_groups: int = count(1, "groups of workers; with 2, one steps while the other is acted for (alternating)")

    @chz.validate
    def _check_groups(self) -> None:
        if self.n_groups < 1 or (self.n_workers != AUTO and self.n_groups > self.n_workers):
            raise ConfigError(
                f"sampler.n_groups={self.n_groups} must be from 1 to sampler.n_workers={self.n_workers}: "
                f"each group has a worker"
            )

    def make_sampler(self, envs: EnvWorkers, agent: Agent, seed: int) -> GpuSampler:
        return GpuSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps, self.n_groups)


class GpuSampler(Sampler):
    """Shares the agent with the learner, so its data always come from the newest parameters."""

    def __init__(
        self,
        envs: EnvWorkers,
        agent: Agent,
        batch_T: int,
        seed: int = 0,
        decorrelation_steps: int = 0,
        n_groups: int = 1,
    ) -> None:
        if not 1 <= n_groups <= len(envs.workers):
            raise ConfigError(
                f"sampler.n_groups={n_groups} must be from 1 to sampler.n_workers={len(envs.workers)}: "
                f"each group has a worker"
            )
        self.envs = envs
        self.backend = f"{envs.backend}, in {n_groups} groups" if n_groups > 1 else envs.backend
        self.batch_spec = BatchSpec(batch_T, envs.n)
        self.rngs = generators(seed, Role.NOISE, envs.n)
        self.collector = remote_collector(envs, agent, batch_T, self.rngs, True, n_groups)
        moves = generators(seed, Role.DECORRELATION, envs.n)
        self.collector.decorrelate(decorrelation_steps, envs.action_space, moves)

    def collect(self) -> Samples:
        return self.collector.collect()

    def trajectories(self) -> list[Trajectory]:
        return self.collector.tracker.pop()

    def refresh(self, agent: Agent) -> None:
        """Nothing to do: the agent is shared."""

    def counters(self) -> dict[str, float]:
        return {**self.envs.counters(), **self.collector.bounds.counters()}

    def state_dict(self) -> dict[str, Any]:
        return {"noise": noise_state(self.rngs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_noise(self.rngs, state["noise"])

    def close(self) -> None:
        self.envs.close()
