"""SerialSampler: environments and agent in this process, which steps and acts in turn."""

from __future__ import annotations

import chz

from rlframe.agents import Agent
from rlframe.core.arguments import checked
from rlframe.core.ranks import first_env_of_rank
from rlframe.core.seeding import Role, generators
from rlframe.envs import Envs
from rlframe.rollout.collector import Collector, local_collector
from rlframe.samplers.base import LocalInferenceSampler, SamplerConfig, name_of_collector


@chz.chz
class Config(SamplerConfig):
    """For environments that step in microseconds, native vector environments, and debugging."""

    in_process = True

    def make_sampler(self, envs: Envs, agent: Agent, seed: int) -> SerialSampler:
        return SerialSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps, self.collector_class())


class SerialSampler(LocalInferenceSampler):
    """Steps `envs`, of this process, one after another or on the backend's own threads.

    Each environment draws its noise and its decorrelation moves from streams of its own, keyed by `seed` and its number
    among all ranks' environments, so that a batch does not depend on how environments are spread.
    """

    @checked
    def __init__(
        self,
        envs: Envs,
        agent: Agent,
        batch_T: int,
        seed: int = 0,
        decorrelation_steps: int = 0,
        collector: type[Collector] = Collector,
    ) -> None:
        name = name_of_collector(collector)
        config = Config(batch_T=batch_T, batch_B=envs.n, decorrelation_steps=decorrelation_steps, collector=name)
        first = first_env_of_rank(envs.n)
        rngs = generators(seed, Role.NOISE, envs.n, first)
        made = local_collector(envs, agent, batch_T, rngs, first=first, collector=collector)
        made.decorrelate(decorrelation_steps, seed, first)
        super().__init__(envs, made, rngs, envs.backend)
        self.seed, self.config = seed, config
