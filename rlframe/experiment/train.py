"""train(): one run from its settings, new or resumed, in one process or in ranks; for launch and rlframe.train."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import chz
import torch

from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, SnapshotError
from rlframe.core.files import read_json
from rlframe.core.imports import check_loaded
from rlframe.core.own_code import own_code
from rlframe.core.ranks import Ranks, current_ranks
from rlframe.experiment import hardware
from rlframe.experiment.build import Built, build
from rlframe.experiment.checks import check_parts
from rlframe.experiment.compilation import ALONE, Placing, compiled_as
from rlframe.experiment.config import Experiment, kind_of
from rlframe.experiment.job import Job, choices_made
from rlframe.experiment.live_run import LiveRun
from rlframe.experiment.ranks import share_of, whole_of
from rlframe.experiment.resumable import changed_at, is_fixed
from rlframe.experiment.settings import from_flat, long_keys, to_flat
from rlframe.experiment.trust import check_network
from rlframe.experiment.weights import agents_in, keeping
from rlframe.kernels.device import choose_device
from rlframe.record import current_run, logger_context
from rlframe.record.directory import RESULT, check_config, resumed_session, run_directory
from rlframe.record.rank_state import list_snapshots
from rlframe.record.run import Run, SecondaryRankRun
from rlframe.record.snapshot import load_newest, load_snapshot, params_of
from rlframe.system.affinity import pinned
from rlframe.system.distributed import RankInfo, join, launch_ranks
from rlframe.system.env_vars import env_vars_set
from rlframe.system.machine import retain_freed_memory
from rlframe.system.signals import StopRequest

_RECORDED = (  # fields that are arguments of logger_context
    *("log_dir", "run_ID", "loggers", "log_level", "sync"),
    *("snapshot_mode", "snapshot_gap", "snapshot_keep", "snapshot_best", "snapshot_errors"),
)

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended: its directory, and the last row of its log by metric name."""

    directory: Path
    metrics: dict[str, float]


def train(job: Job) -> TrainResult:
    """Train a job of `place_job` to its end.

    Raises:
        ConfigError: its parts do not fit together; nothing was written. Otherwise see `Runner.train`.
    """
    experiment = job.experiment
    with env_vars_set(experiment.env_vars):
        return launch_ranks(partial(_train, job), experiment.n_ranks, experiment.n_samplers)


def describe_job(job: Job, n_here: int) -> str:
    """The config of a job of `place_job` and its processes, for dry_run=true; `n_here`: its ranks on this machine.

    Raises:
        ConfigError: its parts do not fit together.    SnapshotError: what it resumes cannot be read.
    """
    found = _newest_state(job)
    with env_vars_set(job.experiment.env_vars):
        resolved = hardware.resolve(share_of(job.experiment, 0), job.tune_sampler, 0, n_here, job.threads)
        config = to_flat(whole_of(resolved.experiment, job.experiment))
        start = f"\nresumes: {found.snapshot if found else 'from its beginning'}" if job.resume else ""
        return f"{json.dumps(config, indent=2)}\n{hardware.describe_processes(resolved)}{start}"


def live_run(job: Job, log_dir: str) -> LiveRun:
    """A run of a single process, new or from the state of the job's `resume`, recorded if `log_dir` is not empty.

    Raises:
        ConfigError: it wants several ranks; its parts do not fit together.
    """
    if job.experiment.n_ranks > 1:
        raise ConfigError("build and restore are for one process; use train for world_size= and learners=")
    if job.experiment.sync and not log_dir:
        raise ConfigError(f"sync={job.experiment.sync} copies a recorded run; give log_dir=DIR too")
    return copy_context().run(_live_run, job, log_dir)  # whose context is its own


def _live_run(job: Job, log_dir: str) -> LiveRun:
    check_parts(job.experiment)
    config = to_flat(job.experiment)
    if log_dir:
        check_config(config)
    check_loaded(own_code(config))
    experiment = chz.replace(job.experiment, learners=1, log_dir=log_dir)  # learners may be auto
    found = _newest_state(job)
    with ExitStack() as until_closed:
        until_closed.enter_context(env_vars_set(experiment.env_vars))
        resolved = hardware.resolve(experiment, job.tune_sampler, threads=job.threads)
        settings = resolved.experiment.without_init() if found else resolved.experiment
        built = build(settings, resolved.affinity)
        config = {**to_flat(resolved.experiment), "compile": built.compilation.name}
        run = LiveRun(built, config, _record_of(experiment) if log_dir else None, until_closed.pop_all())
    if found:
        _warn_of_edits(resumed_session(params_of(found.snapshot), config)[1])
        changed = changed_at(Path(job.resume), int(found.facts["env_steps"])) | {*long_keys(job.sources[0][1])}
        with keeping(run.runner.learners.algos(), changed):  # what is given holds, whatever was set while it trained
            run.load(found.state, str(found.snapshot))
    return run


def _record_of(experiment: Experiment) -> dict[str, Any]:
    """The arguments of logger_context that an experiment decides, but for its config."""
    return {"name": experiment.title(), **{name: getattr(experiment, name) for name in _RECORDED}}


def _train(job: Job, place: RankInfo) -> TrainResult:
    """Train as one rank, usually the only one."""
    job = _restarted(job, place)
    found = _newest_state(job, place.rank)
    retain_freed_memory()
    share = share_of(job.experiment, place.rank)
    tune = job.tune_sampler and place.rank < job.experiment.n_samplers
    resolved = hardware.resolve(share, tune, place.local_rank, place.local_world_size, job.threads)
    check_loaded(own_code(to_flat(whole_of(resolved.experiment, job.experiment))))
    with env_vars_set(share.env_vars), pinned(resolved.affinity.master), _join(resolved, place) as ranks:
        if ranks.broadcast(job.resume) != job.resume:
            raise ConfigError(f"rank {place.rank} does not see the run of rank 0; give log_dir= a folder of all ranks")
        with _begun(job, found and _common_state(found, ranks), resolved) as (built, run):
            metrics = built.train()
    return TrainResult(run.directory, metrics)


def train_placed(job: Job, resolved: hardware.Resolved, placing: Placing, stop: StopRequest, console: bool) -> None:
    """Train one of several jobs of this process, whose caller has its affinity and receives signals for `stop`.

    Args:
        console: it shows its rows and messages.
    """
    with _begun(job, _newest_state(job), resolved, placing, console) as (built, _):
        built.runner.stop = stop
        built.learning_call(list, built.runner.rows())


@contextmanager
def _begun(
    job: Job, found: _Found | None, resolved: hardware.Resolved, placing: Placing = ALONE, console: bool = True
) -> Iterator[tuple[Built, Run | SecondaryRankRun]]:
    """What is built for a job, and its open run, which goes on from what was found of it."""
    settings = resolved.experiment.without_init() if found else resolved.experiment  # the state has the weights
    config = to_flat(whole_of(resolved.experiment, job.experiment))
    record = _record_of(chz.replace(job.experiment, log_dir=job.resume or job.experiment.log_dir))
    with (
        build(settings, resolved.affinity, placing) as built,
        logger_context(config=config, resume=bool(job.resume), console=console, **record) as run,
    ):
        if not current_ranks().rank:
            _describe(run, job, resolved, built)
            if job.resume:
                _check_unchanged(job.resume, found)
        if job.resume:
            _continue(built, job.resume, found)
        run.record_choices(_choices(job, resolved, built))
        yield built, run


def _describe(run: Run | SecondaryRankRun, job: Job, resolved: hardware.Resolved, built: Built) -> None:
    """Log what was built and chosen."""
    summary = [f"{name}: {text}" for name, text in built.summary.items()]
    for note in (*job.notes, *resolved.notes, resolved.affinity.describe(), *summary):
        _logger.info(note)
    _logger.info(f"run: {run.directory}")
    _warn_of_edits(run.edited)


def _warn_of_edits(names: Sequence[str]) -> None:
    for name in names:
        _logger.warning(
            f"{name} has changed since the run was started last, or what it imports; it goes on with what is there now"
        )


def _choices(job: Job, resolved: hardware.Resolved, built: Built) -> dict[str, Any]:
    """What a resumed run keeps to compute the same, of the settings that were left to be chosen."""
    chosen: dict[str, Any] = {"compile": built.compilation.name}
    if job.experiment.sampler.undecided:
        chosen["sampler"] = kind_of("sampler", resolved.experiment.sampler)
    if job.experiment.threads == AUTO:
        chosen["threads"] = resolved.affinity.threads
    if job.left_to_machine("precision"):
        chosen["precision"] = resolved.experiment.precision
    return chosen


def _continue(built: Built, resume: str, found: _Found | None) -> None:
    if not found:
        current_run().truncate_after(-1)
        _logger.info(f"{resume} has no snapshot: it starts from the beginning")
        return
    with keeping(built.runner.learners.algos(), changed_at(Path(resume), int(found.facts["env_steps"]))):
        built.runner.resume(found.state)
    if reason := built.runner.end_reason:
        further = "raise runner.n_steps or runner.target_return, or change stop=, to continue"
        _logger.info(f"nothing is left to train: {reason}; {further}")


def _check_unchanged(resume: str, found: _Found | None) -> None:
    """Raise ConfigError if the run, whose directory is this process's now, went on while its snapshot was read."""
    newest = _newest_name(resume)
    if newest != (found.newest if found else ""):
        raise ConfigError(f"{resume} went on while its snapshot was read, and has {newest} now; resume it again")


def _join(resolved: hardware.Resolved, place: RankInfo) -> AbstractContextManager[Ranks]:
    """Join the other ranks; each uses its own GPU if there are as many GPUs as ranks."""
    device = resolved.experiment.device
    own_gpu = device == "auto" and torch.cuda.device_count() >= place.local_world_size
    chosen = choose_device(device, resolved.affinity.gpus) if own_gpu else torch.device("cpu")
    return join(place, resolved.experiment.runner.timeout_s, chosen)


class _Found(NamedTuple):
    """What was read of a run."""

    snapshot: Path
    state: Any
    facts: Mapping[str, Any]
    newest: str  # the name of the newest snapshot then, which may be damaged


def _newest_name(run: str) -> str:
    """Of its snapshots; empty if there is none."""
    found = list_snapshots(Path(run) / "snapshot")
    return found[-1].name if found else ""


def _newest_state(job: Job, rank: int = 0) -> _Found | None:
    """The newest snapshot of the run that a job resumes; None if that ended before its first, or the job is new.

    Raises:
        ConfigError: it has none, and has trained to its end.    SnapshotError: none can be read.
    """
    if not job.resume:
        return None
    run, newest = Path(job.resume), _newest_name(job.resume)
    if job.experiment.snapshot_mode != "none" and not newest:
        result = run / RESULT
        ended = read_json(result).get("ended") if result.is_file() else "interrupted"
        if ended not in ("interrupted", "failed"):
            raise ConfigError(
                f"{run} has ended ({ended}), and has no snapshot (removed, or snapshot_mode=none), without which it "
                f"cannot go on; train it anew by experiment={run / 'params.json'}"
            )
        return None
    snapshot, state, facts = load_newest(run, rank)
    if not isinstance(state, dict) or not state:
        raise SnapshotError(f"{snapshot} holds no training state; init= takes weights from it, if it has any")
    check_network(read_json(run / "params.json").get("config", {}), agents_in(state), str(snapshot))
    return _Found(snapshot, state, facts, newest)


def _common_state(found: _Found, ranks: Ranks) -> _Found:
    """The newest snapshot that all ranks can read, with this rank's state in it."""
    _, oldest = min(ranks.gather((int(found.facts["env_steps"]), found.snapshot.name)))
    if oldest == found.snapshot.name:
        return found
    snapshot = found.snapshot.with_name(oldest)
    return _Found(snapshot, *load_snapshot(snapshot, ranks.rank), found.newest)


def _restarted(job: Job, place: RankInfo) -> Job:
    """The job; if torchrun has restarted its ranks, it resumes the run that it began, with what that chose.

    It is recognised by its run directory and the fixed part of its config, as torchrun may not report a restart.
    """
    experiment = job.experiment
    run = run_directory(experiment.log_dir, experiment.run_ID)
    if job.resume or not place.job or not experiment.log_dir or not (run / "params.json").is_file():
        return job
    config, before = to_flat(experiment), read_json(run / "params.json").get("config", {})
    if any(before.get(key) != value for key, value in config.items() if is_fixed(key)):
        return job
    chosen = choices_made(run)
    if experiment.sampler.undecided and "sampler" in chosen:
        of_sampler = {key: value for key, value in before.items() if key.startswith("sampler.")}
        sampler = from_flat({**config, "sampler": chosen["sampler"], **of_sampler}).sampler
        experiment = chz.replace(experiment, sampler=sampler)
    experiment, _ = compiled_as(chosen, experiment, recorded=experiment.compile)
    threads = chosen.get("threads", 0)
    return replace(job, experiment=experiment, resume=str(run), tune_sampler=False, threads=threads)
