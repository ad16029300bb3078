"""train(): one run from its settings, new or resumed, in one process or in ranks; for launch and rlframe.train."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import chz
import torch

from rlframe.algos.changed import keeping
from rlframe.core.command_line import KeyValues
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, SnapshotError
from rlframe.core.files import read_json
from rlframe.core.ranks import Ranks
from rlframe.experiment import hardware
from rlframe.experiment.build import Built, build, choose_device, without_init
from rlframe.experiment.changes import changed_at
from rlframe.experiment.compilation import compiled_as
from rlframe.experiment.config import Experiment, check_parts, for_ranks, share_of, whole_of
from rlframe.experiment.defaults import algorithm_defaults
from rlframe.experiment.limits import check_machine
from rlframe.experiment.live_run import LiveRun
from rlframe.experiment.objects import is_same, recorded
from rlframe.experiment.presets import AUTO_PRESET, best_preset, load_preset, load_study, presets_for
from rlframe.experiment.settings import from_flat, long_keys, merge, to_flat
from rlframe.experiment.trust import NEW_WEIGHTS, check_network, check_trusted, read_config
from rlframe.kernels.device import choose_precision
from rlframe.record import current_run, logger_context
from rlframe.record.loggers import check_loggers
from rlframe.record.rank_state import list_snapshots
from rlframe.record.snapshot import load_newest, load_snapshot
from rlframe.system.affinity import pinned
from rlframe.system.distributed import RankInfo, join, launch_ranks, rank_from_environment
from rlframe.system.machine import retain_freed_memory

_CONTROL = ("experiment", "resume", "trust", "tune_sampler")  # keys that are not fields of Experiment
_ADJUSTABLE = (  # in a resumed run
    *("runner.", "eval.", "stop", "snapshot_", "device", "threads", "affinity", "sampler", "loggers", "log_level"),
    "compile",
)
_FIXED = (
    *("sampler.batch_T", "sampler.batch_B", "sampler.decorrelation_steps", "sampler.complete_episodes"),
)  # although sampler is adjustable
_CANDIDATES = ("serial", "cpu", "gpu")  # of sampler=auto
_NEEDED = ("algo", "env", "sampler.batch_T", "sampler.batch_B", "runner.n_steps")  # to rebuild a run from its config

Source = tuple[str, Mapping[str, Any]]  # a name for --show, and the keys that it gives

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class Job:
    """A run to train."""

    experiment: Experiment
    resume: str  # its run directory, if it is resumed
    tune_sampler: bool  # measure all samplers
    notes: tuple[str, ...]  # where its settings come from, for the log
    sources: tuple[Source, ...]  # of its settings, the first has precedence
    threads: int = 0  # that the resumed run chose for threads=auto; 0: none


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended: its directory, and the last row of its log by metric name."""

    directory: Path
    metrics: dict[str, float]


def read_job(keys: Mapping[str, Any]) -> Job:
    """The run that keys of the command line describe, with the preset or the resumed run below them.

    Below these are the defaults of the algorithm, but for a resumed run, which has a value for every key.

    Raises:
        ConfigError: an unknown key or a wrong value; a preset or run that does not exist or needs trust=true.
    """
    control = KeyValues(f"{key}={keys[key]}" for key in _CONTROL if key in keys)
    for key in ("resume", "experiment"):
        if keys.get(key) == "":
            raise ConfigError(f"{key}= is empty, perhaps an unset shell variable; give a value, or leave {key} out")
    keys = {key: value for key, value in keys.items() if key not in _CONTROL}
    resume, preset, trust = control.text("resume"), control.text("experiment"), control.flag("trust")
    tune = control.flag("tune_sampler")
    if preset == AUTO_PRESET:
        preset = best_preset(str(keys.get("algo", "ppo")), str(keys.get("env", "CartPole-v1")))
    base, notes = _resumed(resume, keys, trust) if resume else _preset(preset, keys, trust)
    if resume and not tune:
        keys, kept = _without_auto(keys, base)
        notes = (*notes, *kept)
    if dropped := merge(base, keys)[1]:
        given = long_keys(base)
        notes = (*notes, f"left out, as unknown now: {', '.join(f'{key}={given[key]}' for key in dropped)}")
    below = ("", {}) if resume else algorithm_defaults(base, keys)
    sources = (("command line", keys), (f"resume={resume}" if resume else f"experiment={preset}", base), below)
    chosen = _chosen(Path(resume)) if resume else {}
    experiment = compiled_as(chosen, from_flat(below[1], base, keys))
    return Job(experiment, resume, tune, notes, sources, chosen.get("threads", 0))


def _preset(preset: str, keys: Mapping[str, Any], trust: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not preset:
        return {}, _presets_to_take(str(keys.get("algo", "ppo")), str(keys.get("env", "CartPole-v1")))
    config = load_preset(preset)
    if study := load_study(preset):
        entries = ", ".join(sorted(set(study) - set(config)))
        raise ConfigError(
            f"experiment={preset} is a study of several runs, as it has {entries}; start it with "
            f"python -m rlframe.launch experiment={preset}, or remove these entries"
        )
    if preset.endswith(".json"):  # may come from another person; a preset in YAML is written by hand
        check_trusted(config, preset, trust, NEW_WEIGHTS)
        config.pop("log_dir", None)  # of that run
    return config, (f"experiment={preset}",)


def _presets_to_take(algo: str, env: str) -> tuple[str, ...]:
    """A line that names the presets for the algorithm on the environment, or else those of other algorithms."""
    if names := presets_for(env, algo):
        best, others = names[0], [f"experiment={name}" for name in names[1:]]
        also = f"; others: {', '.join(others)}" if others else ""
        return (f"experiment={best} is a preset for algo={algo} on {env}, and what experiment=auto takes{also}",)
    others = [f"experiment={name}" for name in presets_for(env)]
    return (f"presets for this environment: {', '.join(others)}",) if others else ()


def _resumed(resume: str, keys: Mapping[str, Any], trust: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    path = Path(resume) / "params.json"
    if not path.is_file():
        raise ConfigError(f"resume={resume}: there is no {path}; name a run directory")
    given = long_keys(keys)
    config = recorded(read_config(path, trust, given), given, str(path))
    fixed = [key for key in given if _is_fixed(key) and not (key in config and is_same(given[key], config[key]))]
    if fixed:
        raise ConfigError(
            f"resume continues the run as it is: {', '.join(fixed)} cannot change "
            f"(what can: {', '.join(_ADJUSTABLE)}, but not {', '.join(_FIXED)}); "
            f"for a new run from its weights use init={resume}"
        )
    missing = [key for key in _NEEDED if key not in config]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: a script wrote it, so resume the run from that script")
    return config, (f"resuming {resume}",)


def _without_auto(keys: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Keys of a resumed run but sampler=auto and sampler.n_workers=auto, which it has settled; and notes of these."""
    settled = {key: base[key] for key in ("sampler", "sampler.n_workers") if keys.get(key) == "auto" and key in base}
    left_out = {key: value for key, value in settled.items() if value != "auto"}
    notes = [
        f"{key}=auto: {value}, as before, since another may round otherwise; name one to change it"
        for key, value in left_out.items()
    ]
    return {key: value for key, value in keys.items() if key not in left_out}, tuple(notes)


def _chosen(run: Path) -> dict[str, Any]:
    """What a run chose for settings that were auto, as `hardware.choices_of`; without entries that cannot be so."""
    found = read_json(run / "params.json").get("chosen")
    chosen = found if isinstance(found, dict) else {}
    kept = {
        "threads": type(chosen.get("threads")) is int,
        "sampler": chosen.get("sampler") in _CANDIDATES,
        "compile": chosen.get("compile") in ("true", "false"),
    }
    return {key: chosen[key] for key, valid in kept.items() if valid}


def _is_fixed(key: str) -> bool:
    """Whether a resumed run cannot change the key."""
    return not key.startswith(_ADJUSTABLE) or key in _FIXED


def check_job(job: Job) -> Experiment:
    """The experiment of a job that a study queues.

    Raises:
        ConfigError: its runner cannot train in ranks, its batches cannot be divided, the machine is too small, or a
            logger does not exist.
    """
    if job.experiment.learners == AUTO:
        raise ConfigError("learners=auto measures on a machine that does nothing else; give a study learners=N")
    check_loggers(job.experiment.loggers)
    experiment = for_ranks(job.experiment, job.experiment.world_size)
    check_machine(experiment, experiment.n_ranks)
    share_of(experiment, rank=0)
    return experiment


def place_job(job: Job) -> tuple[Job, int]:
    """The job for the ranks that train it, and the number of those on this machine.

    Raises:
        ConfigError: its runner cannot train in ranks, its batches cannot be divided, the affinity or machine does not
            fit, or a logger does not exist.
    """
    check_loggers(job.experiment.loggers)
    place = rank_from_environment()
    started = place.world_size > 1  # by torchrun
    experiment, notes = job.experiment, job.notes
    if experiment.learners == AUTO and started:
        experiment = chz.replace(experiment, learners=1)
    elif experiment.learners == AUTO:
        experiment, reason = hardware.choose_learners(experiment)
        notes = (*notes, *filter(None, [reason]))
    experiment = for_ranks(experiment, place.world_size if started else experiment.world_size)
    n_here = place.local_world_size if started else experiment.n_ranks
    check_machine(experiment, n_here)
    device = choose_device(experiment.device, hardware.affinity_of(experiment, 0, n_here).gpus)
    share_of(experiment, rank=0)
    if experiment.learners > 1 and device.type != "cpu":
        raise ConfigError(f"learners={experiment.learners} divides work among CPU cores; use learners=1 with {device}")
    precision = choose_precision(experiment.precision, device)  # the same on all ranks
    if place.max_restarts and not (job.resume or experiment.log_dir):
        raise ConfigError(
            f"--max-restarts={place.max_restarts}: restarted ranks continue their run; give log_dir=DIR, where it is"
        )
    return replace(job, experiment=chz.replace(experiment, precision=precision), notes=notes), n_here


def train(job: Job) -> TrainResult:
    """Train a job of `place_job` to its end.

    Raises:
        ConfigError: its parts do not fit together; nothing was written. Otherwise see `Runner.train`.
    """
    experiment = job.experiment
    return launch_ranks(partial(_train, job), experiment.n_ranks, experiment.n_samplers)


def describe_job(job: Job, n_here: int) -> str:
    """The config of a job of `place_job` and its processes, for dry_run=true; `n_here`: its ranks on this machine.

    Raises:
        ConfigError: its parts do not fit together.
    """
    resolved = hardware.resolve(share_of(job.experiment, 0), job.tune_sampler, 0, n_here, job.threads)
    config = to_flat(whole_of(resolved.experiment, job.experiment))
    return f"{json.dumps(config, indent=2)}\n{hardware.describe_processes(resolved)}"


def live_run(job: Job, log_dir: str) -> LiveRun:
    """A run of a single process, new or from the state of the job's `resume`, recorded if `log_dir` is not empty.

    Raises:
        ConfigError: it wants several ranks; its parts do not fit together.
    """
    if job.experiment.n_ranks > 1:
        raise ConfigError("build and restore are for one process; use train for world_size= and learners=")
    check_parts(job.experiment)
    experiment = chz.replace(job.experiment, learners=1, log_dir=log_dir)  # learners may be auto
    found = _newest_state(job.resume, experiment.snapshot_mode, 0) if job.resume else None
    resolved = hardware.resolve(experiment, job.tune_sampler, threads=job.threads)
    settings = without_init(resolved.experiment) if found else resolved.experiment
    built = build(settings, resolved.affinity)
    config = {**to_flat(resolved.experiment), "compile": built.compilation.name}
    run = LiveRun(built, config, _record_of(experiment) if log_dir else None)
    if found:
        with keeping(run.algo, changed_at(Path(job.resume), int(found[2]["env_steps"]))):
            run.load(found[1])
    return run


def _record_of(experiment: Experiment) -> dict[str, Any]:
    """The arguments of logger_context that an experiment decides, but for its config."""
    return {
        "log_dir": experiment.log_dir,
        "run_ID": experiment.run_ID,
        "name": experiment.title(),
        "snapshot_mode": experiment.snapshot_mode,
        "snapshot_gap": experiment.snapshot_gap,
        "snapshot_keep": experiment.snapshot_keep,
        "snapshot_best": experiment.snapshot_best,
        "snapshot_errors": experiment.snapshot_errors,
        "loggers": experiment.loggers,
        "log_level": experiment.log_level,
    }


def _train(job: Job, place: RankInfo) -> TrainResult:
    """Train as one rank, usually the only one."""
    experiment, resume = job.experiment, job.resume
    found = _newest_state(resume, experiment.snapshot_mode, place.rank) if resume else None
    retain_freed_memory()
    experiment, threads = (experiment, job.threads) if resume else _as_before(experiment, place)
    share = share_of(experiment, place.rank)
    tune = job.tune_sampler and place.rank < experiment.n_samplers
    resolved = hardware.resolve(share, tune, place.local_rank, place.local_world_size, threads)
    config = to_flat(whole_of(resolved.experiment, experiment))
    with pinned(resolved.affinity.master), _join(resolved, place) as ranks:
        if restarted := ranks.broadcast("" if resume else _run_of_this_job(experiment, config, place)):
            resume, found = restarted, _newest_state(restarted, experiment.snapshot_mode, place.rank)
        state = _common_state(found, ranks) if found else {}
        placed = chz.replace(experiment, log_dir=resume or experiment.log_dir)
        settings = without_init(resolved.experiment) if state else resolved.experiment  # state has the weights
        with (
            build(settings, resolved.affinity) as built,
            logger_context(config=config, resume=bool(resume), **_record_of(placed)) as run,
        ):
            if not place.rank:
                summary = [f"{name}: {text}" for name, text in built.summary.items()]
                for note in (*job.notes, *resolved.notes, resolved.affinity.describe(), *summary):
                    _logger.info(note)
                _logger.info(f"run: {run.directory}")
                compiles = {"compile": built.compilation.name} if experiment.compile == "auto" else {}
                run.record_choices({**hardware.choices_of(share, resolved), **compiles})
            if resume:
                _continue(built, state, resume, int(found[2]["env_steps"]) if found else 0)
            metrics = built.train()
    return TrainResult(run.directory, metrics)


def _continue(built: Built, state: Mapping[str, Any], resume: str, env_steps: int) -> None:
    if not state:
        current_run().trim(-1)
        _logger.info(f"{resume} has no snapshot yet: it starts from the beginning")
        return
    with keeping(built.runner.algo, changed_at(Path(resume), env_steps)):
        built.runner.resume(state)
    if reason := built.runner.end_reason:
        further = "raise runner.n_steps or runner.target_score, or change stop=, to continue"
        _logger.info(f"nothing is left to train: {reason}; {further}")


def _join(resolved: hardware.Resolved, place: RankInfo) -> AbstractContextManager[Ranks]:
    """Join the other ranks; each uses its own GPU if there are as many GPUs as ranks."""
    device = resolved.experiment.device
    own_gpu = device == "auto" and torch.cuda.device_count() >= place.local_world_size
    chosen = choose_device(device, resolved.affinity.gpus) if own_gpu else torch.device("cpu")
    return join(place, resolved.experiment.runner.timeout_s, chosen)


_Found = tuple[Path, Any, Mapping[str, Any]]  # a snapshot, its state, its facts


def _newest_state(run: str, snapshot_mode: str, rank: int) -> _Found | None:
    """The newest snapshot of a run; None if the run ended before its first."""
    if snapshot_mode != "none" and not list_snapshots(Path(run) / "snapshot"):
        return None
    found = load_newest(Path(run), rank)
    if not isinstance(found[1], dict) or not found[1]:
        raise SnapshotError(f"{found[0]} holds no training state; init= takes weights from it, if it has any")
    check_network(read_json(Path(run) / "params.json").get("config", {}), found[1].get("agent"), str(found[0]))
    return found


def _common_state(found: _Found, ranks: Ranks) -> Any:
    """This rank's state in the newest snapshot that all ranks can read."""
    own, state, facts = found
    _, oldest = min(ranks.gather((int(facts["env_steps"]), own.name)))
    return state if oldest == own.name else load_snapshot(own.with_name(oldest), ranks.rank)[0]


def _run_of_this_job(experiment: Experiment, config: Mapping[str, Any], place: RankInfo) -> str:
    """The run directory to continue if torchrun has restarted this job's ranks; else empty.

    A job is recognised by its run directory and the fixed part of its config, as torchrun may not report a restart.
    """
    directory = _directory_of(experiment)
    if not place.job or not experiment.log_dir or not (directory / "params.json").is_file():
        return ""
    before = read_json(directory / "params.json").get("config", {})
    same = all(before.get(key) == value for key, value in config.items() if _is_fixed(key))
    return str(directory) if same else ""


def _directory_of(experiment: Experiment) -> Path:
    return Path(experiment.log_dir).expanduser().absolute() / f"run_{experiment.run_ID}"


def _as_before(experiment: Experiment, place: RankInfo) -> tuple[Experiment, int]:
    """The experiment with the sampler, and the threads, that its job chose before torchrun restarted its ranks."""
    directory = _directory_of(experiment)
    if not _run_of_this_job(experiment, to_flat(experiment), place):
        return experiment, 0
    chosen = _chosen(directory)
    if experiment.sampler.undecided and "sampler" in chosen:
        config = read_json(directory / "params.json").get("config", {})
        of_sampler = {key: value for key, value in config.items() if key.startswith("sampler.")}
        before = from_flat({**to_flat(experiment), "sampler": chosen["sampler"], **of_sampler})
        experiment = chz.replace(experiment, sampler=before.sampler)
    return compiled_as(chosen, experiment), chosen.get("threads", 0)
