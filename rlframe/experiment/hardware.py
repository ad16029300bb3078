"""What depends on the machine: affinity, sampler, number of workers, torch threads, and a description of the processes.

`resolve` replaces every `auto` of an experiment; `describe_processes` makes the output of `dry_run=true`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import chz
import psutil
import torch

from rlframe.agents import Agent
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.struct import leaves
from rlframe.envs.make import can_split, steps_on_threads
from rlframe.experiment.build import torch_threads, untrained_agent
from rlframe.experiment.config import Experiment
from rlframe.experiment.limits import check_machine, evaluation_workers, size
from rlframe.experiment.tuning import fastest, ways_to_learn
from rlframe.kernels.device import choose_device, choose_precision
from rlframe.rollout.inference import empty_batch
from rlframe.rollout.worker_pool import split
from rlframe.samplers import auto
from rlframe.samplers.base import Sampler
from rlframe.system.affinity import Affinity, affinity_share, plan, read_topology

_TUNE_S = 2.0  # of sampling with each candidate
_TORCH_BYTES = 200e6  # of a process that acts, above one that only steps


@dataclass(frozen=True)
class Resolved:
    """An experiment without `auto` but for threads=auto, and the part of the machine that it gets."""

    experiment: Experiment
    affinity: Affinity  # its `threads` are those that threads=auto has chosen
    notes: tuple[str, ...]  # what was chosen and why, for the log


def resolve(
    experiment: Experiment, tune: bool = False, local_rank: int = 0, local_world_size: int = 1, threads: int = 0
) -> Resolved:
    """Replace every `auto` that the hardware decides. `tune` chooses the sampler by measuring all candidates.

    Args:
        local_rank, local_world_size: of the run's ranks on this machine; the affinity is that of this rank.
        threads: what the run that is resumed chose for threads=auto; another number computes other roundings.
    Raises:
        ConfigError: the affinity does not fit the machine, or the environment cannot be made.
    """
    check_machine(experiment, local_world_size)
    affinity = affinity_of(experiment, local_rank, local_world_size)
    _check_sampler_gpus(experiment, affinity)
    device = choose_device(experiment.device, affinity.gpus)
    experiment = chz.replace(experiment, precision=choose_precision(experiment.precision, device))
    n_workers = min(len(affinity.workers), experiment.sampler.batch_B)
    notes: tuple[str, ...] = ()
    n = experiment.runner.sampler_count()
    n_workers = max(n_workers // n, 1) * n
    if experiment.sampler.undecided:
        choice = _choose_sampler(experiment, affinity, n_workers, tune)
        experiment, notes = chz.replace(experiment, sampler=choice.config), (f"sampler: {choice.reason}",)
    elif tune:
        raise ConfigError("tune_sampler=true measures the samplers that sampler=auto chooses from; leave out sampler=")
    if not experiment.sampler.worker_count():
        n_workers = 0
    workers = affinity.workers
    affinity = replace(affinity, workers=tuple(workers[i % len(workers)] for i in range(n_workers)))
    experiment = chz.replace(experiment, sampler=experiment.sampler.with_workers(n_workers))
    if experiment.eval.n_workers == AUTO:
        splits = can_split(experiment.eval_env_config(), experiment.eval.n_envs)
        experiment = chz.replace(experiment, eval=chz.replace(experiment.eval, n_workers=n_workers if splits else 0))
    if experiment.threads > 0:
        affinity = replace(affinity, threads=experiment.threads)
    elif experiment.threads == AUTO and 1 <= threads <= affinity.threads:
        reason = f"learning: {pluralize(threads, 'thread')}, as before"
        affinity, notes = replace(affinity, threads=threads), (*notes, reason)
    elif experiment.threads == AUTO:
        way, reason = fastest(experiment, affinity, ways_to_learn(experiment, affinity.threads))
        affinity, notes = replace(affinity, threads=way.threads), (*notes, reason)
    check_machine(experiment, local_world_size)
    return Resolved(experiment, affinity, notes)


def _check_sampler_gpus(experiment: Experiment, affinity: Affinity) -> None:
    """Raise ConfigError if the affinity has GPUs for samplers that do not act on them."""
    sampler, n = experiment.sampler, len(affinity.sampler_gpus)
    if n and not (experiment.runner.samples_in_background and sampler.acts_on_device and not sampler.device):
        raise ConfigError(
            f"affinity={experiment.affinity}: {n}sgr is for samplers that act on GPUs; use runner=async_rl with "
            f"sampler=gpu and without sampler.device"
        )


def affinity_of(experiment: Experiment, local_rank: int, local_world_size: int) -> Affinity:
    """The part of the machine for one of the run's ranks on it.

    Raises:
        ConfigError: the affinity does not fit the machine, or the ranks do not fit the affinity.
    """
    topology, runner, learner_cores = read_topology(), experiment.runner, 0
    n_workers = max(0, experiment.sampler.worker_count())  # AUTO is negative
    if runner.samples_in_background:
        affinity = plan(experiment.affinity, topology, n_workers)
        # With a GPU, learning keeps one core busy, and the others step environments.
        on_gpu = local_world_size == 1 and choose_device(experiment.device, affinity.gpus).type == "cuda"
        half = max(1, affinity.threads // local_world_size // 2)
        learner_cores = runner.learner_cores or (1 if on_gpu else half)
    return affinity_share(experiment.affinity, topology, n_workers, local_rank, local_world_size, learner_cores)


def choose_learners(experiment: Experiment) -> tuple[Experiment, str]:
    """The experiment with the number of learners that is fastest here, for learners=auto, and the reason.

    If one is, the number of threads is left to `resolve`, which remembers what was measured and gives the reason.

    Raises:
        ConfigError: the affinity does not fit the machine; environment, model and algorithm do not fit together.
    """
    affinity = affinity_of(experiment, 0, 1)
    device = choose_device(experiment.device, affinity.gpus)
    runner = experiment.runner
    in_ranks = runner.becomes_sync_rl or (runner.trains_in_ranks and not runner.samples_in_background)
    if device.type != "cpu" or not in_ranks:
        return chz.replace(experiment, learners=1), "learning: 1 learner, of a runner or device that has no more"
    precision = choose_precision(experiment.precision, device)
    measured = chz.replace(experiment, precision=precision)
    way, reason = fastest(measured, affinity, ways_to_learn(experiment, affinity.threads))
    if way.learners == 1 and experiment.threads <= 0:
        return chz.replace(experiment, learners=1, threads=AUTO), ""
    return chz.replace(experiment, learners=way.learners, threads=way.threads), reason


def _choose_sampler(experiment: Experiment, affinity: Affinity, n_workers: int, tune: bool) -> auto.SamplerChoice:
    """The config of the sampler, and the reason; of several that share the environments it is that of a part."""
    whole, n = experiment.sampler, experiment.runner.sampler_count()
    if n == 1:
        return _choice_for(experiment, affinity, n_workers, tune)
    part = chz.replace(experiment, sampler=whole.divided(n, "runner.n_samplers"))
    cores = replace(affinity, sampler_threads=max(1, affinity.sampler_threads // n))
    choice = _choice_for(part, cores, n_workers // n, tune)
    found = choice.config.with_workers(n * choice.config.worker_count())
    return auto.SamplerChoice(chz.replace(found, batch_B=whole.batch_B), f"in each of {n}: {choice.reason}")


def _choice_for(experiment: Experiment, affinity: Affinity, n_workers: int, tune: bool) -> auto.SamplerChoice:
    config: auto.Config = experiment.sampler
    env = experiment.env_config()
    if experiment.runner.evolves:
        if tune:
            raise ConfigError("tune_sampler=true measures steps of batches, and runner=evolution has none; remove it")
        return auto.for_episodes(config, n_workers)
    only_serial = auto.candidates(config, n_workers)["serial"]
    if config.batch_B == 1:
        return auto.SamplerChoice(only_serial, "serial: there is one environment")
    if not can_split(env, config.batch_B):
        return auto.SamplerChoice(
            only_serial, f"serial: the vector environment of {env.id} steps all in one call, and cannot be split"
        )
    with closing(auto.TimingProcess(env, config.batch_B, -(-config.batch_B // n_workers), config.timeout_s)) as probe:
        agent = untrained_agent(experiment, affinity, probe.observation_space, probe.action_space)
        threads = torch_threads(experiment, affinity, probe.observation_space)
        if tune:
            return _fastest_sampler(experiment, affinity, n_workers, agent)
        costs = auto.measure(probe, agent, auto.batch_sizes(config, n_workers), threads)
    n_cores = affinity.sampler_threads or max(affinity.threads, len({cpus[0] for cpus in affinity.workers if cpus}))
    acting = threads if next(agent.parameters()).device.type == "cpu" else 1
    machine = auto.Machine(n_workers, n_cores, steps_on_threads(env, config.batch_B), acting)
    return auto.choose(config, costs, machine)


def _fastest_sampler(experiment: Experiment, affinity: Affinity, n_workers: int, agent: Agent) -> auto.SamplerChoice:
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
    return auto.SamplerChoice(candidates[best], f"{best}: the fastest of {len(rates)} that were measured")


def describe_processes(resolved: Resolved) -> str:
    """The processes of the run, their threads and their memory; starts one environment to measure it."""
    experiment, affinity, config = resolved.experiment, resolved.affinity, resolved.experiment.sampler
    with closing(
        auto.TimingProcess(experiment.env_config(), config.batch_B, 1, config.supervision().timeout_s)
    ) as probe:
        agent = untrained_agent(experiment, affinity, probe.observation_space, probe.action_space)
        threads = torch_threads(experiment, affinity, probe.observation_space)
        batch = empty_batch(probe.observation_space, probe.action_space, agent, config.batch_T, config.batch_B)
        worker_bytes = probe.memory_mb() * 1e6 + (_TORCH_BYTES if config.acts_in_workers else 0.0)
    batch_bytes = 0 if experiment.runner.learns_from_data else sum(array.nbytes for array in leaves(batch))
    processes = _processes(experiment, str(next(agent.parameters()).device), threads, batch_bytes)
    lines = [*resolved.notes, affinity.describe(), "processes:", *(f"  {name:<13} {does}" for name, does in processes)]
    return "\n".join([*lines, _memory(experiment, batch_bytes, worker_bytes)])


def _processes(experiment: Experiment, device: str, threads: int, batch_bytes: float) -> Iterator[tuple[str, str]]:
    """Each process, and what it does."""
    config, runner, of_torch = experiment.sampler, experiment.runner, pluralize(threads, "torch thread")
    n_workers, acts = config.worker_count(), not config.acts_in_workers
    learns_only = runner.samples_in_background or runner.learns_from_data or not acts
    work = "learns" if learns_only else "acts and learns" if n_workers else "steps, acts and learns"
    rows = "rows of the dataset" if runner.learns_from_data else f"a batch of {size(batch_bytes)}"
    yield "main", f"{work} on {device}, {of_torch}; {rows}"
    if experiment.n_ranks > 1:
        what = "does the same" if experiment.n_samplers > 1 else "learns from a part of each batch"
        yield "rank 1" if experiment.n_ranks == 2 else f"ranks 1 to {experiment.n_ranks - 1}", f"{what}, {of_torch}"
    if runner.samples_in_background:
        sampling = "steps and acts" if not n_workers else "acts" if acts else "waits for its workers"
        n, slots = runner.sampler_count(), pluralize(runner.n_slots, "slot")
        name, each = (f"sampler 0-{n - 1}", " each") if n > 1 else ("sampler", "")
        yield name, f"{sampling}; {slots} for batches{each}"
    for index, (lo, hi) in enumerate(split(config.batch_B, n_workers) if n_workers else ()):
        does = f"{'steps' if acts else 'acts and steps'} environments {lo} to {hi - 1}"
        whole = "plays whole episodes with policies of its own"
        yield f"worker {index}", f"{whole if runner.evolves else does}; 1 thread"
    if n := evaluation_workers(experiment):
        of_envs = pluralize(min(experiment.eval.n_envs, experiment.eval.n_episodes), "environment")
        yield "evaluation", f"{pluralize(n, 'worker')} to step {of_envs}"


def _memory(experiment: Experiment, batch_bytes: float, worker_bytes: float) -> str:
    """What the processes need, with batches and workers of so many bytes each."""
    runner, in_background = experiment.runner, experiment.runner.samples_in_background
    here, of_batches = psutil.Process().memory_info().rss, batch_bytes * runner.batches_held()
    rows = f"{'batches' if in_background else 'the batch'} {size(of_batches)}"
    parts = [f"main {size(here)}", "without the dataset" if runner.learns_from_data else rows]
    # All workers are forks of the same server.
    if n := experiment.sampler.worker_count() + evaluation_workers(experiment):
        parts.append(f"{pluralize(n, 'worker')} {size(n * worker_bytes)}")
    each = "" if experiment.n_ranks == 1 else " for each rank"
    return f"memory: about {size(here + of_batches + n * worker_bytes)}{each}: {', '.join(parts)}"
