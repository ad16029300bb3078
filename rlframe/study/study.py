"""A study: its runs go through the queue, and leave a record, a table and an exit status. Also for scripts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.core.command_line import run_command
from rlframe.core.errors import ConfigError, Interrupted, counted
from rlframe.record.context import dated
from rlframe.study.plan import INNERMOST, Program, Run, Slot, deal, describe, make_runs
from rlframe.study.queue import Options, Queue
from rlframe.study.record import DONE, FAILED, Record
from rlframe.study.table import open_display
from rlframe.system.affinity import read_topology


@dataclass(frozen=True)
class Study:
    """Runs that belong together, and where their record is."""

    directory: Path
    runs: tuple[Run, ...]
    facts: Mapping[str, Any]  # for experiment.json
    again: str  # what goes on with it, in words


def conduct(study: Study, slots: Sequence[Slot], options: Options) -> int:
    """Run all that is not done; the exit status: 0, or 1 if a run failed.

    Raises:
        ConfigError: the directory belongs to another study, or a queue is at it.
        Interrupted: a signal stopped the queue; what was under way has its snapshots.
    """
    with closing(Record(study.directory, study.runs, study.facts)) as record:
        n_done = sum(status.state == DONE for status in record.statuses.values())
        skipped = f", {n_done} of them done before" if n_done else ""
        print(f"study: {study.directory}, {counted(len(study.runs), 'run')}{skipped}\n{describe(slots)}", flush=True)
        with closing(open_display()) as display:
            stopped = Queue(study.runs, slots, record, display, options).run()
        if stopped:
            raise Interrupted(stopped, f"the queue has stopped; it goes on by {study.again}")
        print(f"plot: python -m rlframe.plot {shlex.quote(str(_shown(study.directory)))}")
        return int(any(status.state == FAILED for status in record.statuses.values()))


def _shown(directory: Path) -> Path:
    return directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory


def preview(study: Study, slots: Sequence[Slot]) -> str:
    """Who would run where: what `dry_run=true` prints. The queue gives a run to whichever slot is free."""
    lines = [f"study: {study.directory}, {counted(len(study.runs), 'run')}", describe(slots), "runs, in this order:"]
    width = max(len(run.name) for run in study.runs)
    for index, run in enumerate(study.runs):
        first = f"slot {slots[index].index}" if index < len(slots) else "the next free slot"
        words = " ".join(f"{key}={value}" for key, value in run.words.items())
        lines.append(f"  {run.name:<{width}}  {first:<18}  {words}".rstrip())
    return "\n".join(lines)


_OF_QUEUE = ("seed", "log_dir", "run_ID", "affinity", "resume")  # words that the queue gives to a run
_DEFAULTS = Options()


def run_study(
    command: Sequence[str],
    variants: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    log_dir: str = "",
    affinity: str = "auto",
    order: str = INNERMOST,
    options: Options = _DEFAULTS,
) -> int:
    """Run every variant with every seed on the slots that `affinity` makes; returns the exit status.

    A run is `command key=value ... seed=N log_dir=DIR run_ID=N affinity=CODE`, and lives in DIR/run_<N>. If it has a
    snapshot there and did not finish, because it failed or the study was interrupted, it gets `resume=true` beside.

    Args:
        command: such as [sys.executable, __file__, "train"].
        variants: the settings; lists and tuples are written 64,64.
        log_dir: the study's directory; calling again with it goes on with the study. Empty: a new one below data/.
        order: innermost, all seeds of a variant one after another; outermost, all variants with the first seed first.
    """

    def body(_: list[str]) -> int:
        _check(variants, seeds)
        directory = Path(log_dir).expanduser().absolute() if log_dir else dated("study")
        words = [{key: _text(value) for key, value in variant.items()} for variant in variants]
        program = Program(tuple(command), resumes_by_directory=False)
        base = {key: value for key, value in words[0].items() if all(each.get(key) == value for each in words)}
        settings = [{key: value for key, value in each.items() if key not in base} for each in words]
        runs = make_runs(partial(program.run, directory), base, settings, [str(seed) for seed in seeds], order)
        facts = {"command": list(command), "variants": words, "seeds": list(seeds)}
        study = Study(directory, runs, facts, f"the same script with log_dir={directory}")
        return conduct(study, deal(affinity, read_topology(), len(runs)), options)

    return run_command(body, [])


def _check(variants: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> None:
    if not variants or not seeds:
        raise ConfigError(f"{len(variants)} variants and {len(seeds)} seeds make no study: at least one of each")
    taken = sorted({key for variant in variants for key in variant if key in _OF_QUEUE})
    if taken:
        raise ConfigError(f"a variant sets {', '.join(taken)}, which the queue gives to every run")


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
