"""The figure of a comparison: performance profiles, and scores by env_steps and by wall time, with 95 % bands."""

import sys
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from rlframe.analysis.aggregates import interval, iqm, profile
from rlframe.analysis.figures import COLORS, time_scale
from rlframe.analysis.tables import Comparison
from rlframe.core.errors import printable

_ELAPSED = "time/elapsed_s"


def fill_figure(figure: Any, comparison: Comparison, step: float) -> None:
    """Draw into an empty figure; the wall time is left out if a file does not have it."""
    has_time = all(each.has(_ELAPSED, comparison.metric) for files in comparison.files.values() for each in files)
    clocks = [next(iter(comparison.files.values()))[0].clock(), *([_ELAPSED] if has_time else [])]
    axes = figure.subplots(1, 1 + len(clocks))
    _draw_profiles(axes[0], comparison, step)
    for axis, clock in zip(axes[1:], clocks, strict=True):
        _draw_curves(axis, comparison, clock)
    for axis in axes:
        axis.grid(True, color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(handles=axes[1].get_lines(), frameon=False, fontsize="small")


def _draw_profiles(axis: Any, comparison: Comparison, step: float) -> None:
    scores = {name: comparison.scores(name, step) for name in comparison.files}
    every = {name: np.concatenate(tasks) for name, tasks in scores.items()}
    there = [name for name in scores if np.isfinite(every[name]).all()]
    for name in (each for each in scores if each not in there):
        print(printable(f"{name}: without a profile, as not all of its runs have a score at {step:g}"), file=sys.stderr)
    all_scores = np.concatenate([np.zeros(1), *(every[name] for name in there)])
    thresholds = np.linspace(all_scores.min(), all_scores.max(), 101)
    for name, color in zip(scores, cycle(COLORS), strict=False):
        if name not in there:
            continue
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
