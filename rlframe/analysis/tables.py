"""Markdown tables of result files: what each reached, when, and algorithms over several tasks; with 95 % intervals."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np

from rlframe.analysis.aggregates import Scores, interval, iqm, mean, median, optimality_gap, probability_of_improvement
from rlframe.analysis.results import Results, claim, read_results, short
from rlframe.core.errors import ConfigError, pluralize

Statistic = Callable[..., np.ndarray]

_FEWEST = 3  # seeds, of fewer of which an interval would be their range
_TOGETHER = 0.9  # ends of runs, as a fraction of the longest


def number(x: float) -> str:
    """A return or score with three digits or more: 6,482 and 52.3 and 0.20."""
    return "-" if math.isnan(x) else f"{x:,.{0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2}f}"


def estimate(statistic: Statistic, *groups: Scores) -> str:
    """A statistic with its interval, `482 [450, 500]`, if each task has seeds enough; a dash if a score is missing."""
    if any(np.isnan(task).any() for scores in groups for task in scores):
        return "-"
    value = number(float(statistic(*groups)))
    if any(task.shape[-1] < _FEWEST for scores in groups for task in scores):
        return value
    low, high = interval(statistic, *groups)
    return f"{value} [{number(float(low))}, {number(float(high))}]"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def results_table(
    files: Sequence[Path], metric: str, marks: Sequence[float], bound: float = math.nan, within: float = math.inf
) -> str:
    """A row for each file: its seeds, the mean at each mark, and mean and IQM of the last evaluations.

    Args:
        marks: env_steps, or updates of runs from data.    bound: says how many seeds reached it, and when; nan: no such
            column.    within: the step by which they had to.
    Raises:
        ConfigError: a file is missing or damaged, or has no such metric.
    """
    bounds = [] if math.isnan(bound) else [bound]
    head = [
        "results",
        "seeds",
        *("reached" for _ in bounds),
        *(f"at {short(mark)}" for mark in marks),
        "at the end",
        "IQM",
    ]
    rows = []
    for path in files:
        found = read_results(path)
        _tell_ends(found, metric)
        at_marks = [estimate(mean, [found.at(metric, mark)]) for mark in marks]
        ends = [estimate(statistic, [found.final(metric)]) for statistic in (mean, iqm)]
        claims = [claim(found, metric, each, within) for each in bounds]
        name = f"{path.resolve().parent.name}/{path.stem}"
        rows.append([name, str(len(found.rows)), *claims, *at_marks, *ends])
    return markdown(head, rows)


def _tell_ends(results: Results, metric: str) -> None:
    """Say so if seeds that count where they end do not end together."""
    ends = [results.curve(seed, metric)[0][-1] for seed in results.rows]
    if min(ends) < _TOGETHER * max(ends):
        where = f"{short(min(ends))} to {short(max(ends))} {results.clock()}"
        told = f"seeds end at {where}, and each counts where it ends; at= compares at one"
        print(f"{results.path}: {told}", file=sys.stderr)


@dataclass(frozen=True)
class Comparison:
    """Algorithms on the same tasks: the files of each in the order of the tasks, and what scores 0 and 1 on each."""

    files: Mapping[str, Sequence[Results]]
    metric: str
    low: np.ndarray  # [n_tasks], returns
    high: np.ndarray
    normalized: bool  # else the returns are the scores, and have no target

    def scores(self, name: str, step: float = math.nan) -> list[np.ndarray]:
        """The normalised scores of an algorithm at a step, or at the end: [n_seeds] of each task."""
        found = [
            each.final(self.metric) if math.isnan(step) else each.at(self.metric, step) for each in self.files[name]
        ]
        return [(x - low) / (high - low) for x, low, high in zip(found, self.low, self.high, strict=True)]

    def curves(self, name: str, clock: str) -> tuple[np.ndarray, list[np.ndarray]]:
        """Where the runs of all tasks have evaluations [n], and the scores there: [n, n_seeds] of each task."""
        runs = [[each.curve(seed, self.metric, clock) for seed in each.rows] for each in self.files[name]]
        first, last = max(x[0] for task in runs for x, _ in task), min(x[-1] for task in runs for x, _ in task)
        if first >= last:
            raise ConfigError(f"the runs of {name} share no range of {clock}; compare them without out=")
        if last < _TOGETHER * max(x[-1] for task in runs for x, _ in task):
            print(f"{name}: curves are cut at {clock} {last:,.0f}, where its shortest run ends", file=sys.stderr)
        x = np.linspace(first, last, 100)
        values = [np.stack([np.interp(x, *run) for run in task], axis=-1) for task in runs]
        return x, [(y - low) / (high - low) for y, low, high in zip(values, self.low, self.high, strict=True)]


def compare(
    files: Mapping[str, Sequence[Path]], metric: str, low: Sequence[float] = (), high: Sequence[float] = ()
) -> Comparison:
    """Read the files of algorithms on the same tasks.

    Args:
        low, high: returns that score 0 and 1, one for each task or one for all; by default returns are the scores.
    Raises:
        ConfigError: the numbers of files or bounds differ, environments or their arguments differ, or several tasks
            have no low and high.
    """
    (first, paths), *_ = files.items()
    for name, others in files.items():
        if len(others) != len(paths):
            counts = f"{first} has {pluralize(len(paths), 'file')}, {name} {len(others)}"
            raise ConfigError(f"{counts}; name one for each task, in the same order of tasks")
    if bool(low) != bool(high):
        raise ConfigError("low= and high= are the returns that score 0 and 1; give both, or none")
    if len(paths) > 1 and not low:
        raise ConfigError(f"{len(paths)} tasks need low= and high=, the returns that score 0 and 1 on each")
    found = {name: [read_results(path) for path in each] for name, each in files.items()}
    for each in zip(*found.values(), strict=True):
        for key in ("env", "env_kwargs", "eval.env", "eval.env_kwargs"):
            of_all = [results.config[key] for results in each if key in results.config]
            values = {x if isinstance(x, str) else json.dumps(x, sort_keys=True) for x in of_all}
            if len(values) > 1:
                raise ConfigError(
                    f"{key}={' and '.join(sorted(values))} are compared; name the tasks in the same order for all"
                )
    bounds = [_for_each(key, given, len(paths)) for key, given in (("low", low or [0.0]), ("high", high or [1.0]))]
    if (bounds[0] >= bounds[1]).any():
        raise ConfigError(f"low={','.join(map(str, low))} must be below high={','.join(map(str, high))}")
    return Comparison(found, metric, bounds[0], bounds[1], bool(low or high))


def _for_each(key: str, given: Sequence[float], n_tasks: int) -> np.ndarray:
    if len(given) not in (1, n_tasks):
        raise ConfigError(
            f"{key}= has {len(given)} numbers for {pluralize(n_tasks, 'task')}; give one, or one for each"
        )
    return np.broadcast_to(np.array(given, float), n_tasks)


def aggregates_table(comparison: Comparison, step: float = math.nan) -> str:
    """Mean, median, IQM and optimality gap of each algorithm, over all tasks."""
    gap = {"optimality gap": optimality_gap} if comparison.normalized else {}
    statistics: dict[str, Statistic] = {"mean": mean, "median": median, "IQM": iqm, **gap}
    rows = []
    for name, files in comparison.files.items():
        for each in files if math.isnan(step) else ():
            _tell_ends(each, comparison.metric)
        scores = comparison.scores(name, step)
        counts = [len(task) for task in scores]
        seeds = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
        rows.append([name, seeds, *(estimate(statistic, scores) for statistic in statistics.values())])
    return markdown(["algorithm", "seeds a task", *statistics], rows)


def improvements_table(comparison: Comparison, step: float = math.nan) -> str:
    """How probable it is that a run of one algorithm scores above one of another, for each pair."""
    scores = {name: comparison.scores(name, step) for name in comparison.files}
    pairs = permutations(scores, 2)
    rows = [[x, y, estimate(probability_of_improvement, scores[x], scores[y])] for x, y in pairs]
    return markdown(["algorithm", "over", "probability of improvement"], rows)
