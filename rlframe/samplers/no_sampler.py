"""Samplers of learners without environments: NoSampler, of one rank of several (learners=), and NoSource."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import chz
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, make_envs
from rlframe.rollout.inference import empty_batch
from rlframe.samplers.base import SamplerConfig, Source, SourceAhead

_NO_BATCH = BatchSpec(0, 0)


@dataclass(frozen=True)
class Spaces:
    """What a learner needs to know of environments that are not open here; what a sampler's `make_envs` may return."""

    observation_space: Space
    action_space: Space
    env: EnvConfig
    backend: str = "none"  # how they are stepped, for the log

    def close(self) -> None:
        """Nothing is open."""


@chz.chz
class NoSamplerConfig(SamplerConfig):
    """The sizes are those of the batches of rank 0."""

    collects_ahead = True

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> Spaces:
        with closing(make_envs(env, 1, [seed])) as envs:
            return Spaces(envs.observation_space, envs.action_space, env)

    def make_sampler(self, envs: Spaces, agent: Agent, seed: int) -> NoSampler:
        return NoSampler(envs, agent, BatchSpec(self.batch_T, self.batch_B))


class NoSource(Source):
    """The sampler of a run that learns from data: it has no batches."""

    backend = "none"

    def __init__(self, batch_spec: BatchSpec = _NO_BATCH) -> None:
        """`batch_spec`: what an algorithm is told of batches; T is the length of sequences in data."""
        self.batch_spec = batch_spec

    def collect(self) -> Samples:
        raise RuntimeError("a run that learns from data collects no batches")

    def trajectories(self) -> list[Trajectory]:
        return []

    def refresh(self, agent: Agent) -> None:
        """Nobody acts."""

    def close(self) -> None:
        """Nothing is open."""


class NoSampler(NoSource, SourceAhead):
    """Its batches have no columns."""

    version = posted_version = 0
    n_ready = sys.maxsize  # always

    def __init__(self, envs: Spaces, agent: Agent, batch_spec: BatchSpec) -> None:
        super().__init__(batch_spec)
        self.env = envs.env
        batch = empty_batch(envs.observation_space, envs.action_space, agent, batch_spec.T, 1)
        self.samples = batch.columns(0, 0).samples()

    def collect(self) -> Samples:
        return self.samples

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        return []
