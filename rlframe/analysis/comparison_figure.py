"""The figure of a comparison: performance profiles, and scores by env_steps and by wall time, with 95 % bands."""

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from rlframe.analysis.aggregates import interval, iqm, profile
from rlframe.analysis.figures import COLORS, time_scale
from rlframe.analysis.tables import Comparison

_ELAPSED = "time/elapsed_s"


def fill_figure(figure: Any, comparison: Comparison, step: float) -> None:
    """Draw into an empty figure; the wall time is left out if a file does not have it."""
    has_time = all(_ELAPSED in each.columns for files in comparison.files.values() for each in files)
    clocks = [next(iter(comparison.files.values()))[0].clock(), *([_ELAPSED] if has_time else [])]
    axes = figure.subplots(1, 1 + len(clocks))
    _draw_profiles(axes[0], comparison, step)
    for axis, clock in zip(axes[1:], clocks, strict=True):
        _draw_curves(axis, comparison, clock)
    for axis in axes:
        axis.grid(True, color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize="small")


def _draw_profiles(axis: Any, comparison: Comparison, step: float) -> None:
    scores = {name: comparison.scores(name, step) for name in comparison.files}
    every = np.concatenate([task for tasks in scores.values() for task in tasks])
    thresholds = np.linspace(min(0.0, every.min()), every.max(), 101)
    for name, color in zip(scores, cycle(COLORS), strict=False):
        _line(axis, thresholds, partial(profile, thresholds=thresholds), scores[name], color, name)
    axis.set(xlabel="score", ylabel="fraction of runs above it", ylim=(0, 1.02))


def _draw_curves(axis: Any, comparison: Comparison, clock: str) -> None:
    curves = {name: comparison.curves(name, clock) for name in comparison.files}
    scale, label = time_scale(max(x[-1] for x, _ in curves.values())) if clock == _ELAPSED else (1.0, clock)
    for (name, (x, scores)), color in zip(curves.items(), cycle(COLORS), strict=False):
        _line(axis, x / scale, iqm, scores, color, name)
    axis.set(xlabel=label, ylabel="IQM of scores")


def _line(axis: Any, x: np.ndarray, statistic: Any, scores: list[np.ndarray], color: str, label: str) -> None:
    axis.plot(x, statistic(scores), color=color, linewidth=1.8, label=label)
    axis.fill_between(x, *interval(statistic, scores), color=color, alpha=0.18, linewidth=0)
