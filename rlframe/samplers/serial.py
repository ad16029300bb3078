"""SerialSampler: environments and agent in this process, one batched step after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.core.config import count
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, env_seeds, generator
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.samplers.base import Sampler
from rlframe.samplers.collector import Collector


@chz.chz
class Config:
    """Sizes of a batch."""

    batch_T: int = count(128, "time steps a batch, of each environment")
    batch_B: int = count(8, "environments")
    decorrelation_steps: int = count(0, "random steps first, so that episodes of varying length do not begin together")

    @chz.validate
    def _check(self) -> None:
        if self.batch_T < 1 or self.batch_B < 1 or self.decorrelation_steps < 0:
            raise ConfigError(
                f"sampler.batch_T={self.batch_T} and sampler.batch_B={self.batch_B} must be at least 1, "
                f"sampler.decorrelation_steps={self.decorrelation_steps} at least 0"
            )

    def make_envs(self, env: EnvConfig, seed: int) -> Envs:
        return make_envs(env, self.batch_B, env_seeds(seed, Role.ENV, self.batch_B))

    def make_sampler(self, envs: Envs, agent: Agent, seed: int) -> SerialSampler:
        return SerialSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps)


class SerialSampler(Sampler):
    """Shares the agent with the learner, so its data always come from the newest parameters."""

    def __init__(self, envs: Envs, agent: Agent, batch_T: int, seed: int = 0, decorrelation_steps: int = 0) -> None:
        self.envs = envs
        self.batch_spec = BatchSpec(batch_T, envs.n)
        self.backend = envs.backend
        self.rngs = [generator(seed, Role.NOISE, env) for env in range(envs.n)]
        self.collector = Collector(envs, agent, batch_T, self.rngs)
        self.collector.decorrelate(decorrelation_steps, generator(seed, Role.DECORRELATION))

    def collect(self) -> Samples:
        return self.collector.collect()

    def trajectories(self) -> list[Trajectory]:
        return self.collector.tracker.pop()

    def refresh(self, agent: Agent) -> None:
        """Nothing to do: the agent is shared."""

    def state_dict(self) -> dict[str, Any]:
        return {"noise": [rng.bit_generator.state for rng in self.rngs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for rng, saved in zip(self.rngs, state["noise"], strict=True):
            rng.bit_generator.state = saved

    def close(self) -> None:
        self.envs.close()
