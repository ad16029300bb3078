"""The table of a study's runs in a terminal: redrawn in place, messages scroll by above it. Loads rich."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlframe.study.record import DONE, FAILED, INTERRUPTED, RUNNING, WAITING
from rlframe.study.table import BY_IMPORTANCE, HEADER, Display, Row

_STYLES = {RUNNING: "cyan", FAILED: "bold red", INTERRUPTED: "yellow", WAITING: "dim", DONE: "green"}
_AROUND = 5  # lines of a terminal that are not rows


class LiveDisplay(Display):
    """Redrawn by calls, not by a thread: as many runs as there is room for, all of them in the end."""

    interval_s = 1.0

    def __init__(self, console: RichConsole) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible", transient=True)
        self._live.start()

    def message(self, text: str) -> None:
        """Print above the table."""
        self._live.console.print(f"{datetime.now():%H:%M:%S} {text}", markup=False, highlight=False, soft_wrap=True)

    def show(self, rows: Sequence[Row], line: str, last: bool) -> None:
        """Redraw; the last table is printed, for what is higher than the terminal cannot be redrawn."""
        room = len(rows) if last else max(1, self._live.console.height - _AROUND)
        by_importance = sorted(range(len(rows)), key=lambda index: BY_IMPORTANCE.index(rows[index].state))
        shown = [rows[index] for index in sorted(by_importance[:room])]
        hidden = f" ({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
        table = Group(_table(shown, last), Text(line + hidden, style="bold"))
        if last:
            self._live.stop()
            self._live.console.print(table)
        else:
            self._live.update(table, refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()


def _table(rows: Sequence[Row], with_reasons: bool) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, title in enumerate(HEADER):
        table.add_column(title, justify="left" if index < 2 else "right", no_wrap=index > 0, overflow="fold")
    for row in rows:
        name, state, *rest = row.cells()
        table.add_row(Text(name), Text(state, style=_STYLES[state]), *rest)
        if with_reasons and row.state == FAILED:
            table.add_row(Text(f"  {row.reason}", style="red"))
    return table
