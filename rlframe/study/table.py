"""The table of a study's runs: redrawn in a terminal, and plain lines where there is none."""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rlframe.core.errors import counted
from rlframe.record.console import format_duration, format_number
from rlframe.study.record import DONE, FAILED, INTERRUPTED, RUNNING, WAITING, Progress

HEADER = ("run", "state", "slot", "progress", "return", "time", "left")
BY_IMPORTANCE = (RUNNING, FAILED, INTERRUPTED, WAITING, DONE)


@dataclass(frozen=True)
class Row:
    """One run now."""

    name: str
    state: str
    slot: int
    seconds: float  # of all its attempts
    reason: str
    progress: Progress

    def cells(self) -> tuple[str, ...]:
        """What stands under HEADER."""
        progress = self.progress
        return (
            self.name,
            self.state,
            str(self.slot) if self.slot >= 0 else "",
            "" if math.isnan(progress.fraction()) else f"{progress.fraction():.0%}",
            "" if math.isnan(progress.return_) else format_number(progress.return_),
            format_duration(self.seconds) if self.seconds else "",
            format_duration(progress.left_s()) if self.state == RUNNING and progress.left_s() > 0 else "",
        )

    def ended(self) -> str:
        """How it ended, in one line."""
        reached = "" if math.isnan(self.progress.return_) else f", return {format_number(self.progress.return_)}"
        steps = "" if math.isnan(self.progress.env_steps) else f" at env_steps {self.progress.env_steps:,.0f}"
        return f"{self.name} {self.state}{reached}{steps}, {format_duration(self.seconds)}"


def summary(rows: Sequence[Row], n_slots: int) -> str:
    """How many runs are in which state, and how long the rest takes on so many slots."""
    counts = {state: sum(row.state == state for row in rows) for state in BY_IMPORTANCE}
    text = f"{counted(len(rows), 'run')}: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    left = _left_s(rows, n_slots)
    return f"{text}; about {format_duration(left)} left" if left > 0 else text


def _left_s(rows: Sequence[Row], n_slots: int) -> float:
    """Seconds until all have ended, if those that wait take as long as the others; nan if not known."""
    lefts = [row.progress.left_s() for row in rows if row.state == RUNNING]
    whole = [row.seconds for row in rows if row.state == DONE]
    whole += [row.seconds + row.progress.left_s() for row in rows if row.state == RUNNING]
    known = [seconds for seconds in whole if not math.isnan(seconds)]
    mean = sum(known) / len(known) if known else math.nan
    n_waiting = sum(row.state == WAITING for row in rows)
    work = sum(mean / 2 if math.isnan(left) else left for left in lefts) + (n_waiting * mean if n_waiting else 0.0)
    longest = max((left for left in lefts if not math.isnan(left)), default=0.0)
    return max(work / max(1, n_slots), longest)


def plain_table(rows: Sequence[Row]) -> str:
    """The rows as text, with the reasons of those that failed."""
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for index, row in enumerate(rows):
        if row.state == FAILED:
            texts[index + 1] += f"\n  {row.reason}"
    return "\n".join(texts)


class Display(ABC):
    """Shows rows and messages to whoever watches. Made by `display`, closed by whoever made it."""

    interval_s: float  # between tables

    @abstractmethod
    def message(self, text: str) -> None:
        """Show one line about what happened."""

    @abstractmethod
    def show(self, rows: Sequence[Row], line: str, last: bool) -> None:
        """Show all runs, and the line that sums them up; `last` leaves them there."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal in order; harmless when repeated."""


class PlainDisplay(Display):
    """A line for each event, one a minute that sums up, and the table in the end."""

    interval_s = 60.0

    def message(self, text: str) -> None:
        """Print it with the time."""
        print(f"{datetime.now():%H:%M:%S} {text}", flush=True)

    def show(self, rows: Sequence[Row], line: str, last: bool) -> None:
        """Print the line, or in the end the table."""
        if last:
            print(f"\n{plain_table(rows)}\n{line}", flush=True)
        elif any(row.state == RUNNING for row in rows):
            self.message(line)

    def close(self) -> None:
        """Nothing to put in order."""
        sys.stdout.flush()


def open_display() -> Display:
    """What fits standard output."""
    if not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainDisplay()
    # Here, not at the top: only a terminal needs rich's live display.
    from rich.console import Console as RichConsole

    from rlframe.study.rich_table import LiveDisplay

    return LiveDisplay(RichConsole())
