"""`python -m rlframe.launch sweep.KEY=v1,v2 ...`: a grid of launches, checked before the first one starts."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.core.command_line import KeyValues
from rlframe.core.errors import ConfigError
from rlframe.experiment.config import Experiment, to_flat
from rlframe.experiment.trust import check_trusted, foreign
from rlframe.record.context import dated
from rlframe.study import plan
from rlframe.study.plan import SWEEP, Run
from rlframe.study.queue import Options
from rlframe.study.record import FILE, read_record
from rlframe.study.study import Study, execute, preview
from rlframe.system.affinity import read_topology

_STUDY_KEYS = ("log_dir", "run_ID", "affinity", "retries", "stall_s", "seeds")  # one value for all runs
_ADJUSTABLE = ("affinity", "retries", "stall_s")  # may change when a study is resumed
_SINGLE_RUN_KEYS = ("tune_sampler", "resume")

Check = Callable[[dict[str, str]], Experiment]  # the config of a run's arguments; raises ConfigError


def is_study(arguments: Mapping[str, str]) -> bool:
    """Whether the command line has a sweep or resumes a study."""
    swept = any(key.startswith(SWEEP) for key in arguments)
    return swept or ("resume" in arguments and (Path(arguments["resume"]) / FILE).is_file())


def run_sweep(words: KeyValues, check: Check) -> int:
    """Run or resume the sweep, or print its plan with `dry_run=true`; returns the exit status.

    Raises:
        ConfigError: the grid, a key or a value of any run is wrong; nothing has been started.
    """
    dry_run, resume, trust = words.flag("dry_run"), words.text("resume"), words.flag("trust")
    given = _with_recorded(Path(resume), words.remaining, trust) if resume else dict(words.remaining)
    study_words = KeyValues(f"{key}={value}" for key, value in given.items() if key in _STUDY_KEYS)
    order = study_words.text("seeds", plan.INNERMOST)
    options = Options(study_words.count("retries", 0), float(study_words.count("stall_s", int(Options.stall_s))))
    run_id = study_words.count("run_ID", 0)
    base = {key: value for key, value in given.items() if key not in _STUDY_KEYS and not key.startswith(SWEEP)}
    grid = _grid(given)
    seeds = grid.pop("seed", ())
    if seeds and "run_ID" in given:
        raise ConfigError(f"run_ID={run_id} conflicts with sweep.seed: a run's ID is its seed; remove run_ID")
    command = (sys.executable, "-m", "rlframe.launch", *(("trust=true",) if trust else ()))
    template = plan.CommandTemplate(command, resumes_by_directory=True)

    def runs_in(directory: Path) -> tuple[Run, ...]:
        runs = plan.make_runs(partial(template.make_run, directory), base, plan.expand_grid(grid), seeds, order, run_id)
        if trust:
            return runs
        # A run whose own arguments name foreign code may also be resumed with it.
        return tuple(
            replace(run, resume_command=(*run.resume_command, "trust=true")) if foreign(run.arguments) else run
            for run in runs
        )

    experiments = _checked(runs_in(Path()), check)
    log_dir = resume or given.get("log_dir", "")
    titles = {experiment.title() for experiment in experiments}
    title = titles.pop() if len(titles) == 1 else "sweep"
    directory = Path(log_dir).expanduser().absolute() if log_dir else dated(title)
    facts = {
        "command": [f"{key}={value}" for key, value in given.items()],
        "grid": plan.read_grid(given),
        "config": _common_config(experiments),
    }
    study = Study(directory, runs_in(directory), facts, f"resume={directory}")
    on_gpu = any(experiment.device != "cpu" for experiment in experiments)
    slots = plan.make_slots(given.get("affinity", "auto"), read_topology(), len(study.runs), on_gpu)
    if dry_run:
        print(preview(study, slots))
        return 0
    return execute(study, slots, options)


def _grid(arguments: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    grid = plan.read_grid(arguments)
    for key in (*_STUDY_KEYS, *_SINGLE_RUN_KEYS, "dry_run"):
        if key in grid:
            raise ConfigError(f"sweep.{key}: {key} cannot be swept")
    for key in _SINGLE_RUN_KEYS:
        if key in arguments:
            raise ConfigError(f"{key}={arguments[key]} is for a single run, not for a sweep; remove it")
    return grid


def _with_recorded(directory: Path, arguments: Mapping[str, str], trust: bool) -> dict[str, str]:
    """The arguments the study was started with, updated by the adjustable ones given now."""
    fixed = [key for key in arguments if key not in _ADJUSTABLE]
    if fixed:
        raise ConfigError(
            f"resume={directory} cannot change {', '.join(fixed)}, only {', '.join(_ADJUSTABLE)}; to add seeds or "
            f"values, repeat the study's command with log_dir={directory}"
        )
    command = read_record(directory).get("command")
    if not isinstance(command, list) or not any(str(word).startswith(SWEEP) for word in command):
        raise ConfigError(f"{directory} is the study of a script; run that script again with log_dir={directory}")
    recorded = KeyValues(map(str, command)).remaining
    for name, text in recorded.items():
        key = name.removeprefix(SWEEP)
        for value in plan.split_values(text) if key != name else [text]:
            check_trusted({key: value}, str(directory / FILE), trust)
    return recorded | dict(arguments)


def _checked(runs: tuple[Run, ...], check: Check) -> list[Experiment]:
    experiments = []
    for run in runs:
        try:
            experiments.append(check(dict(run.arguments)))
        except ConfigError as error:
            raise ConfigError(f"{run.name}: {error}" if len(runs) > 1 else str(error)) from error
    return experiments


def _common_config(experiments: list[Experiment]) -> dict[str, Any]:
    """The part of the config that is equal in all runs."""
    flats = [to_flat(experiment) for experiment in experiments]
    return {
        key: value
        for key, value in flats[0].items()
        if key not in _STUDY_KEYS and all(key in flat and flat[key] == value for flat in flats)
    }
