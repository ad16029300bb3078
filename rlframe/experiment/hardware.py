"""What depends on the machine: affinity, sampler, workers, torch threads, and the processes that follow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import chz
import psutil
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.ranks import Ranks
from rlframe.core.struct import leaves
from rlframe.envs.make import can_split, steps_on_threads
from rlframe.experiment.build import choose_device, make_agent, torch_threads
from rlframe.experiment.config import Experiment
from rlframe.kernels.precision import choose_precision, learning_in
from rlframe.rollout.env_pool import split
from rlframe.rollout.inference import empty_batch
from rlframe.runners import async_rl, sync_rl
from rlframe.samplers import auto, cpu, serial
from rlframe.samplers.base import Sampler, WorkersConfig
from rlframe.system.affinity import Affinity, affinity_share, plan, read_topology
from rlframe.system.distributed import TIMEOUT_S, RankInfo, join
from rlframe.system.supervision import Supervision

_ROUNDS = 3  # of one measurement with each number of threads
_LEAST_S = 0.1  # of a measurement
_WARM_ROUNDS = 1  # which is not counted: memory is touched first, and kernels are made
_REPLAY_ROWS = 20_000  # of the trial's replay: drawing takes as long as from many more


def fastest_threads(experiment: Experiment, affinity: Affinity) -> tuple[int, str]:
    """A number of threads from 1 to the cores at hand, by powers of two, and why. Nothing of the trial is kept.

    Raises:
        ConfigError: environment, model and algorithm do not fit together.
    """
    numbers = [2**k for k in range(affinity.threads.bit_length()) if 2**k <= affinity.threads]
    if len(numbers) == 1:
        return 1, "threads: 1, there is one core to compute with"
    seconds: dict[int, list[float]] = {n: [] for n in numbers}
    with ExitStack() as stack:
        trial = stack.enter_context(closing(_Trial(experiment, affinity)))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        for round_ in range(_WARM_ROUNDS + _ROUNDS):
            for n in numbers:
                torch.set_num_threads(n)
                taken = trial.seconds_a_step()
                if round_ >= _WARM_ROUNDS:
                    seconds[n].append(taken)
    medians = {n: statistics.median(found) for n, found in seconds.items()}
    best = min(medians, key=lambda n: medians[n])
    told = ", ".join(f"{1e6 * s:.3g} us with {pluralize(n, 'thread')}" for n, s in medians.items())
    return best, f"threads: {best}, an env_step and what is learned from it takes {told}"


class _Trial:
    """Sampling and learning as the experiment does, in this process, from the first step on."""

    def __init__(self, experiment: Experiment, affinity: Affinity) -> None:
        T, B = experiment.sampler.batch_T, experiment.sampler.batch_B
        config = serial.Config(batch_T=T, batch_B=B)
        device = choose_device(experiment.device, affinity.gpus)
        self.precision = experiment.precision
        envs = config.make_envs(experiment.env_config(), experiment.seed, ())
        try:
            agent = make_agent(chz.replace(experiment, init=""), envs.observation_space, envs.action_space, device)
            self.sampler = config.make_sampler(envs, agent, experiment.seed)
            algo = _learning_at_once(experiment.algo)
            self.algo = algo.make_algorithm(agent, self.sampler.batch_spec, experiment.runner.n_steps, experiment.seed)
        except BaseException:
            envs.close()
            raise

    def seconds_a_step(self) -> float:
        """One measurement: of batches and their updates, or of one batch and some of the many that it calls for."""
        progress, spent = self.algo.progress, 0.0
        before = progress.env_steps
        with learning_in(self.precision):
            while spent < _LEAST_S or progress.env_steps == before:
                spent += _timed(self._batch)
                due, made, learning = self.algo.updates_due(), 0, 0.0
                while self.algo.updates_due() and learning < _LEAST_S:
                    learning += _timed(self.algo.update)
                    made += 1
                spent += learning * due / max(made, 1)
                if made < due:
                    self.algo.drop_updates()
        return spent / (progress.env_steps - before)

    def _batch(self) -> None:
        self.algo.prefetch()
        self.algo.receive(self.sampler.collect())

    def close(self) -> None:
        """Close the environments."""
        self.sampler.close()


def _timed(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _learning_at_once(algo: Any) -> Any:
    """The algorithm's config with a small replay from which it learns from the first batch on, if it has one."""
    fields = chz.chz_fields(type(algo))
    changes: dict[str, Any] = {"learn_from": 0} if "learn_from" in fields else {}
    if "replay" in fields:
        changes["replay"] = chz.replace(algo.replay, size=min(algo.replay.size, _REPLAY_ROWS))
    return chz.replace(algo, **changes)


_TUNE_S = 2.0  # that each candidate samples for
_TORCH_BYTES = 200e6  # that a process which acts needs beyond one that only steps


@dataclass(frozen=True)
class Settled:
    """An experiment that says what the machine will do, and the part of the machine that it gets."""

    experiment: Experiment
    affinity: Affinity
    notes: tuple[str, ...]


def settle(experiment: Experiment, tune: bool = False, local_rank: int = 0, local_world_size: int = 1) -> Settled:
    """Replace every `auto` that the hardware decides. `tune` chooses the sampler by measuring all candidates.

    The part of the machine is that of one of the ranks that the run has here.

    Raises:
        ConfigError: the affinity does not fit the machine, or the environment cannot be made.
    """
    affinity = affinity_of(experiment, local_rank, local_world_size)
    device = choose_device(experiment.device, affinity.gpus)
    experiment = chz.replace(experiment, precision=choose_precision(experiment.precision, device))
    n_workers = min(len(affinity.workers), experiment.sampler.batch_B)
    notes: tuple[str, ...] = ()
    if isinstance(experiment.sampler, auto.Config):
        choice = _choose(experiment, affinity, n_workers, tune)
        experiment, notes = chz.replace(experiment, sampler=choice.config), (f"sampler: {choice.reason}",)
    elif tune:
        raise ConfigError("tune_sampler=true measures the samplers that sampler=auto chooses from; leave out sampler=")
    if isinstance(experiment.sampler, WorkersConfig):
        experiment = chz.replace(experiment, sampler=chz.replace(experiment.sampler, n_workers=n_workers))
        affinity = replace(affinity, workers=affinity.workers[:n_workers])
    else:
        n_workers = 0
        affinity = replace(affinity, workers=())
    if experiment.eval.n_workers == AUTO:
        experiment = chz.replace(experiment, eval=chz.replace(experiment.eval, n_workers=n_workers))
    if experiment.threads == AUTO:
        threads, reason = fastest_threads(experiment, affinity)
        experiment, notes = chz.replace(experiment, threads=threads), (*notes, reason)
    return Settled(experiment, affinity, notes)


def _learner_cores(experiment: Experiment, affinity: Affinity) -> int:
    """Cores for the process that learns while another samples: a GPU keeps one busy, the rest steps environments."""
    on_gpu = choose_device(experiment.device, affinity.gpus).type == "cuda"
    return experiment.runner.learner_cores or (1 if on_gpu else max(1, affinity.threads // 2))


def affinity_of(experiment: Experiment, local_rank: int, local_world_size: int) -> Affinity:
    """The part of the machine for one of the ranks that a run has on it.

    Raises:
        ConfigError: the affinity does not fit the machine, or the ranks do not fit the affinity.
    """
    topology = read_topology()
    n_workers = max(0, _n_workers(experiment.sampler))  # AUTO is negative
    affinity = plan(experiment.affinity, topology, n_workers)
    if isinstance(experiment.runner, async_rl.Config):
        return plan(experiment.affinity, topology, n_workers, learner_cores=_learner_cores(experiment, affinity))
    return affinity_share(affinity, topology, n_workers, local_rank, local_world_size)


def joined(settled: Settled, place: RankInfo) -> AbstractContextManager[Ranks]:
    """The meeting of a run's ranks: on their GPUs, where each has one of its own.

    Raises:
        RankLost: the others do not come.
    """
    runner, device = settled.experiment.runner, settled.experiment.device
    timeout_s = runner.timeout_s if isinstance(runner, sync_rl.Config) else TIMEOUT_S
    own = device == "auto" and torch.cuda.device_count() >= place.local_world_size
    return join(place, timeout_s, choose_device(device, settled.affinity.gpus) if own else torch.device("cpu"))


def _n_workers(config: Any) -> int:
    return config.n_workers if isinstance(config, WorkersConfig) else 0


def _choose(experiment: Experiment, affinity: Affinity, n_workers: int, tune: bool) -> auto.Choice:
    config: auto.Config = experiment.sampler
    env = experiment.env_config()
    only_serial = auto.candidates(config, n_workers)["serial"]
    if config.batch_B == 1:
        return auto.Choice(only_serial, "serial: there is one environment")
    if not can_split(env, config.batch_B):
        return auto.Choice(only_serial, "serial: its vector environment steps all in one call, and cannot be split")
    with closing(auto.TimingProcess(env, config.batch_B, -(-config.batch_B // n_workers), config.timeout_s)) as probe:
        agent = _agent(experiment, affinity, probe.observation_space, probe.action_space)
        threads = torch_threads(experiment, affinity, probe.observation_space)
        if tune:
            return _tuned(experiment, affinity, n_workers, agent)
        costs = auto.measure(probe, agent, auto.batch_sizes(config, n_workers), threads)
    machine = auto.Machine(
        n_workers, affinity.sampler_threads or affinity.threads, steps_on_threads(env, config.batch_B)
    )
    return auto.choose(config, costs, machine)


def _agent(experiment: Experiment, affinity: Affinity, observation_space: Space, action_space: Space) -> Agent:
    device = choose_device(experiment.device, affinity.gpus)
    return make_agent(chz.replace(experiment, init=""), observation_space, action_space, device)


def _tuned(experiment: Experiment, affinity: Affinity, n_workers: int, agent: Agent) -> auto.Choice:
    """Let every candidate sample for real, and take the fastest."""
    config, rates = experiment.sampler, {}
    found = auto.candidates(config, n_workers)
    print(f"{'sampler':<28} {'env_steps/s':>12}")
    for name, candidate in found.items():
        rates[name] = auto.rate(_sampler_maker(experiment, candidate, affinity, agent), _TUNE_S)
        print(f"{name:<28} {rates[name]:>12,.0f}")
    best = max(rates, key=lambda name: rates[name])
    return auto.Choice(found[best], f"{best}: the fastest of {len(rates)} that were measured")


def _sampler_maker(experiment: Experiment, candidate: Any, affinity: Affinity, agent: Agent) -> Callable[[], Sampler]:
    def make() -> Sampler:
        cpus = affinity.workers[: _n_workers(candidate)]
        envs = candidate.make_envs(experiment.env_config(), experiment.seed, cpus)
        try:
            torch.set_num_threads(torch_threads(experiment, affinity, envs.observation_space))
            return candidate.make_sampler(envs, agent, experiment.seed)
        except BaseException:
            envs.close()
            raise

    return make


def describe_processes(settled: Settled) -> str:
    """Who runs where, with how many threads and how much memory: what `dry_run=true` prints. Starts one environment."""
    experiment, affinity, config = settled.experiment, settled.affinity, settled.experiment.sampler
    timeout_s = config.timeout_s if isinstance(config, WorkersConfig) else Supervision.timeout_s
    with closing(auto.TimingProcess(experiment.env_config(), config.batch_B, 1, timeout_s)) as probe:
        agent = _agent(experiment, affinity, probe.observation_space, probe.action_space)
        threads = torch_threads(experiment, affinity, probe.observation_space)
        batch = empty_batch(probe.observation_space, probe.action_space, agent, config.batch_T, config.batch_B)
        worker_mb = probe.memory_mb()
    batch_bytes = sum(array.nbytes for array in leaves(batch))
    device = next(agent.parameters()).device
    n_eval_envs = min(experiment.eval.n_envs, experiment.eval.n_episodes)
    n_workers, n_eval = _n_workers(config), max(0, min(experiment.eval.n_workers, n_eval_envs))
    acts = not isinstance(config, cpu.Config)
    apart = isinstance(experiment.runner, async_rl.Config)
    sampling = "steps and acts" if not n_workers else "acts" if acts else "follows its workers"
    work = "learns" if apart or not acts else "acts and learns" if n_workers else "steps, acts and learns"
    lines = [*settled.notes, affinity.describe(), "processes:"]
    of_torch = pluralize(threads, "torch thread")
    lines.append(f"  main          {work} on {device}, {of_torch}; a batch of {_size(batch_bytes)}")
    if apart:
        lines.append(f"  sampler       {sampling}; {pluralize(experiment.runner.n_slots, 'slot')} for batches")
        batch_bytes *= experiment.runner.n_slots + 1
    for index, (lo, hi) in enumerate(split(config.batch_B, n_workers) if n_workers else ()):
        does = "steps" if acts else "acts and steps"
        lines.append(f"  worker {index:<6} {does} environments {lo} to {hi - 1}; 1 thread")
    if n_eval:
        lines.append(f"  evaluation    {pluralize(n_eval, 'worker')} to step {pluralize(n_eval_envs, 'environment')}")
    each = worker_mb * 1e6 + (0.0 if acts else _TORCH_BYTES)
    here = psutil.Process().memory_info().rss
    n_all = n_workers + n_eval  # evaluation's are forks of the same server
    parts = [f"main {_size(here)}", f"{'batches' if apart else 'the batch'} {_size(batch_bytes)}"]
    if n_all:
        parts.append(f"{pluralize(n_all, 'worker')} {_size(n_all * each)}")
    lines.append(f"memory: about {_size(here + batch_bytes + n_all * each)}: {', '.join(parts)}")
    return "\n".join(lines)


def _size(n_bytes: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if n_bytes >= unit), (1e3, "kB"))
    return f"{n_bytes / unit:,.1f} {name}"
