"""Collectors: several background samplers that never wait for one another; `runner.n_samplers=`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from rlframe.agents import Agent
from rlframe.core.reduction import over_samplers
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig
from rlframe.rollout.cpu_worker import parameters
from rlframe.samplers.background import CLOSE_S, SUPERVISION, BackgroundProcess, BackgroundSampler
from rlframe.samplers.base import SourceAhead
from rlframe.system.process import SLICE_S
from rlframe.system.service import Supervision
from rlframe.system.shared import make_shared_parameters, post_parameters

_LEAST_NAP_S, _LONGEST_NAP_S = 5e-5, 2e-3  # while no batch is ready
_LOOKS = 8  # without progress, at least, before a process counts as hung


class CollectorProcesses:
    """The BackgroundProcesses of Collectors, each with an equal part of the environments."""

    def __init__(
        self,
        config: Any,
        env: EnvConfig,
        seed: int,
        n: int,
        cpus: Sequence[int] = (),
        worker_cpus: Sequence[Sequence[int]] = (),
        n_threads: int = 1,
        supervision: Supervision | None = None,
    ) -> None:
        """Start them one after the other; arguments as of BackgroundProcess, for all together.

        Raises:
            ConfigError: the environments or workers cannot be divided by n, and as BackgroundProcess.
        """
        self.config, self.env, self.seed = config, env, seed
        watched = supervision or SUPERVISION
        part = config.divided(n, "runner.n_samplers")
        w = part.worker_count()
        self.processes: list[BackgroundProcess] = []
        with ExitStack() as opened:
            for i in range(n):
                own = replace(watched, name=f"{watched.name} {i}")
                where = cpus[i * len(cpus) // n : (i + 1) * len(cpus) // n] if len(cpus) >= n else cpus
                of_workers = worker_cpus[i * w : (i + 1) * w]
                made = BackgroundProcess(part, env, seed, where, of_workers, max(1, n_threads // n), own, (i, n))
                opened.callback(made.close)
                self.processes.append(made)
            opened.pop_all()
        self.observation_space, self.action_space = made.observation_space, made.action_space

    def close(self) -> None:
        """Stop them all, and kill those that do not end within CLOSE_S. May be called twice."""
        deadline = time.monotonic() + CLOSE_S
        with ExitStack() as closing:
            for process in self.processes:
                closing.callback(lambda own=process: own.close(max(0.0, deadline - time.monotonic())))
                process.stop()  # all at once, so that they end side by side


class Collectors(SourceAhead):
    """Returns the batches of several BackgroundSamplers as they are ready, in turn if several are.

    Each acts for its own environments, with the newest parameters at the start of a batch, and waits for nobody else.
    A batch has the environments of one sampler, in a stream of its own. Environments have the numbers, and so the seeds
    and levels of exploration, that they have in one sampler of all.
    """

    def __init__(
        self, processes: CollectorProcesses, agent: Agent, n_slots: int = 2, devices: Sequence[str] = ("cpu",)
    ) -> None:
        """The ring of each has `n_slots` batches, and they act on `devices` in turn."""
        self._processes = processes
        self.config, self.env, self.seed = processes.config, processes.env, processes.seed
        self._board = make_shared_parameters(parameters(agent))
        self.samplers = [
            BackgroundSampler(process, agent, n_slots, devices[i % len(devices)], self._board)
            for i, process in enumerate(processes.processes)
        ]
        T, B, _ = self.samplers[0].batch_spec
        self.batch_spec = BatchSpec(T, B, len(self.samplers))
        self.backend = f"{processes.processes[0].backend}, in each of {len(self.samplers)} background processes"
        self.version = self.posted_version = self.samplers[0].posted_version
        self._last = -1  # the sampler whose batch came last
        self._watched_at = self._counted_at = time.monotonic()
        self._env_steps = np.zeros(len(self.samplers))  # of each since they were counted

    @property
    def n_ready(self) -> int:
        return sum(sampler.n_ready for sampler in self.samplers)

    def collect(self) -> Samples:
        """The next batch of the next sampler in turn that has one, valid until the next `collect`."""
        while not self.wait():
            pass
        n = len(self.samplers)
        self._last = i = next(i for k in range(1, n + 1) if self.samplers[i := (self._last + k) % n].n_ready)
        samples = self.samplers[i].collect()
        self.version = self.samplers[i].version
        self._env_steps[i] += samples.n_env_steps
        return replace(samples, stream=i)

    def wait(self) -> bool:
        for sampler in self.samplers:
            sampler.start()
        nap_s, slept_s = _LEAST_NAP_S, 0.0
        while not self.n_ready:
            time.sleep(nap_s)
            nap_s, slept_s = min(1.2 * nap_s, _LONGEST_NAP_S), slept_s + nap_s
            if slept_s > SLICE_S:
                self.check()
                return self.n_ready > 0
        return True

    def check(self) -> None:
        """Replace those that have died, or that have hung while others had batches; raises as `collect`."""
        now = time.monotonic()
        waited_s, self._watched_at = now - self._watched_at, now
        for sampler in self.samplers:
            most_s = sampler.process.supervision.timeout_s / _LOOKS  # a suspended machine is no hung process
            sampler.check(min(waited_s, most_s))

    def trajectories(self) -> list[Trajectory]:
        found = [(i * self.batch_spec.B, each.trajectories()) for i, each in enumerate(self.samplers)]
        return [replace(each, env=first + each.env) for first, own in found for each in own]

    def refresh(self, agent: Agent) -> None:
        """All act with these parameters from the next batch on that they start."""
        self.posted_version = post_parameters(self._board.tree, parameters(agent))

    def made_with(self) -> dict[str, Any]:
        return {"n_samplers": len(self.samplers), **self.samplers[0].made_with()}

    def counters(self) -> dict[str, float]:
        """Those of the samplers as one, and the env steps a second that came from each."""
        now = time.monotonic()
        rates, self._counted_at = self._env_steps / max(now - self._counted_at, 1e-9), now
        self._env_steps = 0 * self._env_steps
        totals = over_samplers([sampler.counters() for sampler in self.samplers])
        return totals | {f"async/env_steps_per_second_{i}": float(rate) for i, rate in enumerate(rates)}

    def state_dict(self) -> dict[str, Any]:
        """As of one BackgroundSampler of all environments."""
        return {"noise": [state for sampler in self.samplers for state in sampler.state_dict()["noise"]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        noise, B = state["noise"], self.batch_spec.B
        if len(noise) != self.batch_spec.n_envs:
            raise ValueError(f"the saved state is of {len(noise)} environments, not of {self.batch_spec.n_envs}")
        parts = [noise[first : first + B] for first in range(0, len(noise), B)]
        loaded = [each.load_state_dict({"noise": part}) for each, part in zip(self.samplers, parts, strict=True)]
        return [reason for own in loaded for reason in own]

    def close(self) -> None:
        for sampler in self.samplers:
            sampler.release()
        self._processes.close()
