"""The progress of a run in a notebook: one line with a bar and the newest metrics, redrawn in place."""

import html
import math
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from rlframe.record.console import Console, Pace, format_duration, format_number, key_metrics

_REFRESH_S = 0.25


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel; IPython is not imported for that."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return type(get_ipython()).__name__ == "ZMQInteractiveShell"


class NotebookConsole(Console):
    """Redraws the output of the cell that opened the run; messages are printed."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._values: dict[str, float] = {}
        self._handle: Any = None  # of the display; None until there is something to show
        self._drawn_s = -math.inf

    def write(self, row: Mapping[str, float]) -> None:
        self._pace.update(int(row["env_steps"]))
        self._values.update(row)
        self._draw()

    def progress(self, env_steps: int, n_steps: int) -> None:
        self._pace.n_steps = n_steps
        self._pace.update(env_steps)
        if perf_counter() - self._drawn_s >= _REFRESH_S:
            self._draw()

    def message(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        if self._handle is not None:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        self._drawn_s = perf_counter()
        text = " | ".join(self._parts())
        bar = f'<progress value="{self._pace.fraction():.4f}" max="1" style="width: 30%"></progress>'
        shown = {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def _parts(self) -> list[str]:
        pace, left = self._pace, self._pace.left_s()
        known = f"{pace.fraction():.0%}, {pace.env_steps:,} / {pace.n_steps:,} env_steps"
        parts = [known if pace.n_steps else f"{pace.env_steps:,} env_steps"]
        parts += [f"{self._values.get('time/env_steps_per_s', pace.per_s()):,.0f} steps/s"]
        parts += [f"{format_duration(left)} left"] if 0 < left < math.inf else []
        return parts + [f"{name} {format_number(self._values[name])}" for name in key_metrics(self._values)[1:]]
