"""SerialSampler: environments and agent in this process, one batched step after another."""

from __future__ import annotations

from collections.abc import Sequence

import chz

from rlframe.agents import Agent
from rlframe.core.ranks import first_of_rank
from rlframe.core.seeding import Role, env_seeds, generators
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.rollout.collector import local_collector
from rlframe.rollout.env_pool import EnvPool
from rlframe.samplers.base import CentralSampler, SamplerConfig


@chz.chz
class Config(SamplerConfig):
    """Everything in one process: for environments that step in microseconds, and for debugging."""

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> Envs:
        return make_envs(env, self.batch_B, env_seeds(seed, Role.ENV, self.batch_B), first_of_rank(self.batch_B))

    def make_sampler(self, envs: Envs, agent: Agent, seed: int) -> SerialSampler:
        return SerialSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps)


class SerialSampler(CentralSampler):
    """Environments step in this process, one after another or on threads of their own."""

    def __init__(self, envs: Envs, agent: Agent, batch_T: int, seed: int = 0, decorrelation_steps: int = 0) -> None:
        if isinstance(envs, EnvPool):
            raise TypeError("SerialSampler steps environments of this process: give it make_envs(...)")
        first = first_of_rank(envs.n)
        rngs, moves = generators(seed, Role.NOISE, envs.n, first), generators(seed, Role.DECORRELATION, envs.n, first)
        collector = local_collector(envs, agent, batch_T, rngs, first=first)
        collector.decorrelate(decorrelation_steps, envs.action_space, moves)
        super().__init__(envs, collector, rngs, envs.backend)
