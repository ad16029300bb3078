"""SerialSampler: environments and agent in this process, one batched step after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.core.seeding import Role, env_seeds, generators
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.samplers.base import Sampler, SamplerConfig, load_noise, noise_state
from rlframe.samplers.collector import local_collector


@chz.chz
class Config(SamplerConfig):
    """Everything in one process: for environments that step in microseconds, and for debugging."""

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> Envs:
        return make_envs(env, self.batch_B, env_seeds(seed, Role.ENV, self.batch_B))

    def make_sampler(self, envs: Envs, agent: Agent, seed: int) -> SerialSampler:
        return SerialSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps)


class SerialSampler(Sampler):
    """Shares the agent with the learner, so its data always come from the newest parameters."""

    def __init__(self, envs: Envs, agent: Agent, batch_T: int, seed: int = 0, decorrelation_steps: int = 0) -> None:
        self.envs, self.backend = envs, envs.backend
        self.batch_spec = BatchSpec(batch_T, envs.n)
        self.rngs = generators(seed, Role.NOISE, envs.n)
        self.collector = local_collector(envs, agent, batch_T, self.rngs)
        moves = generators(seed, Role.DECORRELATION, envs.n)
        self.collector.decorrelate(decorrelation_steps, envs.action_space, moves)

    def collect(self) -> Samples:
        return self.collector.collect()

    def trajectories(self) -> list[Trajectory]:
        return self.collector.tracker.pop()

    def refresh(self, agent: Agent) -> None:
        """Nothing to do: the agent is shared."""

    def counters(self) -> dict[str, float]:
        return self.collector.bounds.counters()

    def state_dict(self) -> dict[str, Any]:
        return {"noise": noise_state(self.rngs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_noise(self.rngs, state["noise"])

    def close(self) -> None:
        self.envs.close()
