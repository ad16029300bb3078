"""What depends on the machine: affinity, sampler, number of workers, torch threads, and a description of the processes.

`resolve` replaces every `auto` of an experiment; `describe_processes` makes the output of `dry_run=true`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import chz
import psutil
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.struct import leaves
from rlframe.envs.make import can_split, steps_on_threads
from rlframe.experiment.build import choose_device, make_agent, torch_threads
from rlframe.experiment.config import Experiment
from rlframe.kernels.device import choose_precision, learning_in
from rlframe.rollout.env_pool import split
from rlframe.rollout.inference import empty_batch
from rlframe.samplers import auto, serial
from rlframe.samplers.base import Sampler
from rlframe.system.affinity import Affinity, affinity_share, plan, read_topology
from rlframe.system.machine import n_cpus

_TUNE_S = 2.0  # of sampling with each candidate
_TORCH_BYTES = 200e6  # of a process that acts, above one that only steps
_STEPPING_BYTES, _ACTING_BYTES, _RANK_BYTES = 8e6, 13e6, 180e6  # of CartPole's, without what processes share
_MOST_PER_CPU = 100  # processes


@dataclass(frozen=True)
class Resolved:
    """An experiment without `auto`, and the part of the machine that it gets."""

    experiment: Experiment
    affinity: Affinity
    notes: tuple[str, ...]  # what was chosen and why, for the log


def resolve(experiment: Experiment, tune: bool = False, local_rank: int = 0, local_world_size: int = 1) -> Resolved:
    """Replace every `auto` that the hardware decides. `tune` chooses the sampler by measuring all candidates.

    Args:
        local_rank, local_world_size: of the run's ranks on this machine; the affinity is that of this rank.
    Raises:
        ConfigError: the affinity does not fit the machine, or the environment cannot be made.
    """
    affinity = affinity_of(experiment, local_rank, local_world_size)
    device = choose_device(experiment.device, affinity.gpus)
    experiment = chz.replace(experiment, precision=choose_precision(experiment.precision, device))
    n_workers = min(len(affinity.workers), experiment.sampler.batch_B)
    notes: tuple[str, ...] = ()
    if experiment.sampler.undecided:
        choice = _choose(experiment, affinity, n_workers, tune)
        experiment, notes = chz.replace(experiment, sampler=choice.config), (f"sampler: {choice.reason}",)
    elif tune:
        raise ConfigError("tune_sampler=true measures the samplers that sampler=auto chooses from; leave out sampler=")
    if not experiment.sampler.worker_count():
        n_workers = 0
    affinity = replace(affinity, workers=affinity.workers[:n_workers])
    experiment = chz.replace(experiment, sampler=experiment.sampler.with_workers(n_workers))
    if experiment.eval.n_workers == AUTO:
        experiment = chz.replace(experiment, eval=chz.replace(experiment.eval, n_workers=n_workers))
    if experiment.threads == AUTO:
        threads, reason = fastest_threads(experiment, affinity)
        experiment, notes = chz.replace(experiment, threads=threads), (*notes, reason)
    _check_processes(experiment, local_world_size)
    return Resolved(experiment, affinity, notes)


def _check_processes(experiment: Experiment, n_ranks: int) -> None:
    """Raise ConfigError if the run has more processes than the machine can have, whatever its environment."""
    config, eval_config = experiment.sampler, experiment.eval
    evaluates = experiment.runner.evaluates(eval_config.n_episodes)
    n_eval = min(eval_config.n_workers, eval_config.n_envs, eval_config.n_episodes) if evaluates else 0
    n_workers = n_ranks * (config.worker_count() + n_eval)
    least = _ACTING_BYTES if config.acts_in_workers else _STEPPING_BYTES
    n_bytes, total = n_workers * least + n_ranks * _RANK_BYTES, psutil.virtual_memory().total
    most = _MOST_PER_CPU * n_cpus()
    if n_bytes > total or n_workers + n_ranks > most:
        raise ConfigError(
            f"{n_workers + n_ranks:,} processes are too many for this machine: they need at least {_size(n_bytes)} of "
            f"{_size(total)} memory, and its {n_cpus()} CPUs run at most {most}; lower sampler.n_workers="
            f"{config.worker_count()}, eval.n_workers={eval_config.n_workers} or world_size={experiment.world_size}"
        )


def affinity_of(experiment: Experiment, local_rank: int, local_world_size: int) -> Affinity:
    """The part of the machine for one of the run's ranks on it.

    Raises:
        ConfigError: the affinity does not fit the machine, or the ranks do not fit the affinity.
    """
    topology, runner = read_topology(), experiment.runner
    n_workers = max(0, experiment.sampler.worker_count())  # AUTO is negative
    affinity = plan(experiment.affinity, topology, n_workers)
    if not runner.samples_in_background:
        return affinity_share(affinity, topology, n_workers, local_rank, local_world_size)
    # With a GPU, learning keeps one core busy, and the others step environments.
    on_gpu = choose_device(experiment.device, affinity.gpus).type == "cuda"
    learner_cores = runner.learner_cores or (1 if on_gpu else max(1, affinity.threads // 2))
    return plan(experiment.affinity, topology, n_workers, learner_cores=learner_cores)


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
            return _fastest_sampler(experiment, affinity, n_workers, agent)
        costs = auto.measure(probe, agent, auto.batch_sizes(config, n_workers), threads)
    n_cores = affinity.sampler_threads or affinity.threads
    return auto.choose(config, costs, auto.Machine(n_workers, n_cores, steps_on_threads(env, config.batch_B)))


def _agent(experiment: Experiment, affinity: Affinity, observation_space: Space, action_space: Space) -> Agent:
    device = choose_device(experiment.device, affinity.gpus)
    return make_agent(chz.replace(experiment, init=""), observation_space, action_space, device)


def _fastest_sampler(experiment: Experiment, affinity: Affinity, n_workers: int, agent: Agent) -> auto.Choice:
    """Sample with every candidate, print the rates, and choose the fastest."""

    def make(candidate: Any) -> Sampler:
        cpus = affinity.workers[: candidate.worker_count()]
        with ExitStack() as opened:
            envs = opened.enter_context(closing(candidate.make_envs(experiment.env_config(), experiment.seed, cpus)))
            torch.set_num_threads(torch_threads(experiment, affinity, envs.observation_space))
            sampler = candidate.make_sampler(envs, agent, experiment.seed)
            opened.pop_all()
        return sampler

    rates = {}
    candidates = auto.candidates(experiment.sampler, n_workers)
    print(f"{'sampler':<28} {'env_steps/s':>12}")
    for name, candidate in candidates.items():
        rates[name] = auto.rate(partial(make, candidate), _TUNE_S)
        print(f"{name:<28} {rates[name]:>12,.0f}")
    best = max(rates, key=lambda name: rates[name])
    return auto.Choice(candidates[best], f"{best}: the fastest of {len(rates)} that were measured")


_ROUNDS = 3  # measurements of each number of threads
_MIN_S = 0.1  # of a measurement
_WARM_ROUNDS = 1  # not counted: memory is touched first, and kernels are made
_REPLAY_ROWS = 20_000  # of the trial's replay: sampling from it takes as long as from a larger one


def fastest_threads(experiment: Experiment, affinity: Affinity) -> tuple[int, str]:
    """The fastest number of torch threads, a power of two up to the cores, and the measurements in words.

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
                measured = trial.seconds_per_step()
                if round_ >= _WARM_ROUNDS:
                    seconds[n].append(measured)
    medians = {n: statistics.median(found) for n, found in seconds.items()}
    best = min(medians, key=lambda n: medians[n])
    times = ", ".join(f"{1e6 * s:.3g} us with {pluralize(n, 'thread')}" for n, s in medians.items())
    return best, f"threads: {best}, an env_step and what is learned from it takes {times}"


class _Trial:
    """Samples and learns like the experiment, but in this process, and learning starts at once."""

    def __init__(self, experiment: Experiment, affinity: Affinity) -> None:
        T, B = experiment.sampler.batch_T, experiment.sampler.batch_B
        config = serial.Config(batch_T=T, batch_B=B)
        self.precision = experiment.precision
        with ExitStack() as opened:
            envs = opened.enter_context(closing(config.make_envs(experiment.env_config(), experiment.seed, ())))
            agent = _agent(experiment, affinity, envs.observation_space, envs.action_space)
            self.sampler = config.make_sampler(envs, agent, experiment.seed)
            algo = _learning_at_once(experiment.algo)
            self.algo = algo.make_algorithm(agent, self.sampler.batch_spec, experiment.runner.n_steps, experiment.seed)
            opened.pop_all()

    def seconds_per_step(self) -> float:
        """Measure batches and all their updates; if one batch calls for many updates, measure a part of them."""
        progress, spent = self.algo.progress, 0.0
        before = progress.env_steps
        with learning_in(self.precision):
            while spent < _MIN_S or progress.env_steps == before:
                spent += _timed(self._batch)
                due, made, learning = self.algo.updates_due(), 0, 0.0
                while self.algo.updates_due() and learning < _MIN_S:
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
        self.sampler.close()


def _timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _learning_at_once(algo: Any) -> Any:
    """The algorithm's config with learning from the first batch on and a small replay, if it has these fields."""
    fields = chz.chz_fields(type(algo))
    changes: dict[str, Any] = {"learn_from": 0} if "learn_from" in fields else {}
    if "replay" in fields:
        changes["replay"] = chz.replace(algo.replay, size=min(algo.replay.size, _REPLAY_ROWS))
    return chz.replace(algo, **changes)


def describe_processes(resolved: Resolved) -> str:
    """The processes of the run, their threads and their memory; starts one environment to measure it."""
    experiment, affinity, config = resolved.experiment, resolved.affinity, resolved.experiment.sampler
    with closing(
        auto.TimingProcess(experiment.env_config(), config.batch_B, 1, config.supervision().timeout_s)
    ) as probe:
        agent = _agent(experiment, affinity, probe.observation_space, probe.action_space)
        threads = torch_threads(experiment, affinity, probe.observation_space)
        batch = empty_batch(probe.observation_space, probe.action_space, agent, config.batch_T, config.batch_B)
        worker_bytes = probe.memory_mb() * 1e6 + (_TORCH_BYTES if config.acts_in_workers else 0.0)
    batch_bytes, device = sum(array.nbytes for array in leaves(batch)), next(agent.parameters()).device
    n_eval_envs = min(experiment.eval.n_envs, experiment.eval.n_episodes)
    evaluates = experiment.runner.evaluates(experiment.eval.n_episodes)
    n_workers, n_eval = config.worker_count(), min(experiment.eval.n_workers, n_eval_envs) if evaluates else 0
    acts, in_background = not config.acts_in_workers, experiment.runner.samples_in_background
    work = "learns" if in_background or not acts else "acts and learns" if n_workers else "steps, acts and learns"
    lines = [*resolved.notes, affinity.describe(), "processes:"]
    of_torch = pluralize(threads, "torch thread")
    lines.append(f"  main          {work} on {device}, {of_torch}; a batch of {_size(batch_bytes)}")
    if in_background:
        sampling = "steps and acts" if not n_workers else "acts" if acts else "waits for its workers"
        lines.append(f"  sampler       {sampling}; {pluralize(experiment.runner.n_slots, 'slot')} for batches")
        batch_bytes *= experiment.runner.n_slots + 1
    for index, (lo, hi) in enumerate(split(config.batch_B, n_workers) if n_workers else ()):
        does = "steps" if acts else "acts and steps"
        lines.append(f"  worker {index:<6} {does} environments {lo} to {hi - 1}; 1 thread")
    if n_eval:
        lines.append(f"  evaluation    {pluralize(n_eval, 'worker')} to step {pluralize(n_eval_envs, 'environment')}")
    here, n_all = psutil.Process().memory_info().rss, n_workers + n_eval  # all workers are forks of the same server
    parts = [f"main {_size(here)}", f"{'batches' if in_background else 'the batch'} {_size(batch_bytes)}"]
    if n_all:
        parts.append(f"{pluralize(n_all, 'worker')} {_size(n_all * worker_bytes)}")
    lines.append(f"memory: about {_size(here + batch_bytes + n_all * worker_bytes)}: {', '.join(parts)}")
    return "\n".join(lines)


def _size(n_bytes: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if n_bytes >= unit), (1e3, "kB"))
    return f"{n_bytes / unit:,.1f} {name}"
