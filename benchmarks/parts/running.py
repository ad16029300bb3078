"""rlframe's runners on work of a known cost: iterations of training, without logs and evaluations."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.parts.ours import SomeConfig, worker_cpus
from benchmarks.parts.synthetic import STEP_S, Burning, burn, turns, uneven
from benchmarks.parts.turns import Make, Unit
from rlframe.agents import Agent, make_policy_agent
from rlframe.algos import Algorithm, impala
from rlframe.algos.base import UpdateMetrics
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import EnvConfig
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.runners import AsyncRl, AsyncRlConfig, Learner, MinibatchRl, Runner, RunnerConfig
from rlframe.samplers import BackgroundProcess, BackgroundSampler
from rlframe.samplers.base import WorkersConfig
from rlframe.samplers.collectors import CollectorProcesses, Collectors
from rlframe.updates.progress import Progress

UNEVEN = EnvConfig(uneven)
ENV, MODEL, N_STEPS = EnvConfig(Burning), ModelConfig(hidden=(64, 64)), 10**9  # more than any turn needs


class Studying(Algorithm):
    """An algorithm that learns nothing, and takes as long as a step of `Burning` for each row."""

    def __init__(self, batch_spec: BatchSpec) -> None:
        self.progress, self.n_turns, self.due = Progress(), turns(STEP_S) * batch_spec.size, 0

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.due = 1

    def updates_due(self) -> int:
        return self.due

    def update(self) -> UpdateMetrics:
        burn(self.n_turns)
        self.due = 0
        self.progress.updates += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


def studying(agent: Agent, batch_spec: BatchSpec) -> Algorithm:
    return Studying(batch_spec)


def impala_of(agent: Any, batch_spec: BatchSpec) -> Algorithm:
    return impala.Config().make_algorithm(agent, batch_spec, N_STEPS, 0)


def in_turn(config: SomeConfig, algo: Any, stack: ExitStack) -> Unit:
    """MinibatchRl on all cores, with one core for each worker."""
    envs = config.make_envs(ENV, 0, worker_cpus(config.n_workers) if isinstance(config, WorkersConfig) else [])
    stack.callback(envs.close)
    agent = make_policy_agent(envs.observation_space, envs.action_space, MODEL)
    sampler = config.make_sampler(envs, agent, 0)
    return _unit(MinibatchRl(sampler, Learner(agent, algo(agent, sampler.batch_spec)), RunnerConfig(n_steps=N_STEPS)))


def side_by_side(config: SomeConfig, algo: Any, stack: ExitStack, n_samplers: int = 1, env: EnvConfig = ENV) -> Unit:
    """AsyncRl: the learner on the first core, the samplers on the last."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    where = cores[-1:], [cores[-1:]] * config.worker_count() if cores else ()
    if cores:
        os.sched_setaffinity(0, cores[:1])
    process: Any = CollectorProcesses(config, env, 0, n_samplers, *where) if n_samplers > 1 else None
    process = process or BackgroundProcess(config, env, 0, *where)
    stack.callback(process.close)
    agent = make_policy_agent(process.observation_space, process.action_space, MODEL)
    sampler: Any = Collectors(process, agent) if n_samplers > 1 else BackgroundSampler(process, agent)
    evaluator = Evaluator(ENV, agent, EvalConfig(n_envs=1, n_episodes=1, n_workers=0))  # which nobody asks
    options = AsyncRlConfig(n_steps=N_STEPS, log_interval_steps=N_STEPS)
    return _unit(AsyncRl(sampler, Learner(agent, algo(agent, sampler.batch_spec)), options, evaluator))


def loop(stack: ExitStack) -> Unit:
    """The work of a step and of learning from it, without anything else."""

    def unit() -> int:
        burn(2 * turns(STEP_S))
        return 1

    return unit


def _unit(runner: Runner) -> Unit:
    runner.refresh()

    def unit() -> int:
        before = runner.env_steps
        runner.iterate()
        return runner.env_steps - before

    return unit


def make_in_turn(config: SomeConfig, algo: Any = studying) -> Make:
    return partial(in_turn, config, algo)


def make_side_by_side(config: SomeConfig, algo: Any = studying, n_samplers: int = 1, env: EnvConfig = ENV) -> Make:
    return partial(side_by_side, config, algo, n_samplers=n_samplers, env=env)
