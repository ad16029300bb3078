"""Console output of a run: plain lines, one per log interval, unless stdout is a terminal (see `rich_console`)."""

import math
import os
import sys
from collections.abc import Mapping
from time import perf_counter

LEVELS = ("DEBUG", "INFO", "WARNING")
_SILENCE_S = 30.0  # without a row


def on_terminal() -> bool:
    """Whether standard output is a terminal that can redraw lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class Console:
    """Shows rows of metrics, progress and messages; this base class shows nothing. Owned by a Run, which closes it."""

    def write(self, row: Mapping[str, float]) -> None:
        """Show a row of metrics; it has `env_steps`."""

    def progress(self, env_steps: int, n_steps: int) -> None:
        """Show how far the run is. Called often; cheap."""

    def message(self, text: str) -> None:
        """Show one line of the text log."""

    def close(self) -> None:
        """Restore the terminal; may be called twice."""


class MessageConsole(Console):
    """Shows messages only."""

    def message(self, text: str) -> None:
        print(text, flush=True)


class Pace:
    """Speed in env_steps per wall-clock second, and the remaining time at that speed."""

    def __init__(self) -> None:
        self.env_steps = 0
        self.n_steps = 0  # 0: unknown
        self._first_steps = 0
        self._start_s: float | None = None

    def update(self, env_steps: int) -> None:
        """Set the current step. Speed counts from the first call, so earlier steps of a resumed run are excluded."""
        if self._start_s is None:
            self._start_s, self._first_steps = perf_counter(), env_steps
        self.env_steps = max(env_steps, self.env_steps)  # an evaluation may be of an earlier one

    def per_s(self) -> float:
        """env_steps per second, everything included; 0 at the start."""
        if self._start_s is None:
            return 0.0
        return (self.env_steps - self._first_steps) / max(perf_counter() - self._start_s, 1e-9)

    def left_s(self) -> float:
        """Seconds until n_steps; inf if unknown."""
        rate = self.per_s()
        return max(self.n_steps - self.env_steps, 0) / rate if rate > 0 and self.n_steps else math.inf

    def fraction(self) -> float:
        return min(self.env_steps / self.n_steps, 1.0) if self.n_steps else 0.0


class PlainConsole(Console):
    """One line per row on standard output: `env_steps 25,600 | episode/return_mean 132.4 | ... | 00:12 left`.

    And one without metrics if there was no row for half a minute, so that slow runs do not look like hanging ones.
    """

    def __init__(self) -> None:
        self._pace = Pace()
        self._said_s = perf_counter()

    def write(self, row: Mapping[str, float]) -> None:
        self._pace.update(int(row["env_steps"]))
        self._say(row, "updates" in row)

    def _say(self, row: Mapping[str, float], with_pace: bool) -> None:
        self._said_s = perf_counter()
        parts = [f"{name} {format_number(row[name])}" for name in key_metrics(row)]
        per_s = row.get("time/env_steps_per_s", self._pace.per_s())
        if with_pace and per_s > 0:
            parts.append(f"{per_s:,.0f} steps/s")
        if with_pace and 0 < (left := self._pace.left_s()) < math.inf:
            parts.append(f"{format_duration(left)} left")
        print(" | ".join(parts), flush=True)

    def progress(self, env_steps: int, n_steps: int) -> None:
        self._pace.n_steps = n_steps
        self._pace.update(env_steps)
        if perf_counter() - self._said_s >= _SILENCE_S:
            self._say({"env_steps": env_steps}, True)

    def message(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        sys.stdout.flush()


def key_metrics(row: Mapping[str, float]) -> list[str]:
    """The names of a row's step, scores, losses and entropy, which fit on one line."""
    first = [name for name in ("env_steps", "episode/return_mean", "eval/return_mean") if name in row]
    losses = [name for name in row if name.startswith("algo/") and name.endswith(("loss", "/entropy"))]
    return [name for name in first + losses if not math.isnan(row[name])]


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
