"""What a study's directory says of its runs, while a queue runs in another process or after it, also as rows."""

import math
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.curves import RunData, read_run
from rlframe.analysis.trials import SEARCH_JOURNAL, SearchData, read_search
from rlframe.core.errors import ConfigError, pluralize, printable
from rlframe.record.directory import LOCK_FILE, LockHolder, read_lock
from rlframe.record.metrics import signed
from rlframe.study.added import read_added
from rlframe.study.plan import PlannedRun, number_or_text, varied
from rlframe.study.population import JOURNAL, as_tuned, read_population
from rlframe.study.record import DONE, FILE, INTERRUPTED, RUNNING, STATES, ProgressReader, Status, read_record
from rlframe.study.table import Row, common_return, last_finite, progress_line

_RUN = re.compile(r"((\w[\w+=.,-]*/){0,2})run_(\d{1,15})")  # no path that leads out of the study
_MAX_RUNS = 20_000


@dataclass(frozen=True)
class StudyOverview:
    """A study as its directory records it now."""

    directory: Path
    planned: tuple[PlannedRun, ...]  # without their commands
    statuses: dict[str, Status]  # by name
    queue: LockHolder | None  # the process whose queue runs; None: none
    search: SearchData | None
    n_added: int  # trials that were added to a search and have no run yet
    population_metric: str = ""  # of a population, whose runs are planned with their settings of now

    def __repr__(self) -> str:
        return f"study {self.directory}; .runs and .curves() have its numbers\n{self.describe(self.rows())}"

    @property
    def runs(self) -> list[dict[str, Any]]:
        """A row for each run: its name, setting, seed, the values of all keys that the study varies, state and score.

        `pandas.DataFrame(study.runs)` makes a table of them. The score is the last value of the study's metric.
        """
        searched = [key.name for key in self.search.keys] if self.search else []
        keys = [key for key in dict.fromkeys([*searched, *varied(self.planned)]) if key != "seed"]
        metric, rows = self.metric, []
        for run, log in zip(self.planned, self._logs, strict=True):
            status, values = self.statuses[run.name], {key: number_or_text(run.arguments.get(key, "")) for key in keys}
            row = {"run": run.name, "setting": run.setting, "seed": _seed(run), **values, "state": status.state}
            row |= {"score": last_finite(log, metric), "env_steps": last_finite(log, "env_steps")}
            rows.append({**row, "seconds": status.seconds, "directory": str(run.directory)})
        return rows

    @property
    def metric(self) -> str:
        """What scores the runs: that of the search, or the mean return of all finished runs (see RETURNS)."""
        if self.search is not None or self.population_metric:
            return self.search.metric if self.search else self.population_metric
        states = [self.statuses[run.name].state for run in self.planned]
        logs = [log for log, state in zip(self._logs, states, strict=True) if state == DONE]
        return common_return(logs or [log for log in self._logs if log.columns])

    @property
    def queue_name(self) -> str:
        """The process of the queue; empty if none runs."""
        return f"process {self.queue.pid} on {self.queue.host}" if self.queue else ""

    def curves(self) -> dict[str, np.ndarray]:
        """The rows of all logs below one another, by column: run, setting, seed, then those of the logs, nan if absent.

        `pandas.DataFrame(study.curves())` makes a table of them.
        """
        sizes = [len(next(iter(log.columns.values()), ())) for log in self._logs]
        facts = {
            "run": [run.name for run in self.planned],
            "setting": [run.setting for run in self.planned],
            "seed": [_seed(run) for run in self.planned],
        }
        found = {name: np.repeat(np.array(values), sizes) for name, values in facts.items()}
        for name in dict.fromkeys(name for log in self._logs for name in log.columns):
            parts = [log.columns.get(name, np.full(n, np.nan)) for log, n in zip(self._logs, sizes, strict=True)]
            found[name] = np.concatenate(parts)
        return found

    @cached_property
    def _logs(self) -> list[RunData]:
        return [read_run(run.directory) for run in self.planned]

    def rows(self) -> list[Row]:
        """The rows of the queue's table."""
        found = []
        for run in self.planned:
            status, progress = self.statuses[run.name], ProgressReader(run.directory).read()
            seconds = status.seconds
            if status.state == RUNNING and math.isfinite(progress.elapsed_s):
                seconds = max(seconds, progress.elapsed_s)
            reason = printable(status.reason[:300])
            found.append(Row(run.name, status.state, status.slot, seconds, reason, progress))
        return found

    def describe(self, rows: Sequence[Row]) -> str:
        """The progress in one line, and below it the best trial of a search, and which process runs the study."""
        n_running = sum(row.state == RUNNING for row in rows)
        lines = [progress_line(rows, max(1, n_running))]
        if self.search is not None:
            best, more = self.search.best(), f", {self.n_added} added and waiting" if self.n_added else ""
            found = f"; best: trial_{best.number}, {self.search.metric} {best.score:.6g}" if best else ""
            lines.append(f"{pluralize(len(self.search.trials), 'trial')}{more}{found}")
            lines += [self.search.words(best)] if best else []
        lines.append(f"the queue runs: {self.queue_name}" if self.queue else "no queue runs here")
        return printable("\n".join(lines))


def read_study(directory: str | Path) -> StudyOverview:
    """The state of a study, its runs as rows, and their curves, from its directory. Nothing in it is executed.

    Raises:
        ConfigError: it is no study, or damaged.
    """
    directory = Path(directory).expanduser().absolute()
    if not (directory / FILE).exists():
        raise ConfigError(printable(f"{directory} is not a study: it has no {FILE}"))
    content, added = read_record(directory), read_added(directory)
    queue = _running_queue(directory)
    try:
        if len(content["runs"]) > _MAX_RUNS:
            raise ValueError(f"it has more than {_MAX_RUNS:,} runs")
        statuses = {str(entry["name"]): _status(entry, queue is not None) for entry in content["runs"]}
        planned = [_planned(directory, entry["name"], entry["arguments"]) for entry in content["runs"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(printable(f"{directory / FILE} is damaged: {str(error)[:200]}")) from None
    search, metric = read_search(directory) if (directory / SEARCH_JOURNAL).is_file() else None, ""
    if (directory / JOURNAL).is_file():
        facts, intervals = read_population(directory / JOURNAL)
        metric, _ = signed(str(facts.get("metric", "")))
        if intervals and len(intervals[-1]) == len(planned):
            planned = as_tuned(planned, intervals[-1])
    for each in [] if search else added:
        if each.name not in statuses:
            statuses[each.name] = Status()
            planned.append(_planned(directory, each.name, each.arguments))
    n_waiting = len(added) - sum(trial.added for trial in search.trials) if search else 0
    return StudyOverview(directory, tuple(planned), statuses, queue, search, max(0, n_waiting), metric)


def _planned(directory: Path, name: str, arguments: Mapping[str, Any]) -> PlannedRun:
    match = _RUN.fullmatch(name)
    if not match:
        raise ValueError(f"{name!r:.60} is not the name of a run")
    words = {str(key): str(value) for key, value in arguments.items()}
    return PlannedRun(match[1].rstrip("/"), int(match[3]), words, directory / name, (), ())


def _status(entry: dict[str, Any], has_queue: bool) -> Status:
    """The status of a run. One that runs, but whose queue does not, was interrupted."""
    state, reason = str(entry["state"]), str(entry["reason"])
    if state not in STATES:
        raise ValueError(f"{state!r:.60} is not a state")
    status = Status(state, int(entry["slot"]), int(entry["attempts"]), float(entry["seconds"]), reason=reason)
    return replace(status, state=INTERRUPTED) if state == RUNNING and not has_queue else status


def _running_queue(directory: Path) -> LockHolder | None:
    """The process that holds the study's lock; one on another host counts as running."""
    holder = read_lock(directory / LOCK_FILE)
    if holder is None or (holder.host == socket.gethostname() and not holder.is_running()):
        return None
    return holder


def _seed(run: PlannedRun) -> int:
    text = run.arguments.get("seed", "")
    return int(text) if text.isdecimal() and len(text) < 16 else run.run_ID
