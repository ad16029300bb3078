"""A study of `rlframe.launch`: its runs are launches, checked before the first one starts.

It has experiments, each with its key=value words: from the command line, a YAML file or a study's record.
"""

import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rlframe.analysis.curves import N_STEPS
from rlframe.core.command_line import KeyValues
from rlframe.core.config import split_values
from rlframe.core.errors import ConfigError, prefixed
from rlframe.experiment.config import Experiment
from rlframe.experiment.job import check_weights
from rlframe.experiment.objects import naming_start
from rlframe.experiment.presets import load_study
from rlframe.experiment.settings import to_flat
from rlframe.experiment.stacked import check_stackable
from rlframe.experiment.study_keys import (
    COMMAND_LINE_KEYS,
    PBT_KEYS,
    PLAN_KEYS,
    REPEATS,
    SEARCH,
    SEARCH_KEYS,
    SINGLE_RUN_KEYS,
    STUDY_KEYS,
    SWEEP,
    ZIP,
)
from rlframe.experiment.trust import check_trusted, foreign
from rlframe.record.context import dated, new_directory
from rlframe.study import plan
from rlframe.study.added import ADDED_FILE, Added, AddedRuns
from rlframe.study.pbt import PbtPlan, first_members
from rlframe.study.plan import MAX_RUNS, Grid, PlannedRun, bare_key, has_grid, read_grid
from rlframe.study.population import JOURNAL, read_journal
from rlframe.study.queue import QueueOptions
from rlframe.study.record import FILE, read_record
from rlframe.study.search import PBT, SearchPlan, check_installed
from rlframe.study.search_space import check_examples, read_domain
from rlframe.study.study import Study, execute, preview
from rlframe.study.words import Experiments, are_words, read_experiments
from rlframe.system.affinity import read_topology

LAUNCH = (sys.executable, "-m", "rlframe.launch")
ADJUSTABLE = ("affinity", "retries", "stall_s", "n_runs", N_STEPS)  # may change when a study is resumed

Check = Callable[[dict[str, str]], Experiment]  # the config of a run's arguments; raises ConfigError


def run_sweep(words: KeyValues, check: Check) -> int:
    """Run or resume the study, or print its plan with `dry_run=true`; returns the exit status.

    Raises:
        ConfigError: the grid, a key or a value of any run is wrong; nothing has been started.
    """
    dry_run, resume, trust = words.flag("dry_run"), words.text("resume"), words.flag("trust")
    given = words.remaining
    if resume:
        with naming_start(Path(resume) / FILE):
            study, slots, options = plan_study(*recorded_experiments(Path(resume), given, trust), check, trust, resume)
    else:
        command = [f"{key}={value}" for key, value in given.items()]
        study, slots, options = plan_study(command, read_experiments(given), check, trust)
    if dry_run:
        print(preview(study, slots))
        return 0
    return execute(study, slots, options)


def plan_study(
    command: list[str], experiments: Experiments, check: Check, trust: bool, directory: str = ""
) -> tuple[Study, list[plan.Slot], QueueOptions]:
    """The study of these experiments, its slots and options; nothing is written.

    Args:
        directory: that of the study, in the place of its log_dir.
    Raises:
        ConfigError: the grid, a key or a value of any run is wrong.
    """
    shared = _shared(experiments)
    options = QueueOptions(shared.count("retries", 0), float(shared.count("stall_s", int(QueueOptions.stall_s))))
    searches = any(name.startswith(SEARCH) for each in experiments.values() for name in each)
    given = {name: text for words in experiments.values() for name, text in words.items()}
    if not searches and (unused := [key for key in SEARCH_KEYS if key in given]):
        raise ConfigError(f"{unused[0]}={given[unused[0]]} is for a search: give it some search.KEY=uniform(LOW,HIGH)")

    def place(checked: Sequence[Experiment]) -> Path:
        log_dir = directory or shared.text("log_dir")
        return Path(os.path.abspath(Path(log_dir).expanduser())) if log_dir else dated(_title(command, checked))

    stack = shared.flag("stack")
    if searches and stack:
        raise ConfigError("stack=true is for the seeds of a grid, not for a search; leave it out")
    study, checked = (_searched if searches else _swept)(experiments, check, trust, place)
    for experiment in checked if stack else ():
        check_stackable(experiment)
    for experiment in () if (study.directory / FILE).exists() else checked:  # later its runs have weights of their own
        check_weights(experiment)
    config = _common_config(checked)
    facts = {"command": command, "experiments": experiments, "grid": plan.varied(study.runs)}
    facts |= {"started_in": _place_of(study.directory), "config": config}
    needs_trust = any(map(foreign, [config, *_settings_in(experiments)]))
    hint = shlex.quote(f"resume={study.directory}") + " trust=true" * needs_trust
    study = replace(study, facts=facts, resume_hint=hint)
    on_gpu = any(experiment.device != "cpu" for experiment in checked)
    n_processes = len({run.stack_command or run.name for run in study.runs}) or study.n_runs
    slots = plan.make_slots(shared.text("affinity", "auto"), read_topology(), n_processes, on_gpu)
    return study, slots, options


def _place_of(directory: Path) -> str:
    """Where a study was started first, from which names of code and files are looked up."""
    before = read_record(directory).get("started_in") if (directory / FILE).is_file() else None
    return str(before or Path.cwd())


Place = Callable[[Sequence[Experiment]], Path]  # the directory of a study of these configs
Planned = tuple[Study, list[Experiment]]  # a study and the configs of its runs, or of some of a search


def _swept(experiments: Experiments, check: Check, trust: bool, place: Place) -> Planned:
    """The study of all settings of a grid, and of the runs that were added to it."""
    checked = _checked(_make_runs(experiments, Path(), trust), check)
    directory = place(checked)
    runs = _make_runs(experiments, directory, trust)
    more = AddedRuns(directory, partial(make_added, directory, runs, trust, experiments), runs)
    added = more.more()
    return Study(directory, (*runs, *added), more=more), checked + _checked(added, check)


def make_added(
    directory: Path, runs: Sequence[PlannedRun], trust: bool, experiments: Experiments, added: Added
) -> PlannedRun:
    """The run that was added to a study of these runs, as long as those of its experiment if it has no own length.

    Raises:
        ConfigError: its words are not for a run, or name code that is in no word of the study, without `trust`.
    """
    check_addable(added.arguments)
    check_trusted(new_words(runs, added), str(directory / ADDED_FILE), trust)
    words = experiments.get(added.setting.partition("/")[0], experiments.get("", {}))
    length = {key: words[key] for key in (N_STEPS,) if key in words and not added.own_length}
    arguments = {**added.arguments, **length}
    return run_template(trust).make_run(directory, "", added.setting, added.run_ID, arguments)


def new_words(runs: Sequence[PlannedRun], added: Added) -> dict[str, str]:
    """The words of a run that none of the study's has."""
    own = {pair for run in runs for pair in run.arguments.items()}
    return {key: text for key, text in added.arguments.items() if (key, text) not in own}


def check_addable(words: Mapping[str, str]) -> None:
    """Raise ConfigError for words that are not of a single run of a study."""
    for key, text in words.items():
        if key in (*STUDY_KEYS, *PLAN_KEYS, *SINGLE_RUN_KEYS, *COMMAND_LINE_KEYS) or bare_key(key) != key:
            raise ConfigError(f"{key:.60}={text:.60} is not for a run that is added to a study; remove it")


def _searched(experiments: Experiments, check: Check, trust: bool, place: Place) -> Planned:
    """The study of settings that are searched."""
    if len(experiments) > 1:
        raise ConfigError(f"a search is of one experiment, not of {', '.join(experiments)}; make a study of each")
    (words,) = experiments.values()
    grid = _grid({key: x for key, x in words.items() if not key.startswith(SEARCH)})
    if grid.zipped or grid.swept.keys() - {"seed"}:
        raise ConfigError("a search has no sweep. or zip. but for the seeds of each trial (repeats=3, sweep.seed=)")
    seeds = grid.swept.get("seed", (words.get("seed", "0"),))
    search = SearchPlan.read(words, [KeyValues([f"seed={seed}"]).count("seed", 0) for seed in seeds])
    for key in (*STUDY_KEYS, *SINGLE_RUN_KEYS, *COMMAND_LINE_KEYS):
        if key in search.space:
            raise ConfigError(f"{key} cannot be searched; remove search.{key}")
    base = base_words(words)
    checked = check_examples(search.space, lambda values: check({**base, **values}))
    if search.searcher == PBT:
        return _with_population(words, base, checked, place, trust), checked
    if unused := [key for key in PBT_KEYS if key in words]:
        raise ConfigError(f"{unused[0]}={words[unused[0]]:.60} is for searcher={PBT}, not for {search.searcher}")
    search.check_seeds()
    every = min(checked[0].eval.interval_steps or math.inf, checked[0].runner.log_interval_steps)
    search = replace(search, interval_steps=int(every))
    check_installed(search)
    directory, template = place(checked), run_template(trust)

    def make_runs(setting: str, values: Mapping[str, str]) -> list[PlannedRun]:
        of_trial = {seed: {**base, **values, "seed": str(seed)} for seed in search.seeds}
        return [template.make_run(directory, "", setting, seed, each) for seed, each in of_trial.items()]

    return Study(directory, (), search=search, make_runs=make_runs), checked


def base_words(words: Mapping[str, str]) -> dict[str, str]:
    """The words of an experiment that all of its runs have."""
    not_of_runs = (*STUDY_KEYS, *PLAN_KEYS)
    return {key: value for key, value in words.items() if key not in not_of_runs and bare_key(key) == key}


def _with_population(
    words: Mapping[str, str], base: Mapping[str, str], checked: Sequence[Experiment], place: Place, trust: bool
) -> Study:
    """The study of a population, whose member k has seed + k."""
    for key in ("pruner", REPEATS, f"{SWEEP}seed", f"{ZIP}seed"):
        if key in words:
            raise ConfigError(
                f"{key}={words[key]:.60} is not for searcher={PBT}, whose members have seeds of their own"
            )
    population = PbtPlan.read(words, checked[0])
    directory, template = place(checked), run_template(trust)
    read_journal(directory / JOURNAL, population)  # raises ConfigError for that of another plan
    runs = []
    for k, member in enumerate(first_members(population)):
        seed = population.seed + k
        arguments = {**base, **member.settings, "seed": str(seed)}
        runs.append(template.make_run(directory, "", f"member_{k}", seed, arguments))
    return Study(directory, tuple(runs), population=population)


def _shared(experiments: Experiments) -> KeyValues:
    """The words for the whole study, which are the same in all experiments."""
    first = next(iter(experiments.values()))
    return KeyValues(f"{key}={first[key]}" for key in STUDY_KEYS if key in first)


def _make_runs(experiments: Experiments, directory: Path, trust: bool) -> tuple[PlannedRun, ...]:
    """The runs of all experiments, in the order in which they start."""
    shared, template, grids = _shared(experiments), run_template(trust), _grids(experiments)
    run_id, order = shared.count("run_ID", 0), shared.text("seeds", plan.INNERMOST)
    runs: list[PlannedRun] = []
    for name, words in experiments.items():
        base = base_words(words)
        with prefixed(name):
            make_run = partial(template.make_run, directory, name)
            runs += plan.make_runs(make_run, base, grids[name].combinations(), run_id)
    if shared.flag("stack"):
        runs = stacked(runs, template)
    return plan.in_order(runs, order)


def stacked(runs: Sequence[PlannedRun], template: plan.CommandTemplate) -> list[PlannedRun]:
    """The runs, whose seeds of a setting are trained in one process.

    Raises:
        ConfigError: no setting has several seeds.
    """
    if not any(n > 1 for n in Counter(run.setting for run in runs).values()):
        raise ConfigError("stack=true trains several seeds at once, and no setting of this study has; add repeats=N")
    found = []
    for run in runs:
        words = [f"{key}={value}" for key, value in run.arguments.items() if key != "seed"]
        place = f"log_dir={run.directory.parent}"
        found.append(replace(run, stack_command=(*template.command, *words, place)))
    return found


def run_template(trust: bool) -> plan.CommandTemplate:
    """The launch command of a run, which may be resumed with the foreign code that its own arguments name."""
    if trust:
        return plan.CommandTemplate((*LAUNCH, "trust=true"), resumes_by_directory=True)
    return plan.CommandTemplate(LAUNCH, resumes_by_directory=True, is_foreign=foreign)


def _grids(experiments: Experiments) -> dict[str, Grid]:
    """The grid of each experiment."""
    grids = {}
    for name, words in experiments.items():
        with prefixed(name):
            grids[name] = _grid(words)
    if (n_runs := sum(grid.n_runs() for grid in grids.values())) > MAX_RUNS:
        raise ConfigError(f"the study has {n_runs:,} runs, more than {MAX_RUNS:,}; sweep fewer values or keys")
    return grids


def _grid(words: Mapping[str, str]) -> Grid:
    grid = read_grid(words)
    keys = (*grid.swept, *grid.zipped)
    for key in (*STUDY_KEYS, *SINGLE_RUN_KEYS, *COMMAND_LINE_KEYS, REPEATS):
        if key in keys:
            raise ConfigError(f"{key} cannot be swept; remove sweep.{key} or zip.{key}")
    for key in SINGLE_RUN_KEYS:
        if key in words:
            raise ConfigError(f"{key}={words[key]} is for a single run, not for a sweep; remove it")
    for key in COMMAND_LINE_KEYS:
        if key in words:
            raise ConfigError(f"{key}={words[key]} belongs on the command line; remove it here")
    if "seed" in keys and "run_ID" in words:
        raise ConfigError(
            f"run_ID={words['run_ID']} conflicts with several seeds: a run's ID is its seed; remove run_ID"
        )
    return grid


def _title(command: list[str], experiments: Sequence[Experiment]) -> str:
    titles = {experiment.title() for experiment in experiments}
    source = KeyValues(command).text("experiment", "sweep")
    return titles.pop() if len(titles) == 1 else Path(source).stem


def _checked(runs: Sequence[PlannedRun], check: Check) -> list[Experiment]:
    experiments = []
    for run in runs:
        with prefixed(run.name if len(runs) > 1 or run.setting else ""):
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


def single_run(words: Mapping[str, str], experiment: Experiment) -> PlannedRun:
    """The run of a launch with these words, in the directory that it would have without retries.

    Raises:
        ConfigError: the directory cannot be created or holds a run.
    """
    if "resume" in words:
        command = (*LAUNCH, *[f"{key}={value}" for key, value in words.items()])
        return PlannedRun("", experiment.run_ID, words, Path(words["resume"]), command, command)
    directory = new_directory(experiment.log_dir, experiment.run_ID, experiment.title())
    template = run_template(words.get("trust", "").lower() == "true")
    arguments = {key: value for key, value in words.items() if key not in ("trust", "log_dir", "run_ID")}
    return template.make_run(directory.parent, "", "", experiment.run_ID, arguments)


def is_study(arguments: Mapping[str, str]) -> bool:
    """Whether the command line has a grid, names a YAML file that has one, or resumes a study."""
    if "resume" in arguments:
        return bool(arguments["resume"]) and (Path(arguments["resume"]) / FILE).is_file()
    return has_grid(arguments) or bool(arguments.get("experiment") and load_study(arguments["experiment"]))


def _settings_in(experiments: Experiments) -> Iterator[dict[str, str]]:
    """Each value of each key in the words of a study."""
    for name, text in chain.from_iterable(words.items() for words in experiments.values()):
        key = bare_key(name)
        if name.startswith(SEARCH):
            values: Sequence[str] = read_domain(name, text).examples()
        else:
            values = split_values(text) if key != name else [text]
        yield from ({key: value} for value in values)


def recorded_experiments(directory: Path, arguments: Mapping[str, str], trust: bool) -> tuple[list[str], Experiments]:
    """The command line and the experiments of a study, the adjustable words updated by those given now.

    Raises:
        ConfigError: another word is given; the study is a script's, damaged, or names code without `trust`.
    """
    fixed = [key for key in arguments if key not in ADJUSTABLE]
    if fixed:
        raise ConfigError(
            f"resume={directory} cannot change {', '.join(fixed)}, only {', '.join(ADJUSTABLE)}; to add seeds or "
            f"values, repeat the study's command with log_dir={directory}"
        )
    content = read_record(directory)
    command = content.get("command")
    if not isinstance(command, list) or "variants" in content:
        raise ConfigError(f"{directory} is the study of a script; run that script again with log_dir={directory}")
    command = [str(word) for word in command]
    experiments = content.get("experiments", {"": KeyValues(command).remaining})
    if not are_words(experiments):
        raise ConfigError(f"{directory / FILE} is damaged; move it away and use another log_dir")
    if N_STEPS in arguments and any(name.startswith(SEARCH) for words in experiments.values() for name in words):
        raise ConfigError(f"{N_STEPS} cannot change in a search, whose trials are compared at their ends")
    for setting in _settings_in(experiments):
        check_trusted(setting, str(directory / FILE), trust)
    return command, {name: words | dict(arguments) for name, words in experiments.items()}
