"""The tables of a study: the status of its runs, redrawn in a terminal with rich, and the summary of its settings.

The summary has one row per setting, with the mean return over its seeds; it is printed, and in summary.csv.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from rlframe.analysis.aggregates import interval, mean
from rlframe.analysis.curves import ALIKE, RunData, differences, read_run
from rlframe.core.errors import aligned, pluralize
from rlframe.core.files import as_csv
from rlframe.record.console import format_duration, format_number, on_terminal
from rlframe.study.plan import PlannedRun, varied
from rlframe.study.record import DONE, FAILED, INTERRUPTED, PRUNED, RETURNS, RUNNING, WAITING, Status, StudyProgress

HEADER = ("run", "state", "slot", "env_steps", "return", "steps/s", "time", "left")
_BY_IMPORTANCE = (RUNNING, FAILED, INTERRUPTED, WAITING, PRUNED, DONE)
_STYLES = {RUNNING: "cyan", FAILED: "bold red", INTERRUPTED: "yellow", WAITING: "dim", PRUNED: "dim", DONE: "green"}
_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_LONGEST_S = 600.0  # between progress lines without a terminal
_OTHER_LINES = 5  # lines of a terminal that are not rows
_EVEN = 1.1  # ratio of the lengths of runs that are compared without a word
SUMMARY_FILE = "summary.csv"
_SUMMARY = ("metric", "n_seeds", "mean", "low", "high", "best", "env_steps", "n_failed")


@dataclass(frozen=True)
class Row:
    """The status of one run."""

    name: str
    state: str
    slot: int
    seconds: float  # of all its attempts
    reason: str
    progress: StudyProgress

    def cells(self) -> tuple[str, ...]:
        """The texts below HEADER."""
        progress = self.progress
        return (
            self.name,
            self.state,
            str(self.slot) if self.slot >= 0 else "",
            self._steps(),
            "" if math.isnan(progress.return_) else format_number(progress.return_),
            "" if math.isnan(progress.per_s) else f"{progress.per_s:,.0f}",
            format_duration(self.seconds) if self.seconds else "",
            format_duration(progress.left_s()) if self.state == RUNNING and progress.left_s() > 0 else "",
        )

    def _steps(self) -> str:
        """Steps of all: 25.6k/100k."""
        done, n_steps = self.progress.steps, self.progress.n_steps
        if math.isnan(done):
            return ""
        return _short(done) if math.isnan(n_steps) else f"{_short(done)}/{_short(n_steps)}"

    def line(self) -> str:
        """The progress of an active run in one line."""
        titles = dict(zip(HEADER, self.cells(), strict=True))
        units = {"env_steps": self.progress.unit, "return": "return"}
        named = [f"{unit} {titles[name]}" for name, unit in units.items() if titles[name]]
        named += [f"{titles[name]} {name}" for name in ("steps/s", "left") if titles[name]]
        return f"{self.name} {', '.join(named)}"

    def result(self) -> str:
        """State, return, steps and time in one line."""
        return_ = "" if math.isnan(self.progress.return_) else f", return {format_number(self.progress.return_)}"
        steps = "" if math.isnan(self.progress.steps) else f" at {self.progress.unit} {self.progress.steps:,.0f}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.name} {self.state}{return_}{steps}, {format_duration(self.seconds)}{reason}"


def _short(n: float) -> str:
    """A count in at most three digits: 512, 25.6k, 10M."""
    size, suffix = next(((size, suffix) for size, suffix in _SUFFIXES if n >= size), (1.0, ""))
    return f"{math.floor(10 * n / size) / 10:g}{suffix}" if n < 100 * size else f"{math.floor(n / size)}{suffix}"


def progress_line(rows: Sequence[Row], n_slots: int) -> str:
    """How many runs are done, the number in each other state, and the time left on this number of slots."""
    counts = {state: sum(row.state == state for row in rows) for state in _BY_IMPORTANCE}
    others = [f", {n} {state}" for state, n in counts.items() if n and state != DONE]
    text = f"{counts[DONE]} of {pluralize(len(rows), 'run')} done{''.join(others)}"
    left = _left_s(rows, n_slots)
    return f"{text}; about {format_duration(left)} left" if left > 0 else text


def _left_s(rows: Sequence[Row], n_slots: int) -> float:
    """Seconds until all runs have ended, if waiting runs take the mean time of the others; nan if unknown."""
    lefts = [row.progress.left_s() for row in rows if row.state == RUNNING]
    totals = [row.seconds for row in rows if row.state == DONE]
    totals += [row.seconds + row.progress.left_s() for row in rows if row.state == RUNNING]
    known = [seconds for seconds in totals if not math.isnan(seconds)]
    mean = sum(known) / len(known) if known else math.nan
    n_waiting = sum(row.state == WAITING for row in rows)
    work = sum(mean / 2 if math.isnan(left) else left for left in lefts) + (n_waiting * mean if n_waiting else 0.0)
    longest = max((left for left in lefts if not math.isnan(left)), default=0.0)
    return max(work / max(1, n_slots), longest)


def format_table(rows: Sequence[Row]) -> str:
    """The rows as text, with the reason below each run that failed or was interrupted."""
    lines = [HEADER, *(row.cells() for row in rows)]
    texts = aligned(lines, "<" * len(HEADER))
    for index, row in enumerate(rows):
        if row.state in (FAILED, INTERRUPTED) and row.reason:
            texts[index + 1] += f"\n  {row.reason}"
    return "\n".join(texts)


class StatusTable(ABC):
    """Shows the runs of a queue and messages about them. Close it when done."""

    interval_s: float  # between calls of `show`

    @abstractmethod
    def message(self, text: str) -> None:
        """Show one line with the time."""

    @abstractmethod
    def show(self, rows: Sequence[Row], line: str, last: bool) -> None:
        """Show all runs and a summary line; the `last` table stays on the screen."""

    @abstractmethod
    def close(self) -> None:
        """Restore the terminal; may be called again."""


class PlainStatusTable(StatusTable):
    """Prints a line for each event, the progress of active runs every 1 to 10 minutes, and the table at the end."""

    def __init__(self) -> None:
        self.interval_s = 60.0

    def message(self, text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", flush=True)

    def show(self, rows: Sequence[Row], line: str, last: bool) -> None:
        if last:
            print(f"\n{format_table(rows)}\n{line}", flush=True)
            return
        running = [row for row in rows if row.state == RUNNING]
        if running:
            self.interval_s = min(1.1 * self.interval_s, _LONGEST_S)
            logged = [row.line() for row in running if not math.isnan(row.progress.steps)]
            self.message("\n  ".join([line, *logged]))

    def close(self) -> None:
        sys.stdout.flush()


class LiveStatusTable(StatusTable):
    """Redraws the table in place: as many runs as fit, all of them at the end. Messages scroll by above it."""

    interval_s = 1.0

    def __init__(self, console: Any) -> None:
        """`console`: rich.console.Console."""
        from rich.live import Live  # loaded for terminals only

        # Redrawn by calls, not by a thread.
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible", transient=True)
        self._live.start()

    def message(self, text: str) -> None:
        self._live.console.print(f"{datetime.now():%H:%M:%S} {text}", markup=False, highlight=False, soft_wrap=True)

    def show(self, rows: Sequence[Row], line: str, last: bool) -> None:
        n_shown = len(rows) if last else max(1, self._live.console.height - _OTHER_LINES)
        by_importance = sorted(range(len(rows)), key=lambda index: _BY_IMPORTANCE.index(rows[index].state))
        shown = [rows[index] for index in sorted(by_importance[:n_shown])]
        hidden = f" ({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
        table = _rich_table(shown, last, line + hidden)
        if last:  # print it: a table higher than the terminal cannot be redrawn
            self._live.stop()
            self._live.console.print(table)
        else:
            self._live.update(table, refresh=True)

    def close(self) -> None:
        self._live.stop()


def _rich_table(rows: Sequence[Row], with_reasons: bool, line: str) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, title in enumerate(HEADER):
        table.add_column(title, justify="left" if index < 2 else "right", no_wrap=index > 0, overflow="fold")
    for row in rows:
        name, state, *rest = row.cells()
        table.add_row(Text(name), Text(state, style=_STYLES[state]), *rest)
        if with_reasons and row.state in (FAILED, INTERRUPTED) and row.reason:
            table.add_row(Text(f"  {row.reason}", style="red"))
    return Group(table, Text(line, style="bold"))


def open_status_table() -> StatusTable:
    """A live table if standard output is a terminal, else a plain one."""
    if not on_terminal():
        return PlainStatusTable()
    from rich.console import Console

    return LiveStatusTable(Console())


@dataclass(frozen=True)
class SettingResult:
    """The last returns of a setting's finished runs."""

    setting: str  # directory in the study; empty if there is only one
    values: Mapping[str, str]  # of the keys that the study varies, without the seed
    metric: str  # eval/return_mean, or episode/return_mean without evaluation
    scores: tuple[float, ...]
    env_steps: float  # mean; nan if no run is finished
    n_failed: int
    ends: tuple[float, float] = (math.nan, math.nan)  # env_steps of the shortest and of the longest run
    differing: tuple[str, ...] = ()  # keys, or contents of own files, in which its runs are not of one configuration

    def mean(self) -> float:
        return float(np.mean(self.scores)) if self.scores else math.nan

    def best(self) -> float:
        return max(self.scores, default=math.nan)

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean over seeds; nan with fewer than two."""
        if len(self.scores) < 2:
            return math.nan, math.nan
        low, high = interval(mean, [np.array(self.scores)])
        return float(low), float(high)


def common_return(logs: Sequence[RunData]) -> str:
    """The mean return that all logs have (see RETURNS)."""
    in_all = (name for name in RETURNS if all(math.isfinite(last_finite(log, name)) for log in logs))
    return next(in_all, RETURNS[-1])


def summarize(runs: Sequence[PlannedRun], statuses: Mapping[str, Status]) -> list[SettingResult]:
    """The result of every setting, in the order of the runs. Raises ConfigError if a log is not a regular file."""
    keys = [key for key in varied(runs) if key != "seed"]
    results = []
    for setting in dict.fromkeys(run.setting for run in runs):
        members = [run for run in runs if run.setting == setting]
        logs = [read_run(run.directory) for run in members if statuses[run.name].state == DONE]
        logs = [log for log in logs if log.columns]  # a directory may have been removed since
        metric = common_return(logs)
        scored = [log for log in logs if math.isfinite(last_finite(log, metric))]
        steps = [last_finite(log, "env_steps") for log in scored]
        results.append(
            SettingResult(
                setting=setting,
                values={key: members[0].arguments.get(key, "") for key in keys},
                metric=metric if scored else "",
                scores=tuple(last_finite(log, metric) for log in scored),
                env_steps=float(np.mean(steps)) if steps else math.nan,
                ends=(min(steps, default=math.nan), max(steps, default=math.nan)),
                n_failed=sum(statuses[run.name].state == FAILED for run in members),
                differing=tuple(key for key in differences([log.config for log in scored]) if key not in ALIKE),
            )
        )
    return results


def last_finite(log: RunData, column: str) -> float:
    """The last finite number of a column; nan if there is none."""
    values = log.columns.get(column, np.empty(0))
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def format_summary(results: Sequence[SettingResult]) -> str:
    """The table for people, and a line for each setting whose runs are not of one configuration."""
    lines: list[tuple[str, ...]] = [("setting", "seeds", "return", "95 % interval", "best", "env_steps", "failed")]
    for result in results:
        low, high = result.interval()
        interval = "" if math.isnan(low) else f"[{format_number(low)}, {format_number(high)}]"
        numbers = ["" if math.isnan(x) else format_number(x) for x in (result.mean(), result.best(), result.env_steps)]
        failed = str(result.n_failed or "")
        name = result.setting or "all runs"
        lines.append((name, str(len(result.scores)), numbers[0], interval, *numbers[1:], failed))
    pooled = [
        f"{result.setting or 'all runs'}: its runs differ in {', '.join(result.differing)}, see python -m rlframe.plot"
        for result in results
        if result.differing
    ]
    uneven = [
        f"{result.setting or 'all runs'}: its runs end at {result.ends[0]:,.0f} to {result.ends[1]:,.0f} env_steps"
        for result in results
        if result.ends[1] > _EVEN * result.ends[0]
    ]
    return "\n".join([*aligned(lines, "<>>>>>>"), *pooled, *uneven])


def summary_csv(results: Sequence[SettingResult]) -> str:
    """The table for programs: setting, every key that the study varies, then the numbers; empty where there is none."""
    rows: list[list[Any]] = [["setting", *results[0].values, *_SUMMARY]]
    for result in results:
        numbers = [result.mean(), *result.interval(), result.best(), result.env_steps]
        cells = ["" if math.isnan(number) else repr(number) for number in numbers]
        counted = [result.metric, len(result.scores), *cells, result.n_failed]
        rows.append([result.setting, *result.values.values(), *counted])
    return as_csv(rows)
