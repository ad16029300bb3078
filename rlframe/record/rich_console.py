"""The live table of a terminal: metrics by group with their change, and a progress bar. Imports rich."""

import math
from collections.abc import Mapping

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlframe.record.console import RedrawnConsole, format_number


class LiveConsole(RedrawnConsole):
    """Redraws one table in place, without a thread that would interrupt sampling; log lines scroll by above it."""

    def __init__(self, title: str, console: RichConsole) -> None:
        super().__init__()
        self._title = title
        self._before: dict[str, float] = {}
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis")
        self._live.start()

    def write(self, row: Mapping[str, float]) -> None:
        self._before.update({name: self._values[name] for name in row if name in self._values})
        super().write(row)

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live.is_started:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _draw(self) -> None:
        self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        groups: dict[str, list[str]] = {}
        for name in self._values:
            if name != "env_steps":
                groups.setdefault(name.rpartition("/")[0] or "run", []).append(name)
        body = self._columns(groups) if groups else Text("waiting for the first log interval", style="dim")
        return Panel(Group(body, self._bar()), title=Text(self._title), title_align="left", border_style="dim")

    def _columns(self, groups: dict[str, list[str]]) -> Table:
        """Groups side by side, as many as fit, each added to the shortest column."""
        names_width = max(len(name.rpartition("/")[2]) for name in self._values)
        n_columns = max(1, min(len(groups), (self._live.console.width - 4) // (names_width + 27)))
        columns: list[list[RenderableType]] = [[] for _ in range(n_columns)]
        heights = [0] * n_columns
        for group, names in groups.items():
            shortest = heights.index(min(heights))
            columns[shortest].append(self._group(group, names, names_width))
            heights[shortest] += len(names) + 2
        grid = Table.grid(padding=(0, 3))
        grid.add_row(*[Group(*tables) for tables in columns])
        return grid

    def _group(self, group: str, names: list[str], names_width: int) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
        table.add_column(no_wrap=True, min_width=names_width)
        table.add_column(justify="right", no_wrap=True, min_width=9)
        table.add_column(justify="right", style="dim", no_wrap=True, min_width=11)
        table.add_row(Text(group, style="bold cyan"))
        for name in names:
            value, before = self._values[name], self._before.get(name, math.nan)
            style = "" if math.isfinite(value) else "bold red"
            table.add_row(Text(name.rpartition("/")[2]), Text(format_number(value), style), _change(value, before))
        table.add_row()
        return table

    def _bar(self) -> RenderableType:
        pace = self._pace
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1)
        for _ in range(4):
            grid.add_column(justify="right", no_wrap=True)
        grid.add_row(
            ProgressBar(total=1.0, completed=pace.fraction()),
            f"{pace.fraction():.0%}" if pace.n_steps else "",
            self._position(),
            pace.speed(self._values),
            pace.time_left(),
        )
        return grid


def _change(value: float, before: float) -> str:
    difference = value - before
    if not math.isfinite(difference) or difference == 0:
        return ""
    return f"{'▲' if difference > 0 else '▼'} {format_number(abs(difference))}"
