"""The bar chart of `benchmarks.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.parts.turns import Line


def relative(rates: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Rates over that of a row's first peer, by row and name; that is Stable-Baselines3, if it is measured.

    Limits of parts are left out; with no peer, over rlframe's.
    """
    rows: dict[str, dict[str, float]] = {}
    for each in rates:
        if not each.name.startswith("limit: "):
            rows.setdefault(each.group, {})[each.name] = each.median
    return {row: {name: rate / _base(found) for name, rate in found.items()} for row, found in rows.items()}


def _base(found: dict[str, float]) -> float:
    others = [rate for name, rate in found.items() if name != "rlframe"]
    return next(iter(others or found.values()))


def draw(rates: Sequence[Line], path: str) -> None:
    """One group of bars a row, one colour a framework; needs matplotlib.

    Raises:
        ValueError: matplotlib does not know the file's suffix.
    """
    from matplotlib.figure import Figure

    rows = relative(rates)
    names = list(dict.fromkeys(name.rstrip(" *") for found in rows.values() for name in found))
    n_bars = sum(len(found) for found in rows.values())
    figure = Figure(figsize=(8, 1 + 0.3 * n_bars), layout="constrained")
    axes: Any = figure.subplots()
    place, ticks = 0.0, []
    for row, found in rows.items():
        first = place
        for name, times in found.items():
            axes.barh(place, times, color=f"C{names.index(name.rstrip(' *'))}")
            axes.text(times, place, f" {times:.2f} {'*' * name.endswith('*')}", va="center", fontsize=8)
            place += 1
        ticks.append((row, (first + place - 1) / 2))
        place += 1
    axes.set_yticks([at for _, at in ticks], [row for row, _ in ticks])
    axes.invert_yaxis()
    axes.axvline(1, color="0.6", linewidth=0.8, zorder=0)
    axes.margins(x=0.1)
    axes.set_xlabel("env steps a second, over those of Stable-Baselines3 (or of the row's first peer)")
    handles = [axes.barh(0, 0, color=f"C{i}") for i in range(len(names))]
    axes.legend(handles, names, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=150)
