"""rlframe's samplers, as training uses them: refresh, collect, fetch the finished episodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.parts.synthetic import STEP_S, Burning, burn, turns
from benchmarks.parts.turns import Unit
from rlframe.agents import Agent, make_policy_agent
from rlframe.agents.policy import PolicyInfo
from rlframe.algos.on_policy import values
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, AgentStep
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.ops.returns import generalized_advantage
from rlframe.samplers import gpu, serial
from rlframe.samplers.base import Source, WorkersConfig

SomeConfig = Any  # serial.Config | cpu.Config | gpu.Config, whose `make_envs` and `make_sampler` fit together


def worker_cpus(n_workers: int) -> list[list[int]]:
    """One core for each worker, of those that this process may use; empty if the system cannot pin."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return [[cores[i % len(cores)]] for i in range(n_workers)] if cores else []


def sampling(config: SomeConfig, env: EnvConfig, model: ModelConfig, stack: ExitStack) -> Unit:
    """Collect batches; counts valid rows only."""
    envs = config.make_envs(env, 0, worker_cpus(config.n_workers) if isinstance(config, WorkersConfig) else [])
    stack.callback(envs.close)
    agent = make_policy_agent(envs.observation_space, envs.action_space, model)
    return batches(config.make_sampler(envs, agent, 0), agent)


def batches(source: Source, agent: Agent) -> Unit:
    """Send the parameters and take a batch; counts valid rows only."""

    def unit() -> int:
        source.refresh(agent)
        samples = source.collect()
        source.trajectories()
        return int(samples.valid.sum())

    return unit


def with_advantages(n: int, backend: str, T: int, stack: ExitStack) -> Unit:
    """Collect a batch of CartPole, then bootstrap value and advantages; counts valid rows."""
    config = serial.Config(batch_T=T, batch_B=n)
    envs = config.make_envs(EnvConfig("CartPole-v1", backend=backend), 0, ())
    agent = make_policy_agent(envs.observation_space, envs.action_space, ModelConfig())
    sampler = stack.enter_context(closing(config.make_sampler(envs, agent, 0)))

    def unit() -> int:
        samples = sampler.collect()
        sampler.trajectories()
        ends = (samples.terminated, samples.truncated, samples.valid)
        generalized_advantage(samples.reward, values(agent, samples), *ends, 0.99, 0.95)
        return int(samples.valid.sum())

    return unit


class BurningAgent(Agent):
    """Acting takes as long for a row as a step of `Burning`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.n_turns = turns(STEP_S)

    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        n = len(inputs.first)
        burn(n * self.n_turns)
        return AgentStep(torch.zeros(n, dtype=torch.int64), PolicyInfo(torch.zeros(n), torch.zeros(n)), state)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return ()

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return ()


def alternating(config: gpu.Config, stack: ExitStack) -> Unit:
    """Acting on the first core and all workers on the last, so that neither waits for the other's core."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])
        cpus = [cores[-1:]] * config.n_workers
    else:
        cpus = []
    envs = config.make_envs(EnvConfig(Burning), 0, cpus)
    stack.callback(envs.close)
    agent = BurningAgent()
    return batches(config.make_sampler(envs, agent, 0), agent)
