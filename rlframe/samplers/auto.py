"""Which sampler: from the time of one environment's step and of the policy, by arithmetic; or by measuring them all."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import chz
import numpy as np
import psutil
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.seeding import Role, env_seeds, generators
from rlframe.envs import EnvConfig
from rlframe.envs.make import fixed_backend
from rlframe.rollout.env_pool import EnvPool, Job, Supervision
from rlframe.rollout.inference import Actor, block_of, empty_batch
from rlframe.rollout.stepper import time_steps
from rlframe.samplers import cpu, gpu, serial
from rlframe.samplers.base import Sampler, SamplerConfig, WorkersConfig

_ENV_BUDGET_S, _POLICY_BUDGET_S = 0.1, 0.05  # for timing the environment, twice, and each of a few numbers of rows
_HANDOVER_S = 15e-6  # to one worker and back (benchmarks/handover.py)
_WORTH = 1.25  # what another sampler must gain over the serial one, which is simpler to debug


@chz.chz
class Config(WorkersConfig):
    """serial, cpu or gpu, whichever promises most on this machine; all give the same samples."""


@dataclass(frozen=True)
class Costs:
    """Seconds, as measured here."""

    env_s: float  # a step of one environment on one thread
    policy_s: Mapping[int, float]  # acting for so many rows where training acts
    worker_policy_s: Mapping[int, float]  # the same in a worker: on the CPU, one thread

    def describe(self) -> str:
        rows = max(self.policy_s)
        policy = f"the policy {_readable(self.policy_s[rows])} for {rows}"
        return f"an environment's step takes {_readable(self.env_s)}, {policy}"


@dataclass(frozen=True)
class Machine:
    """What candidates may use."""

    n_workers: int
    n_cores: int
    env_threads: bool  # the serial sampler's environments step on threads of their own


@dataclass(frozen=True)
class Choice:
    """A sampler, and why."""

    config: SamplerConfig
    reason: str


def rows_of(config: Config, n_workers: int) -> tuple[int, ...]:
    """The numbers of rows that candidates act for."""
    B = config.batch_B
    return tuple(sorted({B, -(-B // 2), -(-B // n_workers)}))


def candidates(config: Config, n_workers: int) -> dict[str, SamplerConfig]:
    """The samplers that may be chosen, by a name for tables."""
    sizes = {name: getattr(config, name) for name in chz.chz_fields(SamplerConfig)}
    shared = {name: getattr(config, name) for name in chz.chz_fields(WorkersConfig)} | {"n_workers": n_workers}
    found: dict[str, SamplerConfig] = {"serial": serial.Config(**sizes)}
    if config.batch_B > 1:
        found[f"cpu, {n_workers} workers"] = cpu.Config(**shared)
        found[f"gpu, {n_workers} workers"] = gpu.Config(**shared)
    if n_workers > 1:
        found[f"gpu, {n_workers} workers in 2 groups"] = gpu.Config(**shared, n_groups=2)
    return found


def predict(config: SamplerConfig, costs: Costs, machine: Machine) -> float:
    """Seconds for one time step of all environments."""
    B, env_s = config.batch_B, costs.env_s
    if isinstance(config, serial.Config):
        threads = min(B, machine.n_cores) if machine.env_threads else 1
        return B * env_s / threads + costs.policy_s[B]
    columns = -(-B // machine.n_workers)
    step_s = columns * env_s * max(1.0, machine.n_workers / machine.n_cores)
    if isinstance(config, cpu.Config):
        return step_s + costs.worker_policy_s[columns] * max(1.0, machine.n_workers / machine.n_cores)
    assert isinstance(config, gpu.Config)
    handover_s = machine.n_workers * _HANDOVER_S
    if config.n_groups == 1:
        return step_s + costs.policy_s[B] + handover_s
    half_s = costs.policy_s[-(-B // 2)]
    work_s = B * env_s + 2 * half_s  # which the cores share
    return max(2 * half_s, half_s + step_s, work_s / machine.n_cores) + handover_s


def choose(config: Config, costs: Costs, machine: Machine) -> Choice:
    """The candidate that the arithmetic favours; the serial one unless another gains a quarter."""
    found = candidates(config, machine.n_workers)
    seconds = {name: predict(each, costs, machine) for name, each in found.items()}
    best = min(seconds, key=lambda name: seconds[name])
    chosen = best if seconds["serial"] > _WORTH * seconds[best] else "serial"
    others = ", ".join(f"{_readable(s)} with {name}" for name, s in seconds.items() if name != chosen)
    reason = f"{chosen}: {costs.describe()}, which makes {_readable(seconds[chosen])} a time step"
    return Choice(found[chosen], f"{reason} ({others})" if others else reason)


def _readable(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


class Probe:
    """Some environments in a process of its own, so that one that hangs or dies cannot take us along.

    It is spawned: the server of forks is for those who come after, and may be asked to load what they need.
    """

    def __init__(self, env: EnvConfig, n_all: int, n: int, timeout_s: float = 60.0) -> None:
        """Args:
            n_all: environments in the whole batch, which decide what steps them.    n: to make here.
        Raises:
            EnvError, ConfigError: they cannot be made.    WorkersFailed: the process dies of them, or they hang.
        """
        config = replace(env, backend=fixed_backend(env, n_all), n_threads=1)
        supervision = Supervision(timeout_s, start_method="spawn")
        self._workers = EnvPool(config, n, env_seeds(0, Role.ENV, n), 1, (), supervision)
        self.observation_space: Space = self._workers.observation_space
        self.action_space: Space = self._workers.action_space

    def step_s(self) -> float:
        """Seconds of a step of one environment on one thread, resets included, under random actions."""
        self._workers.run(Job(time_steps, (), ()))
        found = [self._workers.call(self._workers.workers[0], round(_ENV_BUDGET_S * 1e3)) for _ in range(2)]
        return found[-1] / self._workers.n  # the first steps of many environments are slow

    def memory_mb(self) -> float:
        """Resident memory of the process."""
        return psutil.Process(self._workers.workers[0].child.pid).memory_info().rss / 1e6

    def close(self) -> None:
        """End the process."""
        self._workers.close()


def policy_s(agent: Agent, probe: Probe, n: int) -> float:
    """Seconds of acting for `n` environments, where the agent is."""
    batch = empty_batch(probe.observation_space, probe.action_space, agent, 1, n)
    actor = Actor(agent, batch, 0, generators(0, Role.NOISE, n), True, block_of(n))
    actor.act(0)
    times: list[float] = []
    deadline = time.perf_counter() + _POLICY_BUDGET_S
    while time.perf_counter() < deadline or not times:
        start = time.perf_counter()
        actor.act(0)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure(probe: Probe, agent: Agent, rows: Sequence[int], threads: int) -> Costs:
    """Time the environment and the policy; about half a second."""
    env_s = probe.step_s()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        here = {n: policy_s(agent, probe, n) for n in rows}
        torch.set_num_threads(1)
        on_cpu = next(agent.parameters()).device.type == "cpu"
        local = agent if on_cpu else copy.deepcopy(agent).to("cpu")
        alone = here if on_cpu and threads == 1 else {n: policy_s(local, probe, n) for n in rows}
    finally:
        torch.set_num_threads(before)
    return Costs(env_s, here, alone)


def rate(make: Callable[[], Sampler], seconds: float) -> float:
    """Env steps a second that a sampler really makes."""
    with closing(make()) as sampler:
        sampler.collect()
        steps, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            steps += int(sampler.collect().valid.sum())
            sampler.trajectories()
        return steps / passed
