"""`python -m rlframe.launch sweep.KEY=v1,v2 ...`: a grid of launches, checked as a whole and queued on slots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.core.command_line import Words
from rlframe.core.errors import ConfigError
from rlframe.experiment.config import Experiment, to_flat
from rlframe.experiment.trust import foreign, refuse_foreign
from rlframe.record.context import dated
from rlframe.study.plan import INNERMOST, SWEEP, Program, Run, deal, make_runs, read_grid, settings_of, split_values
from rlframe.study.queue import Options
from rlframe.study.record import FILE, read_record
from rlframe.study.study import Study, conduct, preview
from rlframe.system.affinity import read_topology

_OF_STUDY = ("log_dir", "run_ID", "affinity", "retries", "stall_s", "seeds")  # which have one value for all runs
_ADJUSTABLE = ("affinity", "retries", "stall_s")  # by a study that goes on
_ALONE = ("tune_sampler", "resume")  # of one run

Check = Callable[[dict[str, str]], Experiment]  # the config that the words of a run make, or ConfigError


def is_study(words: Mapping[str, str]) -> bool:
    """Whether the command line means many runs: it sweeps, or goes on with a study."""
    return any(key.startswith(SWEEP) for key in words) or ("resume" in words and _is_directory_of_study(words))


def _is_directory_of_study(words: Mapping[str, str]) -> bool:
    return (Path(words["resume"]) / FILE).is_file()


def run_sweep(words: Words, check: Check) -> int:
    """Run the sweep, or go on with it, or with `dry_run=true` say what would be run; returns the exit status.

    Raises:
        ConfigError: the grid, a key or a value of any of its runs is wrong; nothing has been started.
    """
    dry_run, resume, trust = words.flag("dry_run"), words.text("resume"), words.flag("trust")
    given = _with_recorded(Path(resume), words.rest, trust) if resume else dict(words.rest)
    study_words = Words(f"{key}={value}" for key, value in given.items() if key in _OF_STUDY)
    order = study_words.text("seeds", INNERMOST)
    options = Options(study_words.count("retries", 0), float(study_words.count("stall_s", int(Options.stall_s))))
    run_id = study_words.count("run_ID", 0)
    base = {key: value for key, value in given.items() if key not in _OF_STUDY and not key.startswith(SWEEP)}
    grid = _grid(given)
    seeds = grid.pop("seed", ())
    if seeds and "run_ID" in given:
        raise ConfigError(f"run_ID={run_id}: where seeds are swept, a run's ID is its seed; leave it out")
    command = (sys.executable, "-m", "rlframe.launch", *(("trust=true",) if trust else ()))
    program = Program(command, resumes_by_directory=True)

    def runs_in(directory: Path) -> tuple[Run, ...]:
        runs = make_runs(partial(program.run, directory), base, settings_of(grid), seeds, order, run_id)
        return tuple(run if trust else _trusting(run) for run in runs)

    experiments = _checked(runs_in(Path()), check)
    log_dir = resume or given.get("log_dir", "")
    directory = Path(log_dir).expanduser().absolute() if log_dir else dated(_title(experiments))
    facts = {
        "command": [f"{key}={value}" for key, value in given.items()],
        "grid": read_grid(given),
        "config": _in_common(experiments),
    }
    study = Study(directory, runs_in(directory), facts, f"resume={directory}")
    on_gpu = any(experiment.device != "cpu" for experiment in experiments)
    slots = deal(given.get("affinity", "auto"), read_topology(), len(study.runs), on_gpu)
    if dry_run:
        print(preview(study, slots))
        return 0
    return conduct(study, slots, options)


def _trusting(run: Run) -> Run:
    """The run, which may go on with what the words of its own command name."""
    return replace(run, again=(*run.again, "trust=true")) if foreign(run.words) else run


def _grid(words: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    grid = read_grid(words)
    for key in (*_OF_STUDY, *_ALONE, "dry_run"):
        if key in grid:
            raise ConfigError(f"sweep.{key}: {key} cannot be swept")
    for key in _ALONE:
        if key in words:
            raise ConfigError(f"{key}={words[key]} is for one run, not for a sweep; leave it out")
    return grid


def _with_recorded(directory: Path, words: Mapping[str, str], trust: bool) -> dict[str, str]:
    """The words that the study was begun with, and those of now that may differ."""
    fixed = [key for key in words if key not in _ADJUSTABLE]
    if fixed:
        raise ConfigError(
            f"resume={directory} goes on with the study as it is: {', '.join(fixed)} cannot change "
            f"(what can: {', '.join(_ADJUSTABLE)}); to add seeds or values, repeat its command with log_dir={directory}"
        )
    command = read_record(directory).get("command")
    if not isinstance(command, list) or not any(str(word).startswith(SWEEP) for word in command):
        raise ConfigError(f"{directory} is a study of a script; go on with it by that script, with log_dir={directory}")
    recorded = Words(map(str, command)).rest
    for name, text in recorded.items():
        key = name.removeprefix(SWEEP)
        for value in split_values(text) if key != name else [text]:
            refuse_foreign({key: value}, str(directory / FILE), trust)
    return recorded | dict(words)


def _checked(runs: tuple[Run, ...], check: Check) -> list[Experiment]:
    experiments = []
    for run in runs:
        try:
            experiments.append(check(dict(run.words)))
        except ConfigError as error:
            raise ConfigError(f"{run.name}: {error}" if len(runs) > 1 else str(error)) from error
    return experiments


def _title(experiments: list[Experiment]) -> str:
    titles = {experiment.title() for experiment in experiments}
    return titles.pop() if len(titles) == 1 else "sweep"


def _in_common(experiments: list[Experiment]) -> dict[str, Any]:
    """The config of all runs, where they agree."""
    flats = [to_flat(experiment) for experiment in experiments]
    return {
        key: value
        for key, value in flats[0].items()
        if key not in _OF_STUDY and all(key in flat and flat[key] == value for flat in flats)
    }
