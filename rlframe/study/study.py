"""A study, whole: its runs go through the queue, and what remains is a record, a table and an exit status."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.core.errors import Interrupted, counted
from rlframe.study.plan import Run
from rlframe.study.queue import Options, Queue
from rlframe.study.record import DONE, FAILED, Record
from rlframe.study.slots import Slot, describe
from rlframe.study.table import open_display


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
