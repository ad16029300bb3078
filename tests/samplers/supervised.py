"""Samplers with workers, for the tests of deaths, hangs and leaks; nothing of them may be left."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlframe.agents import PolicyAgent
from rlframe.core.types import Samples
from rlframe.envs import EnvConfig
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import CpuSampler, GpuSampler, Sampler
from rlframe.system.service import Supervision
from tests.processes import is_running, until
from tests.samplers.faulty import Coded
from tests.samplers.made import agent_for, copied

SLOW = pytest.mark.slow
KINDS = ["cpu", "gpu", "alternating"]
SEEDS = [11, 12, 13, 14]
FAULTY_SEED = 13  # the seed of the first environment of worker 1


def supervision(timeout_s: float = 30.0, max_restarts: int = 100, method: str = "forkserver") -> Supervision:
    """With a timeout that is long enough for a busy machine."""
    return Supervision(timeout_s, max_restarts, method)


@contextmanager
def workers_for(env: Any, kwargs: dict[str, Any], n_workers: int = 2, **how: Any) -> Iterator[WorkerPool]:
    """Four environments in worker processes, of which nothing is left at the end."""
    envs = WorkerPool(EnvConfig(env, kwargs, "python"), 4, SEEDS, n_workers, (), supervision(**how))
    try:
        yield envs
    finally:
        envs.close()
        until(lambda: not any(is_running(worker.child.pid) for worker in envs.workers))


@contextmanager
def sampler_for(
    kind: str, env: Any = Coded, kwargs: Any = None, T: int = 8, steps_before: int = 0, model: Any = None, **how: Any
) -> Iterator[Sampler]:
    """A sampler of one of KINDS with four environments; `how`: arguments of `supervision`, and n_workers (2)."""
    with workers_for(env, kwargs or {}, **how) as envs:
        agent = agent_for(envs.observation_space, envs.action_space, 0, **(model or {}))
        sampler: Sampler
        if kind == "cpu":
            sampler = CpuSampler(envs, agent, T, 0, steps_before)
        else:
            sampler = GpuSampler(envs, agent, T, 0, steps_before, 2 if kind == "alternating" else 1)
        yield sampler
        sampler.close()


def agent_of(sampler: Any, model: dict[str, Any]) -> PolicyAgent:
    """An agent with the same parameters as the sampler's."""
    return agent_for(sampler.envs.observation_space, sampler.envs.action_space, 0, **model)


def collected(sampler: Sampler, n_batches: int) -> list[Samples]:
    """Consecutive batches."""
    return [copied(sampler.collect()) for _ in range(n_batches)]


def restarts(sampler: Sampler) -> int:
    """The number of processes replaced so far."""
    return int(sampler.counters()["sampler/restarts"])


def warnings_of(caplog: Any) -> list[str]:
    """The warnings in the log."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
