"""Job: the run that keys of the command line describe, checked and placed on ranks before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chz

from rlframe.core.command_line import KeyValues
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, prefixed
from rlframe.core.files import read_json
from rlframe.core.names import find_attribute
from rlframe.core.parts import ROOTS, module_names
from rlframe.data.writing import check_free, check_name
from rlframe.evaluation.function import find_function
from rlframe.experiment import hardware
from rlframe.experiment.compilation import compiled_as
from rlframe.experiment.config import Experiment, kind_of
from rlframe.experiment.defaults import algorithm_defaults
from rlframe.experiment.keys import idle_keys, keys_of
from rlframe.experiment.limits import check_machine
from rlframe.experiment.objects import naming_start, recorded
from rlframe.experiment.presets import (
    AUTO_PRESET,
    best_preset,
    is_measured,
    load_preset,
    load_study,
    presets_for,
    with_default,
)
from rlframe.experiment.ranks import for_ranks, share_of
from rlframe.experiment.resumable import CheckResumed, check_same_run
from rlframe.experiment.settings import from_flat, long_keys, merge
from rlframe.experiment.trust import NEW_WEIGHTS, check_sync, check_trusted, read_config
from rlframe.experiment.weights import located
from rlframe.kernels.device import choose_device, choose_precision
from rlframe.record.directory import run_directory, run_tokens
from rlframe.record.loggers import check_loggers
from rlframe.record.remote import check_uri
from rlframe.runners.callbacks import check_callbacks
from rlframe.runners.recording import named_for
from rlframe.system import cluster
from rlframe.system.distributed import rank_from_environment

_CONTROL = ("experiment", "resume", "trust", "tune_sampler")  # keys that are not fields of Experiment
_SHOWN = 4  # presets in a note
_CANDIDATES = ("serial", "cpu", "gpu")  # of sampler=auto
_NEEDED = ("algo", "env", "sampler.batch_T", "sampler.batch_B", "runner.n_steps")  # to rebuild a run from its config

Source = tuple[str, Mapping[str, Any]]  # a name for --show, and the keys that it gives


@dataclass(frozen=True)
class Job:
    """A run to train."""

    experiment: Experiment
    resume: str  # its run directory, if it is resumed
    tune_sampler: bool  # measure all samplers
    notes: tuple[str, ...]  # where its settings come from, for the log
    sources: tuple[Source, ...]  # of its settings, the first has precedence
    threads: int = 0  # that the resumed run chose for threads=auto; 0: none

    def left_to_machine(self, key: str) -> bool:
        """Whether nobody gave this key a value but auto."""
        return str(next((keys[key] for _, keys in self.sources if key in keys), "auto")).lower() == "auto"


def read_job(keys: Mapping[str, Any], check_resumed: CheckResumed = check_same_run) -> Job:
    """The run that keys of the command line describe, with the preset or the resumed run below them.

    Below these are the defaults of the algorithm, but for a resumed run, which has a value for every key.

    Args:
        check_resumed: raises ConfigError for keys that a resumed run cannot take.
    Raises:
        ConfigError: an unknown key or a wrong value; a preset or run that does not exist or needs trust=true.
    """
    control = KeyValues(f"{key}={keys[key]}" for key in _CONTROL if key in keys)
    for key in ("resume", "experiment"):
        if keys.get(key) == "":
            raise ConfigError(f"{key}= is empty, perhaps an unset shell variable; give a value, or leave {key} out")
    keys = {key: value for key, value in keys.items() if key not in _CONTROL}
    resume, preset, trust = control.text("resume"), control.text("experiment"), control.flag("trust")
    if resume and preset:
        raise ConfigError(f"experiment={preset} is not for resume={resume}, which goes on with its own; leave one out")
    tune = control.flag("tune_sampler")
    if resume:
        return _resumed_job(resume, _recorded_config(resume, keys, trust, check_resumed), keys, tune)
    if preset == AUTO_PRESET:
        preset = best_preset(str(keys.get("algo", "ppo")), str(keys.get("env", "CartPole-v1")))
    base, notes = _preset(preset, keys, trust)
    notes = (*notes, *_left_out(base, keys))
    below = algorithm_defaults(base, keys)
    experiment = from_flat(below[1], base, keys)
    sources = (("command line", keys), (f"experiment={preset}", base), below)
    return Job(experiment, "", tune, (*notes, *_idle(experiment, long_keys(keys))), sources)


def _resumed_job(resume: str, config: Mapping[str, Any], keys: Mapping[str, Any], tune: bool) -> Job:
    """The job that goes on with a run of this config and with what it chose; the keys are above its own."""
    notes = [f"resuming {resume}"]
    if not tune:
        keys, kept = _without_auto(keys, config)
        notes += kept
    notes += _left_out(config, keys)
    chosen = choices_made(Path(resume))
    try:
        experiment = from_flat(config, keys)
    except ConfigError:
        with prefixed(f"{resume}/params.json does not fit your code as it is now"):
            from_flat(config)
        raise
    asked, recorded = str(keys.get("compile", "")).lower(), str(config.get("compile", "auto")).lower()
    experiment, of_updates = compiled_as(chosen, experiment, asked, recorded)
    notes += [*of_updates, *_idle(experiment, long_keys(keys))]
    sources = (("command line", keys), (f"resume={resume}", config))
    return Job(experiment, resume, tune, tuple(notes), sources, chosen.get("threads", 0))


def _left_out(below: Mapping[str, Any], keys: Mapping[str, Any]) -> list[str]:
    """A note of the settings below the command line whose part it replaces by another that has none such."""
    if not (dropped := merge(below, keys)[1]):
        return []
    given = long_keys(below)
    return [f"left out, as unknown now: {', '.join(f'{key}={given[key]}' for key in dropped)}"]


def _idle(experiment: Experiment, given: Mapping[str, Any]) -> list[str]:
    """A note for each key of the command line that does nothing beside the value of another.

    Those of the run's algorithm and model are not judged where policies have their own.
    """
    inherited = ("algo.", "model.") if experiment.agents.policies else ()
    found = [(key, other) for key, other in idle_keys(experiment) if key in given and not key.startswith(inherited)]
    values = {key.name: key.value for key in keys_of(experiment)} if found else {}
    return [f"{key}={given[key]} does nothing with {other}={values[other]}" for key, other in found]


def _preset(preset: str, keys: Mapping[str, Any], trust: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not preset and "env" not in keys and "dataset" in (keys.get("algo.replay"), keys.get("replay")):
        return {}, ()  # the environment is the dataset's
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
        for key in ("sync", "record", "record_compression", "record_transform"):  # where that run wrote to
            config.pop(key, None)
        check_trusted(config, preset, trust, NEW_WEIGHTS)
        config.pop("log_dir", None)
    return config, (f"experiment={preset}", *_of_its_task(preset, config, keys))


def _of_its_task(preset: str, config: Mapping[str, Any], keys: Mapping[str, Any]) -> tuple[str, ...]:
    """A line on a number that a preset has of its environment's actions, where another environment is given."""
    own, given, key = config.get("env"), keys.get("env"), "algo.target_entropy"
    names = [str(env).rpartition("-v")[0] or str(env) for env in (own, given)]
    if key not in config or key in keys or given is None or names[0] == names[1]:
        return ()
    return (f"experiment={preset} has {key}={config[key]} of {own}, which may not fit {given}; -dim(A) is usual",)


def _presets_to_take(algo: str, env: str) -> tuple[str, ...]:
    """A line that names the presets of the algorithm for the environment; of rlframe's without any, those of others."""
    if names := presets_for(env, algo):
        best, others = names[0], names[1:]
        also = f"; others: {_listed(others)}" if others else ""
        what = "a preset" if is_measured(best) else "an unmeasured preset"
        return (f"experiment={best} is {what} for algo={algo} on {env}, and what experiment=auto takes{also}",)
    others = presets_for(env) if algo.lower() in module_names(ROOTS["algo"]) else []
    return (f"presets for this environment: {_listed(others)}",) if others else ()


def _listed(presets: list[str]) -> str:
    """The first of them, as keys."""
    shown = ", ".join(f"experiment={name}" for name in presets[:_SHOWN])
    return f"{shown} (--list presets has all)" if len(presets) > _SHOWN else shown


def _recorded_config(resume: str, keys: Mapping[str, Any], trust: bool, check_resumed: CheckResumed) -> dict[str, Any]:
    """The config of a run that can be resumed with these keys. Raises ConfigError if there is none."""
    path = Path(resume) / "params.json"
    if not path.is_file():
        runs = sorted(run.name for run in Path(resume).glob("run_*"))[:5]
        hint = f"it holds {', '.join(runs)}: give one of them" if runs else "name a run directory on this machine"
        raise ConfigError(f"resume={resume}: there is no {path}; {hint}")
    given = long_keys(keys)
    with naming_start(path):
        config = recorded(read_config(path, trust, given), given, str(path))
    check_sync(config, given, str(path), trust)
    check_resumed(resume, config, given)
    missing = [key for key in _NEEDED if key not in config]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: a script wrote it, so resume the run from that script")
    return config


def _without_auto(keys: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Keys of a resumed run but sampler=auto and sampler.n_workers=auto, which it has settled; and notes of these."""
    settled = {key: base[key] for key in ("sampler", "sampler.n_workers") if keys.get(key) == "auto" and key in base}
    left_out = {key: value for key, value in settled.items() if value != "auto"}
    notes = [
        f"{key}=auto: {value}, as before, since another may round otherwise; name one to change it"
        for key, value in left_out.items()
    ]
    return {key: value for key, value in keys.items() if key not in left_out}, notes


def choices_made(run: Path) -> dict[str, Any]:
    """What a run chose for settings that were auto, by its params.json; without entries that cannot be so."""
    found = read_json(run / "params.json").get("chosen")
    chosen = found if isinstance(found, dict) else {}
    kept = {
        "threads": type(chosen.get("threads")) is int,
        "sampler": chosen.get("sampler") in _CANDIDATES,
        "compile": chosen.get("compile") in ("true", "false"),
    }
    return {key: chosen[key] for key, valid in kept.items() if valid}


def _check_references(c: Experiment) -> None:
    """Raise ConfigError unless the loggers, callbacks, functions, place and dataset that it names can be used."""
    check_loggers(c.loggers)
    check_callbacks(c.callbacks)
    c.sampler.find_statistics()
    if c.agents.map_function:
        find_attribute(c.agents.map_function, "agents.map")
    if c.eval.function:
        find_function(c.eval.function)
    check_uri(c.sync, "sync")
    if c.record:
        check_name(named_for(c.record, c.seed, c.run_ID, rank=0), "record")


def check_weights(c: Experiment) -> None:
    """Raise ConfigError if a new run is to begin with weights that are not there; a resumed one has its own."""
    for name in c.agents.league.members:
        located(name, f"agents.league.members={name}")
    for name, each in {"": c, **c.agents.policies}.items():
        if each.init:
            located(each.init, f"init={each.init}" + (f" of policy {name}" if name else ""))


def _check_new_dataset(c: Experiment) -> None:
    """Raise ConfigError if a dataset is in the way of a new run that is not that of an attempt of it."""
    if c.record:
        own = run_tokens(run_directory(c.log_dir, c.run_ID)) if c.log_dir else []
        check_free(named_for(c.record, c.seed, c.run_ID, rank=0), "record", own)


def check_job(job: Job) -> Experiment:
    """The experiment of a job that a study queues.

    Raises:
        ConfigError: its runner cannot train in ranks, its batches cannot be divided, the machine is too small, or a
            logger, callback, function or device does not exist.
    """
    if job.experiment.learners == AUTO:
        raise ConfigError("learners=auto measures on a machine that does nothing else; give a study learners=N")
    _check_references(job.experiment)  # a run of a study checks itself whether a dataset is in its way
    choose_device(job.experiment.device)
    experiment = for_ranks(job.experiment, job.experiment.world_size)
    check_machine(experiment, experiment.n_ranks)
    share_of(experiment, rank=0)
    return experiment


def check_words(words: Mapping[str, str]) -> Experiment:
    """The experiment of the words of a launch that a study queues; raises ConfigError as `check_job` and `read_job`."""
    return check_job(read_job(with_default(words)))


def place_job(job: Job) -> tuple[Job, int]:
    """The job for the ranks that train it, and the number of those on this machine.

    Raises:
        ConfigError: its runner cannot train in ranks, its batches cannot be divided, the affinity or machine does not
            fit, or a logger does not exist.
    """
    _check_references(job.experiment)
    if not job.resume:
        check_weights(job.experiment)
        _check_new_dataset(job.experiment)
    place = rank_from_environment()
    started = place.world_size > 1  # by torchrun
    experiment, notes = job.experiment, job.notes
    if experiment.learners == AUTO and started:
        experiment = chz.replace(experiment, learners=1)
    elif experiment.learners == AUTO:
        experiment, reason = hardware.choose_learners(experiment)
        notes = (*notes, *filter(None, [reason]))
    if getattr(experiment.algo, "imitates", False) and not experiment.algo.replay.has_data:
        name = kind_of("algo", experiment.algo)
        note = f"without data algo={name} imitates its own play; give algo.replay=dataset algo.replay.path=NAME"
        notes = (*notes, note)
    experiment = for_ranks(experiment, place.world_size if started else experiment.world_size)
    n_here = place.local_world_size if started else experiment.n_ranks
    check_machine(experiment, n_here)
    device = choose_device(experiment.device, hardware.affinity_of(experiment, 0, n_here).gpus)
    if experiment.sampler.device:
        choose_device(experiment.sampler.device, key="sampler.device")
    if experiment.on_ray():
        cluster.imported()
    share_of(experiment, rank=0)
    if experiment.learners > 1 and device.type != "cpu":
        raise ConfigError(f"learners={experiment.learners} divides work among CPU cores; use learners=1 with {device}")
    precision = choose_precision(experiment.precision, device)  # the same on all ranks
    if place.max_restarts and not (job.resume or experiment.log_dir):
        raise ConfigError(
            f"--max-restarts={place.max_restarts}: restarted ranks continue their run; give log_dir=DIR, where it is"
        )
    return replace(job, experiment=chz.replace(experiment, precision=precision), notes=notes), n_here
