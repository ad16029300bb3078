"""What an experiment is in the ranks, or for the learners, that train it."""

from __future__ import annotations

import chz

from rlframe.core.errors import ConfigError, pluralize
from rlframe.experiment.checks import check_parts
from rlframe.experiment.config import Experiment, kind_of
from rlframe.runners import SyncRlConfig
from rlframe.runners.config import as_kind
from rlframe.samplers import no_sampler


def for_ranks(experiment: Experiment, world_size: int) -> Experiment:
    """The experiment as it is trained in `world_size` ranks, or by its learners: with runner=sync_rl if several.

    Raises:
        ConfigError: it asks for another number of ranks, its runner cannot train in ranks, or parts do not fit.
    """
    check_parts(experiment)
    if experiment.world_size not in (1, world_size) or (experiment.learners > 1 and world_size > 1):
        asked = f"learners={experiment.learners}" if experiment.learners > 1 else f"world_size={experiment.world_size}"
        raise ConfigError(f"{asked}, but {pluralize(world_size, 'rank')} were started")
    experiment = chz.replace(experiment, world_size=world_size)
    if experiment.n_ranks == 1:
        return experiment
    runner, config = experiment.runner, experiment.eval
    if runner.becomes_sync_rl:
        runner = as_kind(runner, SyncRlConfig)
    if not runner.trains_in_ranks:
        name = kind_of("runner", runner)
        asked = f"learners={experiment.learners}" if experiment.learners > 1 else f"world_size={world_size}"
        needs = ": raise sampler.n_workers instead" if runner.evolves else " needs runner=sync_rl"
        raise ConfigError(f"{asked}{needs}; runner={name} trains in one process")
    if not experiment.evaluates:
        config = chz.replace(config, n_episodes=0, function="")
    return chz.replace(experiment, runner=runner, eval=config)


def share_of(experiment: Experiment, rank: int) -> Experiment:
    """What one of its learners does: its part of the environments, or with replay, all of them on rank 0.

    Raises:
        ConfigError: the environments or the rows of an update cannot be divided equally.
    """
    n, sampler, algo = experiment.learners, experiment.sampler, experiment.algo
    if n == 1:
        return experiment
    if experiment.threads <= 0:  # a learner has a core
        experiment = chz.replace(experiment, threads=1)
    if experiment.n_samplers == 1:
        if not hasattr(algo, "batch_size"):
            name = kind_of("algo", algo)
            raise ConfigError(f"learners={n} divides the rows of an update, but algo={name} has no batch_size")
        if algo.batch_size % n:
            raise ConfigError(f"learners={n} must divide algo.batch_size={algo.batch_size}: each learns from a part")
        if rank:
            sampler = no_sampler.NoSamplerConfig(batch_T=sampler.batch_T, batch_B=sampler.batch_B)
        return chz.replace(experiment, sampler=sampler)
    return chz.replace(experiment, sampler=sampler.divided(n, "learners"))


def whole_of(share: Experiment, experiment: Experiment) -> Experiment:
    """The experiment again, from rank 0's share of it as `hardware.resolve` returned it."""
    sampler = share.sampler
    if experiment.n_samplers > experiment.world_size:
        n_workers = sampler.worker_count() * experiment.learners
        sampler = chz.replace(sampler, batch_B=experiment.sampler.batch_B).with_workers(n_workers)
    return chz.replace(share, sampler=sampler, threads=experiment.threads)
