"""What a run shows: plain lines, one per log interval, or in a notebook a bar (on a terminal see `rich_console`).

`messages` opens one for a run; commands show their progress bars by it.
"""

import errno
import html
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from rlframe.record.metrics import step_of

_SILENCE_S = 30.0  # without a row
_REFRESH_S = 0.25


def on_terminal() -> bool:
    """Whether standard output is a terminal that can redraw lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _print(text: str) -> None:
    """Print a line. A full disk under standard output loses it, and what the encoding lacks is written with escapes."""
    try:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise


class Console:
    """Shows rows of metrics, progress and messages; this base class shows messages only. A Run owns and closes it."""

    def write(self, row: Mapping[str, float]) -> None:
        """Show a row of metrics; it has `env_steps`."""

    def progress(self, step: int, n_steps: int, unit: str = "env_steps") -> None:
        """Show how far the run is, in env_steps or updates. Called often; cheap."""

    def message(self, text: str) -> None:
        """Show one line of the text log."""
        _print(text)

    def close(self) -> None:
        """Restore the terminal; may be called twice."""


class Pace:
    """Speed in steps of a run's clock per wall-clock second, and the remaining time at that speed."""

    def __init__(self) -> None:
        self.step = 0
        self.n_steps = 0  # 0: unknown
        self.unit = "env_steps"  # or updates
        self._first_steps = 0
        self._start_s: float | None = None

    def update(self, step: int) -> None:
        """Set the current step. Speed counts from the first call, so earlier steps of a resumed run are excluded."""
        if self._start_s is None:
            self._start_s, self._first_steps = perf_counter(), step
        self.step = max(step, self.step)  # an evaluation may be of an earlier one

    def move(self, step: int, n_steps: int, unit: str) -> None:
        """As `update`, with how far the run goes."""
        self.n_steps, self.unit = n_steps, unit
        self.update(step)

    def per_s(self) -> float:
        """Steps per second, everything included; 0 at the start."""
        if self._start_s is None:
            return 0.0
        return (self.step - self._first_steps) / max(perf_counter() - self._start_s, 1e-9)

    def speed(self, row: Mapping[str, float]) -> str:
        """That of a row's interval, or of all so far; empty at the start."""
        per_s = row.get(f"time/{self.unit}_per_s", self.per_s())
        return f"{per_s:,.0f} {self.unit.removeprefix('env_')}/s" if per_s > 0 else ""

    def time_left(self) -> str:
        """The time until n_steps; empty if unknown, or at the end."""
        rate, n_left = self.per_s(), self.n_steps - self.step
        return f"{format_duration(n_left / rate)} left" if rate > 0 and n_left > 0 else ""

    def fraction(self) -> float:
        return min(self.step / self.n_steps, 1.0) if self.n_steps else 0.0


class PlainConsole(Console):
    """One line per row on standard output: `env_steps 25,600 | episode/return_mean 132.4 | ... | 00:12 left`.

    And one without metrics if there was no row for half a minute, so that slow runs do not look like hanging ones.
    """

    def __init__(self) -> None:
        self._pace = Pace()
        self._said_s = perf_counter()

    def write(self, row: Mapping[str, float]) -> None:
        self._pace.update(step_of(row))
        self._say(row, "updates" in row)

    def _say(self, row: Mapping[str, float], with_pace: bool) -> None:
        self._said_s = perf_counter()
        parts = [f"{name} {format_number(row[name])}" for name in key_metrics(row)]
        parts += [self._pace.speed(row), self._pace.time_left()] if with_pace else []
        _print(" | ".join(filter(None, parts)))

    def progress(self, step: int, n_steps: int, unit: str = "env_steps") -> None:
        self._pace.move(step, n_steps, unit)
        if perf_counter() - self._said_s >= _SILENCE_S:
            self._say({"env_steps": 0, unit: step}, True)


_ESTIMATE = re.compile(r"estimate/[a-z]+")  # without its interval
_SCORE = re.compile(r"episode/(?!agent/)[^/]+/return_mean")  # of one of several agents or policies


def key_metrics(row: Mapping[str, float]) -> list[str]:
    """The names of a row's step, scores, losses and entropy, which fit on one line; none of an empty row."""
    step = "env_steps" if row.get("env_steps") or not row.get("updates") else "updates"
    first = [name for name in (step, "episode/return_mean", "eval/return_mean") if name in row]
    scores = [name for name in row if _SCORE.fullmatch(name)]
    scores += [name for name in row if _ESTIMATE.fullmatch(name)]
    losses = [name for name in row if name.startswith("algo/") and name.endswith(("loss", "/entropy"))]
    return [name for name in first + scores + losses if not math.isnan(row[name])]


def format_number(value: float) -> str:
    """A short number: 25,600 or 132.4 or 0.01234 or 3.000e-05."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if 1000 <= size < 1e9 or isinstance(value, int) or (size < 1e9 and value.is_integer()):
        return f"{value:,.0f}"
    if size >= 1e9 or size < 1e-3:
        return f"{value:.3e}"
    decimals = 3 - math.floor(math.log10(size))
    return f"{value:.{max(1, decimals)}f}"


def format_duration(seconds: float) -> str:
    """00:12, 1:02:03 or 2d 01:00:00."""
    whole = round(seconds)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel; IPython is not imported for that."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return type(get_ipython()).__name__ == "ZMQInteractiveShell"


class RedrawnConsole(Console, ABC):
    """Base of consoles that redraw the newest metrics in place, at most four times a second between rows."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._values: dict[str, float] = {}
        self._drawn_s = -math.inf

    def write(self, row: Mapping[str, float]) -> None:
        """Show the newest metrics. One that is missing from the row keeps its value."""
        self._pace.update(step_of(row))
        self._values.update(row)
        self._redraw()

    def progress(self, step: int, n_steps: int, unit: str = "env_steps") -> None:
        self._pace.move(step, n_steps, unit)
        if perf_counter() - self._drawn_s >= _REFRESH_S:
            self._redraw()

    def _redraw(self) -> None:
        self._drawn_s = perf_counter()
        self._draw()

    @abstractmethod
    def _draw(self) -> None:
        """Draw the metrics and how far the run is."""

    def _position(self) -> str:
        pace = self._pace
        return f"{pace.step:,}" + (f" / {pace.n_steps:,}" if pace.n_steps else "") + f" {pace.unit}"


class NotebookConsole(RedrawnConsole):
    """Redraws the output of the cell that opened the run: a bar and the newest metrics; messages are printed."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None  # of the display; None until there is something to show

    def close(self) -> None:
        if self._handle is not None:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        share = f"{self._pace.fraction():.0%}, " if self._pace.n_steps else ""
        metrics = [f"{name} {format_number(self._values[name])}" for name in key_metrics(self._values)[1:]]
        parts = [share + self._position(), self._pace.speed(self._values), self._pace.time_left(), *metrics]
        text = " | ".join(part for part in parts if part)
        bar = f'<progress value="{self._pace.fraction():.4f}" max="1" style="width: 30%"></progress>'
        shown = {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that adds to what is done of `total`. The bar disappears at the end of the `with` block."""
    if not on_terminal():
        yield lambda _: None
        return
    from rich.markup import escape  # loaded for terminals only
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda n: bar.advance(task, n)
