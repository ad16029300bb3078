"""sampler=auto: serial, cpu or gpu is chosen from the measured time of environment and policy."""

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
from rlframe.kernels.device import restoring_threads
from rlframe.rollout.inference import BatchInference, block_size, empty_batch
from rlframe.rollout.stepper import make_timing_handler
from rlframe.rollout.worker_pool import WorkerPool, WorkerTask
from rlframe.samplers import cpu, gpu, serial
from rlframe.samplers.base import Sampler, SamplerConfig, WorkersConfig
from rlframe.system.service import Supervision

_ENV_BUDGET_S, _POLICY_BUDGET_S = 0.1, 0.05  # seconds for each timing
_HANDOVER_S = 15e-6  # to one worker and back (benchmarks/handover.py)
_MIN_SPEEDUP = 1.25  # over the serial sampler, which is simpler to debug
_CONTENTION = 2.0  # PPO, A2C and IMPALA on Pong with two threads on two cores: 1.6 to 2.2


@chz.chz
class Config(WorkersConfig):
    """serial, cpu or gpu, whichever is predicted to be fastest on this machine; all give the same samples."""

    undecided = True


@dataclass(frozen=True)
class Costs:
    """Measured seconds."""

    env_s: float  # a step of one environment on one thread
    policy_s: Mapping[int, float]  # acting for this number of rows on the agent's device
    worker_policy_s: Mapping[int, float]  # the same in a worker: on the CPU with one thread


@dataclass(frozen=True)
class Machine:
    """What a sampler may use."""

    n_workers: int
    n_cores: int
    env_threads: bool  # the serial sampler's environments step on their own threads
    torch_threads: int = 1  # that act on the CPU, if a GPU does not


@dataclass(frozen=True)
class SamplerChoice:
    """A sampler and the reason for it."""

    config: SamplerConfig
    reason: str


def batch_sizes(config: Config, n_workers: int) -> tuple[int, ...]:
    """The numbers of environments that the candidates act for at once."""
    B = config.batch_B
    return tuple(sorted({B, -(-B // 2), -(-B // n_workers)}))


def candidates(config: Config, n_workers: int) -> dict[str, SamplerConfig]:
    """The samplers to choose from, by a descriptive name."""
    sizes = {name: getattr(config, name) for name in chz.chz_fields(SamplerConfig)}
    shared = {name: getattr(config, name) for name in chz.chz_fields(WorkersConfig)} | {"n_workers": n_workers}
    found: dict[str, SamplerConfig] = {"serial": serial.Config(**sizes)}
    if config.batch_B > 1:
        found[f"cpu, {n_workers} workers"] = cpu.Config(**shared)
        found[f"gpu, {n_workers} workers"] = gpu.Config(**shared)
    if n_workers > 1:
        found[f"gpu, {n_workers} workers in 2 groups"] = gpu.Config(**shared, n_groups=2)
    return found


def for_episodes(config: Config, n_workers: int) -> SamplerChoice:
    """The sampler of workers that play whole episodes, and so do not wait for each other."""
    found = candidates(config, n_workers)
    if n_workers == 1:
        return SamplerChoice(found["serial"], "serial: there is one core, or one environment")
    return SamplerChoice(found[f"cpu, {n_workers} workers"], f"cpu, {n_workers} workers: each plays whole episodes")


def predict(config: SamplerConfig, costs: Costs, machine: Machine) -> float:
    """Predicted seconds for one time step of all environments.

    Torch's threads gain nothing in acting while workers or environments' threads use the same cores.
    """
    B, env_s, several = config.batch_B, costs.env_s, machine.torch_threads > 1
    policy_s = costs.worker_policy_s if several else costs.policy_s
    if isinstance(config, serial.Config):
        if not machine.env_threads:
            return B * env_s + costs.policy_s[B]
        return B * env_s / min(B, machine.n_cores) + policy_s[B]
    columns = -(-B // machine.n_workers)
    step_s = columns * env_s * max(1.0, machine.n_workers / machine.n_cores)
    if isinstance(config, cpu.Config):
        return step_s + costs.worker_policy_s[columns] * max(1.0, machine.n_workers / machine.n_cores)
    assert isinstance(config, gpu.Config)
    handover_s = machine.n_workers * _HANDOVER_S
    if config.n_groups == 1:
        return step_s + policy_s[B] + handover_s
    # While one group steps, threads that act for the other wait for each other at every operation.
    half_s = policy_s[-(-B // 2)] * (_CONTENTION if several else 1.0)
    work_s = B * env_s + 2 * half_s  # shared by the cores
    return max(2 * half_s, half_s + step_s, work_s / machine.n_cores) + handover_s


def choose(config: Config, costs: Costs, machine: Machine) -> SamplerChoice:
    """The candidate with the shortest predicted time; serial in one thread unless another is at least 25 % faster."""
    found = candidates(config, machine.n_workers)
    seconds = {name: predict(each, costs, machine) for name, each in found.items()}
    best = min(seconds, key=lambda name: seconds[name])
    least = 1.0 if machine.env_threads else _MIN_SPEEDUP
    chosen = best if seconds["serial"] > least * seconds[best] else "serial"
    others = ", ".join(f"{_readable(s)} with {name}" for name, s in seconds.items() if name != chosen)
    step, policy, B = _readable(costs.env_s), _readable(costs.policy_s[config.batch_B]), config.batch_B
    reason = f"{chosen}: an environment's step takes {step}, the policy {policy} for {B}, "
    reason += f"so a time step takes {_readable(seconds[chosen])}"
    return SamplerChoice(found[chosen], f"{reason} ({others})" if others else reason)


def _readable(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


class TimingProcess:
    """Times some environments in a child process, so that this process survives if one hangs or dies."""

    def __init__(self, env: EnvConfig, n_all: int, n: int, timeout_s: float = 60.0) -> None:
        """Make n environments, with the backend of a batch of `n_all`.

        Raises EnvError or ConfigError if they cannot be made, WorkersFailed if the process dies or hangs.
        """
        config = replace(env, backend=fixed_backend(env, n_all), n_threads=1)
        # Spawn, because a forkserver would be started without the modules that the run preloads.
        supervision = Supervision(timeout_s, start_method="spawn")
        self._pool = WorkerPool(config, n, env_seeds(0, Role.ENV, n), 1, (), supervision)
        self.observation_space: Space = self._pool.observation_space
        self.action_space: Space = self._pool.action_space

    def step_s(self) -> float:
        """Seconds that one environment takes for a step on one thread, resets included, with random actions."""
        self._pool.assign(WorkerTask(make_timing_handler, (), ()))
        found = [self._pool.call(self._pool.workers[0], round(_ENV_BUDGET_S * 1e3)) for _ in range(2)]
        return found[-1] / self._pool.n  # ignores the first timing: the first steps are slow

    def memory_mb(self) -> float:
        """Resident memory of the process."""
        return psutil.Process(self._pool.workers[0].child.pid).memory_info().rss / 1e6

    def close(self) -> None:
        self._pool.close()


def policy_s(agent: Agent, process: TimingProcess, n: int) -> float:
    """Median seconds to act for `n` environments on the agent's device."""
    batch = empty_batch(process.observation_space, process.action_space, agent, 1, n)
    inference = BatchInference(agent, batch, 0, generators(0, Role.NOISE, n), True, block_size(n))
    inference.act(0)
    times: list[float] = []
    deadline = time.perf_counter() + _POLICY_BUDGET_S
    while time.perf_counter() < deadline or not times:
        start = time.perf_counter()
        inference.act(0)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@restoring_threads()
def measure(process: TimingProcess, agent: Agent, rows: Sequence[int], threads: int) -> Costs:
    """Time the environment and the policy; takes about half a second."""
    env_s = process.step_s()
    torch.set_num_threads(threads)
    here = {n: policy_s(agent, process, n) for n in rows}
    torch.set_num_threads(1)
    on_cpu = next(agent.parameters()).device.type == "cpu"
    local = agent if on_cpu else copy.deepcopy(agent).to("cpu")
    alone = here if on_cpu and threads == 1 else {n: policy_s(local, process, n) for n in rows}
    return Costs(env_s, here, alone)


def rate(make: Callable[[], Sampler], seconds: float) -> float:
    """The env steps per second that a sampler reaches."""
    with closing(make()) as sampler:
        sampler.collect()
        steps, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            steps += sampler.collect().n_env_steps
            sampler.trajectories()
        return steps / passed
