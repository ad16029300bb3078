"""A study runs its plan through the queue; `run_study` does so for scripts, `sweep` for `rlframe.launch`."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.core.command_line import run_command
from rlframe.core.errors import ConfigError, Interrupted, pluralize, printable
from rlframe.core.files import naming_disk_errors, replace_file
from rlframe.core.main_script import check_not_imported
from rlframe.core.objects import ObjectName
from rlframe.core.parts import dotted
from rlframe.core.yaml import format_value, is_passed_on, to_json
from rlframe.experiment.objects import named
from rlframe.record.context import dated
from rlframe.record.directory import PARAMS, edited_since
from rlframe.study.objects import StudyObjects
from rlframe.study.overview import read_study
from rlframe.study.pbt import PbtPlan
from rlframe.study.plan import (
    INNERMOST,
    CommandTemplate,
    PlannedRun,
    Slot,
    describe_slots,
    in_order,
    make_runs,
    make_slots,
)
from rlframe.study.population import Population
from rlframe.study.queue import NO_MORE, MoreRuns, Queue, QueueOptions
from rlframe.study.record import DONE, FAILED, FILE, INTERRUPTED, StudyRecord, read_record, restored
from rlframe.study.search import MakeRuns, Search, SearchPlan
from rlframe.study.table import SUMMARY_FILE, format_summary, open_status_table, summarize, summary_csv
from rlframe.system.affinity import read_topology
from rlframe.system.signals import StopRequest, stop_request

_SET_BY_QUEUE = ("seed", "log_dir", "run_ID", "affinity", "resume")
_DEFAULTS = QueueOptions()


@dataclass(frozen=True)
class Study:
    """The runs of a study, and the directory of its record."""

    directory: Path
    runs: tuple[PlannedRun, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # for experiment.json
    resume_hint: str = ""  # how to continue it
    search: SearchPlan | None = None  # which finds the settings of further runs
    make_runs: MakeRuns | None = None  # of a trial of the search
    more: MoreRuns = NO_MORE  # of a grid
    population: PbtPlan | None = None  # of which the runs are the members

    @property
    def n_runs(self) -> int:
        """With those of all trials."""
        return len(self.runs) if self.search is None else self.search.n_trials * len(self.search.seeds)


def execute(study: Study, slots: Sequence[Slot], options: QueueOptions) -> int:
    """Run all runs that are not done, and those of a search; returns the exit status: 0, or 1 if one is not done.

    Raises:
        ConfigError: the directory belongs to another study, or another queue has its lock.
        Interrupted: a signal stopped the queue; its runs have written their snapshots.
    """
    with stop_request() as stop, closing(StudyRecord(study.directory, study.runs, study.facts)) as record:
        search, population = None, None
        if study.search and study.make_runs:
            search = Search(study.search, study.directory, study.make_runs)
        if study.population is not None:
            population = Population(study.population, study.directory, study.runs, record.statuses)
        with naming_disk_errors("a study", study.directory):
            record.save()
        if search is not None:
            study = replace(study, runs=tuple(search.started()))
            record.add(study.runs)
            for run in study.runs:  # some may have ended just before the last queue did
                search.finished(run, record.statuses[run.name])
        n_done = sum(status.state == DONE for status in record.statuses.values())
        skipped = f", {n_done} already done" if n_done else ""
        what = pluralize(len(study.runs), "run") if search is None else pluralize(search.plan.n_trials, "trial")
        print(f"study: {study.directory}, {what}{skipped}")
        for line in [*_dropped(study, record), *_edits(study.runs, record)]:
            print(line)
        print(describe_slots(slots), flush=True)
        best: Callable[[], str] = search.describe_best if search is not None else str
        if population is not None:
            runs, signum = _run_intervals(population, slots, record, options, stop)
            best = population.describe_best
        else:
            with closing(open_status_table()) as table:
                queue = Queue(study.runs, slots, record, table, options, search or study.more)
                signum, runs = queue.run(stop), queue.runs
        if signum:
            raise Interrupted(signum, f"the queue was stopped; continue it with {study.resume_hint}")
        _summarize(replace(study, runs=tuple(runs)), record)
        if text := best():
            print(text, flush=True)
        here, directory = Path.cwd(), study.directory
        shown = directory.relative_to(here) if directory.is_relative_to(here) else directory
        print(f"plot: python -m rlframe.plot {shlex.quote(str(shown))}")
        if study.population is None and all(record.statuses[run.name].state == DONE for run in runs):
            out = "FOLDER/" if len({run.setting for run in runs}) > 1 else "FILE.csv"
            print(f"keep: python -m rlframe.results add {shlex.quote(str(shown))} out={out}")
        return int(any(status.state in (FAILED, INTERRUPTED) for status in record.statuses.values()))


def _dropped(study: Study, record: StudyRecord) -> list[str]:
    """A line of the runs that the command of a grid does not have any more, and that never started."""
    if not record.dropped or study.search is not None or study.population is not None:
        return []
    n, first = len(record.dropped), record.dropped[0]
    return [
        f"{pluralize(n, 'run')} of an earlier command never started and {'is' if n == 1 else 'are'} not in this one, "
        f"so the study does without: {first}" + (f" and {n - 1} more" if n > 1 else "")
    ]


def _edits(runs: Sequence[PlannedRun], record: StudyRecord) -> list[str]:
    """A line for each file or module that has changed since runs that are done."""
    done = [run for run in runs if record.statuses[run.name].state == DONE]
    changed: dict[str, list[str]] = {}
    for run in done:
        for name in edited_since(run.directory / PARAMS):
            changed.setdefault(name, []).append(run.name)
    return [
        f"warning: {name} has changed since {pluralize(len(names), 'run')} ended, or what it imports; they are not "
        f"repeated: remove their directories, of which {names[0]} is the first, or use another log_dir"
        for name, names in changed.items()
    ]


def _run_intervals(
    population: Population, slots: Sequence[Slot], record: StudyRecord, options: QueueOptions, stop: StopRequest
) -> tuple[list[PlannedRun], int]:
    """Train all members interval by interval; returns their runs, and the number of the signal that stopped them."""
    while True:
        print(population.describe(), flush=True)
        runs = population.start_interval()
        with closing(open_status_table()) as table:
            signum = Queue(runs, slots, record, table, options).run(stop)
        if signum or not population.advance():
            return population.runs_as_tuned(), signum
        if stop:  # it came as the last of the interval ended
            return population.runs_as_tuned(), stop.signum


def _summarize(study: Study, record: StudyRecord) -> None:
    """Print the summary and write summary.csv, if any run has logged a return; of a grid with all runs before it."""
    try:
        runs, statuses = study.runs, record.statuses
        if study.search is None and study.population is None:
            found = read_study(study.directory)
            runs, statuses = found.planned, found.statuses
        results = summarize(runs, statuses)
        if any(result.scores for result in results):
            print(f"\n{format_summary(results)}", flush=True)
            replace_file(study.directory / SUMMARY_FILE, summary_csv(results))
    except (ConfigError, OSError) as error:  # the runs are complete all the same
        print(printable(f"warning: no {SUMMARY_FILE}: {error}"), file=sys.stderr)


def preview(study: Study, slots: Sequence[Slot]) -> str:
    """The slots and the runs in their order, as `dry_run=true` prints them; raises ConfigError as `execute`."""
    lines = [f"study: {study.directory}, {pluralize(study.n_runs, 'run')}"]
    lines += [describe_slots(slots), *(["runs, in this order:"] if study.runs else [])]
    width = max((len(run.name) for run in study.runs), default=0)
    started: dict[Any, str] = {}  # the first run of each process
    saved = read_record(study.directory)["runs"] if (study.directory / FILE).exists() else []
    entries = {entry["name"]: entry for entry in saved}
    is_done = {run.name: restored(run, entries.get(run.name)).state == DONE for run in study.runs}
    for run in study.runs:
        index, process = len(started), run.stack_command or run.name
        place = f"slot {slots[index].index}" if index < len(slots) else "the next free slot"
        first = f"with {started[process]}" if process in started else place
        if not is_done[run.name]:
            started.setdefault(process, run.name)
        arguments = " ".join(f"{key}={value}" for key, value in run.arguments.items())
        lines.append(f"  {run.name:<{width}}  {'done' if is_done[run.name] else first:<18}  {arguments}".rstrip())
    plan = study.search or study.population
    return "\n".join([*lines, *([plan.describe()] if plan else [])])


def run_study(
    command: Sequence[str],
    variants: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    log_dir: str = "",
    affinity: str = "auto",
    order: str = INNERMOST,
    options: QueueOptions = _DEFAULTS,
) -> int:
    """Run every variant with every seed on the slots of `affinity`; returns the exit status.

    A run is `command key=value ... seed=N log_dir=DIR run_ID=N affinity=CODE` and writes to DIR/run_<N>. If it has a
    snapshot but is not done, because it failed or was interrupted, `resume=true` is added.

    Args:
        command: such as [sys.executable, __file__, "train"].
        variants: the settings; lists and tuples are written as 64,64. As in rlframe.train, keys of a group may be a
            dict, and classes, functions, instances and Configs may take the place of names.
        log_dir: the study's directory; an existing one is continued. Empty: a new directory below data/.
        order: innermost runs all seeds of a variant first; outermost runs all variants with the first seed first.
    """

    def body(_: list[str]) -> int:
        if not variants or not seeds:
            n, n_seeds = len(variants), len(seeds)
            raise ConfigError(f"a study needs at least one variant and one seed, not {n} and {n_seeds}")
        check_not_imported("run_study")
        reserved = sorted({key for variant in variants for key in variant if key in _SET_BY_QUEUE})
        if reserved:
            raise ConfigError(f"a variant sets {', '.join(reserved)}, which the queue sets for every run; remove it")
        directory = Path(log_dir).expanduser().absolute() if log_dir else dated("study")
        objects = StudyObjects(directory)
        arguments = [words_of_variant(variant, command, objects) for variant in variants]
        template = CommandTemplate(tuple(command), resumes_by_directory=False)
        base = {key: value for key, value in arguments[0].items() if all(each.get(key) == value for each in arguments)}
        settings = [{key: value for key, value in each.items() if key not in base} for each in arguments]
        combinations = [{**setting, "seed": str(seed)} for setting in settings for seed in seeds]
        runs = in_order(make_runs(partial(template.make_run, directory, ""), base, combinations), order)
        facts = {"command": list(command), "variants": arguments, "seeds": list(seeds)}
        study = Study(directory, runs, facts, f"the same script with log_dir={directory}")
        slots = make_slots(affinity, read_topology(), len(runs))
        with objects.kept():
            return execute(study, slots, options)

    return run_command(body, [])


def words_of_variant(variant: Mapping[str, Any], command: Sequence[str], objects: StudyObjects) -> dict[str, str]:
    """The settings of a variant as words of a command, whose objects are named by `objects`."""
    words: dict[str, str] = {}
    for key, value in dotted(variant.items()).items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        is_plain = all(isinstance(part, str | int | float | None) for part in parts)
        words |= {
            name: _text(name, each, command, objects)
            for name, each in ({key: value} if is_plain else named({key: value})).items()
        }
    return words


def _text(key: str, value: Any, command: Sequence[str], objects: StudyObjects) -> str:
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and is_passed_on(key)):
        try:
            return format_value(to_json(value))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
    if isinstance(value, list | tuple):
        return ",".join(_text(key, each, command, objects) for each in value)
    return objects.name(value, command) if isinstance(value, ObjectName) else str(value)
