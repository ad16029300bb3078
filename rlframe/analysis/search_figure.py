"""The figure of a search for `rlframe.plot`: its history, the importance of its keys, and the scores along each key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlframe.analysis.figures import literal
from rlframe.analysis.trials import DONE, PRUNED, SearchData, SearchedKey, Trial, importance

BLUE, RED, GREY = "#0072B2", "#D55E00", "0.6"  # complete, best, pruned
_N_COLUMNS, _MAX_SLICES, _MAX_TICKS = 3, 12, 20
_MAX_LABEL, _MAX_TITLE = 40, 100  # characters


def fill_figure(figure: Any, data: SearchData, title: str, bound: float) -> None:
    """Draw a search that has a score into a figure of matplotlib, and set its size; of many keys the most important.

    Args:
        bound: a horizontal line in every panel of scores; nan: none.
    """
    keys = data.keys
    if len(keys) > _MAX_SLICES:
        shares = importance(data)
        keys = tuple(sorted(keys, key=lambda key: -shares.get(key.name, 0.0))[:_MAX_SLICES])
    n_rows = 1 + math.ceil(len(keys) / _N_COLUMNS)
    figure.set_size_inches(10.5, 2.9 * n_rows)
    grid = figure.add_gridspec(n_rows, _N_COLUMNS)
    panels = [(key, figure.add_subplot(grid[1 + k // 3, k % 3])) for k, key in enumerate(keys)]
    history = figure.add_subplot(grid[0, : _N_COLUMNS - 1])
    _draw_history(history, data)
    _draw_importance(figure.add_subplot(grid[0, _N_COLUMNS - 1]), data)
    for key, axes in panels:
        _draw_slice(axes, data, key)
    for axes in (history, *(axes for _, axes in panels)):
        axes.set_ylabel(_short(data.metric), fontsize="small")
        axes.grid(True, color="0.9", linewidth=0.8)
        if math.isfinite(bound):
            axes.axhline(bound, color="0.35", linewidth=1.0, linestyle=(0, (5, 3)))
    for axes in figure.axes:
        axes.set_axisbelow(True)
        axes.tick_params(labelsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(literal(title[:_MAX_TITLE]), fontsize="medium")


def _short(text: str) -> str:
    """A text of a file, at the length of a label."""
    return literal(text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 3]}...")


def _draw_history(axes: Any, data: SearchData) -> None:
    """The score of each trial in order, and the best so far."""
    done, pruned = data.scored(DONE), data.scored(PRUNED)
    axes.plot(*_points(done), "o", color=BLUE, markersize=4, label="trial")
    if pruned:
        axes.plot(*_points(pruned), "o", markerfacecolor="none", color=GREY, markersize=4, label="pruned: last value")
    best = (np.minimum if data.lower_is_better else np.maximum).accumulate([trial.score for trial in done])
    ends = [*(trial.number for trial in done), data.trials[-1].number]
    axes.step(ends, [*best, best[-1]], where="post", color=RED, linewidth=1.8, label="best so far")
    axes.set_xlabel("trial", fontsize="small")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(
        frameon=False, fontsize="small", loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.0
    )


def _points(trials: Sequence[Trial]) -> tuple[list[int], list[float]]:
    return [trial.number for trial in trials], [trial.score for trial in trials]


def _draw_importance(axes: Any, data: SearchData) -> None:
    shares = importance(data)
    names = list(reversed(list(shares)[:_MAX_SLICES]))
    axes.barh([_short(name.rpartition(".")[2]) for name in names], [shares[name] for name in names], color=BLUE)
    axes.set_xlabel("importance" if shares else "importance: too few trials yet", fontsize="small")
    axes.set_xlim(0.0, 1.0)
    if not shares:
        axes.set_yticks([])


def _draw_slice(axes: Any, data: SearchData, key: SearchedKey) -> None:
    """The scores against one key; later trials are darker, and the best one is marked."""
    done, pruned = ([each for each in data.scored(state) if key.name in each.values] for state in (DONE, PRUNED))
    order = [trial.number for trial in done]
    shown = {"c": order, "cmap": "Blues", "vmin": -len(data.trials), "s": 18, "clip_on": False, "zorder": 3}
    axes.scatter([trial.values[key.name] for trial in done], [trial.score for trial in done], **shown)
    xs, ys = [trial.values[key.name] for trial in pruned], [trial.score for trial in pruned]
    axes.scatter(xs, ys, s=18, facecolors="none", edgecolors=GREY, clip_on=False)
    best = data.best()
    if best and key.name in best.values:
        axes.plot([best.values[key.name]], [best.score], "*", color=RED, markersize=11, clip_on=False, zorder=4)
    if key.choices:
        shown_choices = range(0, len(key.choices), math.ceil(len(key.choices) / _MAX_TICKS))
        axes.set_xticks(shown_choices, [_short(key.choices[k]) for k in shown_choices], rotation=20)
        axes.set_xlim(-0.5, len(key.choices) - 0.5)
    else:
        axes.set_xscale("log" if key.log else "linear")
        axes.set_xlim(key.low, key.high)
    axes.set_xlabel(_short(key.name), fontsize="small")
