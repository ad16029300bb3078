"""A study of `rlframe.launch`: its runs are launches, checked before the first one starts."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.core.command_line import KeyValues
from rlframe.core.errors import ConfigError
from rlframe.experiment.config import Experiment, to_flat
from rlframe.experiment.trust import foreign
from rlframe.record.context import dated
from rlframe.study import plan
from rlframe.study.experiments import STUDY_KEYS, Experiments, naming, read_experiments, recorded_experiments
from rlframe.study.grid import MAX_RUNS, REPEATS, Grid, bare_key, read_grid
from rlframe.study.plan import PlannedRun
from rlframe.study.queue import QueueOptions
from rlframe.study.study import Study, execute, preview
from rlframe.system.affinity import read_topology

_SINGLE_RUN_KEYS = ("tune_sampler", "resume")
_COMMAND_LINE_KEYS = ("dry_run", "trust", "traceback")  # neither in a file nor in a study's record

Check = Callable[[dict[str, str]], Experiment]  # the config of a run's arguments; raises ConfigError


def run_sweep(words: KeyValues, check: Check) -> int:
    """Run or resume the study, or print its plan with `dry_run=true`; returns the exit status.

    Raises:
        ConfigError: the grid, a key or a value of any run is wrong; nothing has been started.
    """
    dry_run, resume, trust = words.flag("dry_run"), words.text("resume"), words.flag("trust")
    given = words.remaining
    if resume:
        command, experiments = recorded_experiments(Path(resume), given, trust)
    else:
        command, experiments = [f"{key}={value}" for key, value in given.items()], read_experiments(given)
    shared = _shared(experiments)
    options = QueueOptions(shared.count("retries", 0), float(shared.count("stall_s", int(QueueOptions.stall_s))))
    checked = _checked(_make_runs(experiments, Path(), trust), check)
    log_dir = resume or shared.text("log_dir")
    directory = Path(log_dir).expanduser().absolute() if log_dir else dated(_title(given, checked))
    runs = _make_runs(experiments, directory, trust)
    facts = {"command": command, "experiments": experiments, "grid": plan.varied(runs)}
    study = Study(directory, runs, {**facts, "config": _common_config(checked)}, f"resume={directory}")
    on_gpu = any(experiment.device != "cpu" for experiment in checked)
    slots = plan.make_slots(shared.text("affinity", "auto"), read_topology(), len(runs), on_gpu)
    if dry_run:
        print(preview(study, slots))
        return 0
    return execute(study, slots, options)


def _shared(experiments: Experiments) -> KeyValues:
    """The words for the whole study, which are the same in all experiments."""
    first = next(iter(experiments.values()))
    return KeyValues(f"{key}={first[key]}" for key in STUDY_KEYS if key in first)


def _make_runs(experiments: Experiments, directory: Path, trust: bool) -> tuple[PlannedRun, ...]:
    """The runs of all experiments, in the order in which they start."""
    shared, template, grids = _shared(experiments), run_template(trust), _grids(experiments)
    run_id, order = shared.count("run_ID", 0), shared.text("seeds", plan.INNERMOST)
    not_of_runs = (*STUDY_KEYS, REPEATS)
    runs: list[PlannedRun] = []
    for name, words in experiments.items():
        base = {key: value for key, value in words.items() if key not in not_of_runs and bare_key(key) == key}
        with naming(name):
            make_run = partial(template.make_run, directory, name)
            runs += plan.make_runs(make_run, base, grids[name].combinations(), run_id)
    ordered = plan.in_order(runs, order)
    return ordered if trust else tuple(map(trusting_itself, ordered))


def run_template(trust: bool) -> plan.CommandTemplate:
    """The launch command of a run."""
    command = (sys.executable, "-m", "rlframe.launch", *(("trust=true",) if trust else ()))
    return plan.CommandTemplate(command, resumes_by_directory=True)


def trusting_itself(run: PlannedRun) -> PlannedRun:
    """A run whose own arguments name foreign code may also be resumed with it."""
    if not foreign(run.arguments):
        return run
    return replace(run, resume_command=(*run.resume_command, "trust=true"))


def _grids(experiments: Experiments) -> dict[str, Grid]:
    """The grid of each experiment."""
    grids = {}
    for name, words in experiments.items():
        with naming(name):
            grids[name] = _grid(words)
    if (n_runs := sum(grid.n_runs() for grid in grids.values())) > MAX_RUNS:
        raise ConfigError(f"the study has {n_runs:,} runs, more than {MAX_RUNS:,}; sweep fewer values or keys")
    return grids


def _grid(words: Mapping[str, str]) -> Grid:
    grid = read_grid(words)
    keys = (*grid.swept, *grid.zipped)
    for key in (*STUDY_KEYS, *_SINGLE_RUN_KEYS, *_COMMAND_LINE_KEYS, REPEATS):
        if key in keys:
            raise ConfigError(f"{key} cannot be swept; remove sweep.{key} or zip.{key}")
    for key in _SINGLE_RUN_KEYS:
        if key in words:
            raise ConfigError(f"{key}={words[key]} is for a single run, not for a sweep; remove it")
    for key in _COMMAND_LINE_KEYS:
        if key in words:
            raise ConfigError(f"{key}={words[key]} belongs on the command line; remove it here")
    if "seed" in keys and "run_ID" in words:
        raise ConfigError(
            f"run_ID={words['run_ID']} conflicts with several seeds: a run's ID is its seed; remove run_ID"
        )
    return grid


def _title(given: Mapping[str, str], experiments: Sequence[Experiment]) -> str:
    titles = {experiment.title() for experiment in experiments}
    return titles.pop() if len(titles) == 1 else Path(given.get("experiment", "sweep")).stem


def _checked(runs: Sequence[PlannedRun], check: Check) -> list[Experiment]:
    experiments = []
    for run in runs:
        with naming(run.name if len(runs) > 1 or run.setting else ""):
            experiments.append(check(dict(run.arguments)))
    return experiments


def _common_config(experiments: list[Experiment]) -> dict[str, Any]:
    """The part of the config that is equal in all runs."""
    flats = [to_flat(experiment) for experiment in experiments]
    return {
        key: value
        for key, value in flats[0].items()
        if key not in STUDY_KEYS and all(key in flat and flat[key] == value for flat in flats)
    }
