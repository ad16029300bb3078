"""python -m rlframe.plot DIR...: learning curves of runs as one picture, with seeds and confidence bands."""

import csv
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.core.command import run_command
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, generator

USAGE = """\
python -m rlframe.plot DIR... [key=value ...]

DIR is a run directory, a directory of run_* (the seeds of one experiment), or a study (a directory of those).
Runs of one directory and one configuration, seeds aside, are one curve: their mean, with a 95 % bootstrap band.

  out=curves.png           where the picture goes; its ending decides the format (png, pdf, svg)
  x=env_steps              env_steps | elapsed (wall time)
  y=eval/return_mean       any column of progress.csv; episode/return_mean where there was no evaluation
  labels=a,b               one for each curve, in the order of the DIRs
  smooth=1                 moving average over this many rows of each run
  center=mean              mean | iqm (interquartile mean) over the seeds
  bound=475                a horizontal line, such as the return that counts as solved
  title=...                instead of the environment's name
"""
X_COLUMNS = {"env_steps": "env_steps", "elapsed": "time/elapsed_s"}
FALLBACK = {"eval/return_mean": "episode/return_mean"}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")  # for all eyes
N_RESAMPLES = 2_000
N_GRID = 200
# What may differ between the seeds of one experiment.
_SEED_KEYS = frozenset(
    ["seed", "run_ID", "name", "log_dir", "resume", "affinity", "device", "snapshot_mode", "snapshot_gap", "dry_run"]
)


class PlotError(ConfigError):
    """Something to tell the user in one line."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    dirs: tuple[Path, ...]
    out: Path = Path("curves.png")
    x: str = "env_steps"
    y: str = "eval/return_mean"
    labels: tuple[str, ...] = ()
    smooth: int = 1  # rows
    center: str = "mean"
    bound: float = math.nan  # nan: no line
    title: str = ""


@dataclass(frozen=True)
class RunData:
    """One run: its columns as numbers (nan where a cell is empty) and its config."""

    directory: Path
    columns: dict[str, np.ndarray] = field(repr=False)
    config: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Experiment:
    """Runs that differ in their seeds."""

    label: str
    runs: tuple[RunData, ...]


@dataclass(frozen=True)
class Curve:
    """What is drawn for one experiment; the band is the center itself where there is one seed."""

    label: str
    n_seeds: int
    x: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray


def parse(arguments: Sequence[str]) -> Options:
    """Options from DIRs and key=value.

    Raises:
        PlotError: an unknown key, a bad value, or no DIR.
    """
    dirs, given = [], {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or Path(argument).exists():
            dirs.append(Path(argument))
        else:
            given[key] = _value(key, value)
    if not dirs:
        raise PlotError("name at least one run directory; python -m rlframe.plot --help explains")
    return replace(Options(tuple(dirs)), **given)


def _value(key: str, text: str) -> Any:
    known = [option.name for option in fields(Options) if option.name != "dirs"]
    if key not in known:
        raise PlotError(f"{key!r} is not an option ({', '.join(known)}){nearest(key, known)}")
    choices = {"x": tuple(X_COLUMNS), "center": ("mean", "iqm")}.get(key, ())
    if choices and text not in choices:
        raise PlotError(f"{key}={text!r} is not one of {', '.join(choices)}{nearest(text, choices)}")
    try:
        match key:
            case "out":
                return Path(text)
            case "labels":
                return tuple(text.split(","))
            case "smooth":
                return _positive(int(text))
            case "bound":
                return float(text)
            case _:
                return text
    except ValueError:
        raise PlotError(f"{key}={text!r} is not a {'whole number >= 1' if key == 'smooth' else 'number'}") from None


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError(number)
    return number


def read_run(directory: Path) -> RunData:
    """The numbers of a run's progress.csv and its config; lines that a crash has torn are left out."""
    with (directory / "progress.csv").open(encoding="utf-8", errors="replace", newline="") as file:
        lines = list(csv.reader(file))
    header = lines[0] if lines else []
    rows = [line for line in lines[1:] if len(line) == len(header)]
    columns = {name: np.array([_number(row[i]) for row in rows]) for i, name in enumerate(header)}
    try:
        params = json.loads((directory / "params.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        params = {}
    config = params.get("config") if isinstance(params, dict) else None
    return RunData(directory, columns, config if isinstance(config, dict) else {})


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def find_runs(directory: Path) -> list[Path]:
    """The run directories that a DIR means, in the order of their names.

    Raises:
        PlotError: there is none.
    """
    if not directory.is_dir():
        raise PlotError(f"there is no directory {directory}")
    found = [Path(root) for root, _, files in os.walk(directory) if "progress.csv" in files]
    if not found:
        raise PlotError(f"{directory} holds no run: no progress.csv in it or below")
    return sorted(found, key=lambda path: [(len(part), part) for part in path.parts])


def find_experiments(dirs: Sequence[Path], labels: Sequence[str]) -> list[Experiment]:
    """Group the runs of all DIRs into experiments, and name them.

    Raises:
        PlotError: no runs, or labels that do not fit.
    """
    per_dir = [find_runs(directory) for directory in dirs]
    together = _group(list(dict.fromkeys(path.resolve() for paths in per_dir for path in paths)))
    if not labels:
        return together
    if len(labels) == len(together):
        return [replace(experiment, label=label) for experiment, label in zip(together, labels, strict=True)]
    apart = [_group([path.resolve() for path in paths]) for paths in per_dir]
    if len(labels) == len(dirs) and all(len(experiments) == 1 for experiments in apart):
        return [replace(found[0], label=label) for found, label in zip(apart, labels, strict=True)]
    names = ", ".join(experiment.label for experiment in together)
    raise PlotError(f"{len(labels)} labels for {len(together)} curves ({names}); give one for each")


def _group(paths: Sequence[Path]) -> list[Experiment]:
    by_place: dict[Path, list[RunData]] = {}
    for path in paths:
        place = path.parent if re.fullmatch(r"run_\d+", path.name) else path
        by_place.setdefault(place, []).append(read_run(path))
    root = Path(os.path.commonpath(list(by_place))) if len(by_place) > 1 else None
    experiments = []
    for place, runs in by_place.items():
        name = place.name if root is None or place == root else str(place.relative_to(root))
        for variant, members in _by_config(runs).items():
            label = f"{name}: {variant}" if variant and root is not None else variant or name
            experiments.append(Experiment(label, tuple(members)))
    return experiments


def _by_config(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs apart where their configs differ in more than the seed: averaging those would be a lie."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _SEED_KEYS)
    texts = [{key: json.dumps(run.config.get(key)).strip('"') for key in keys} for run in runs]
    differing = [key for key in keys if len({text[key] for text in texts}) > 1]
    groups: dict[str, list[RunData]] = {}
    for run, text in zip(runs, texts, strict=True):
        groups.setdefault(" ".join(f"{key}={text[key]}" for key in differing), []).append(run)
    return groups


def choose_y(experiments: Sequence[Experiment], y: str) -> str:
    """`y`, or what stands in for it where not every run has it (said on stderr).

    Raises:
        PlotError: a run has neither.
    """
    runs = [run for experiment in experiments for run in experiment.runs]
    lacking = [run for run in runs if not np.isfinite(run.columns.get(y, np.array([]))).any()]
    if not lacking:
        return y
    instead = FALLBACK.get(y, "")
    if instead and all(np.isfinite(run.columns.get(instead, np.array([]))).any() for run in runs):
        print(f"{lacking[0].directory} has no {y}: plotting {instead} instead", file=sys.stderr)
        return instead
    columns = [name for name, values in lacking[0].columns.items() if np.isfinite(values).any()]
    if not columns:
        raise PlotError(f"{lacking[0].directory} has no rows yet")
    raise PlotError(f"{lacking[0].directory} has no {y!r}; it has {', '.join(columns)}{nearest(y, columns)}")


def make_curve(experiment: Experiment, x_column: str, y: str, smooth: int, center: str) -> Curve:
    """Center and 95 % percentile bootstrap band over the seeds, on the range that all of them cover.

    Raises:
        PlotError: a run has no values to draw, or the runs share no range.
    """
    points = [_points(run, x_column, y, smooth) for run in experiment.runs]
    first = points[0][0]
    if all(np.array_equal(x, first) for x, _ in points):
        grid, values = first, np.stack([values for _, values in points])
    else:
        low, high = max(x[0] for x, _ in points), min(x[-1] for x, _ in points)
        if low >= high:
            raise PlotError(
                f"the runs of {experiment.label} share no range of {x_column}: one ends before another starts"
            )
        if high < 0.9 * max(x[-1] for x, _ in points):
            print(f"{experiment.label}: drawn to {x_column} {high:,.0f}, where its shortest run ends", file=sys.stderr)
        grid = np.linspace(low, high, N_GRID)
        values = np.stack([np.interp(grid, x, y_values) for x, y_values in points])
    low_band, high_band = _bootstrap(values, center)
    return Curve(experiment.label, len(points), grid, _center(values, center), low_band, high_band)


def _points(run: RunData, x_column: str, y: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
    if x_column not in run.columns:
        raise PlotError(f"{run.directory} has no {x_column!r} in its progress.csv")
    x, values = run.columns[x_column], run.columns[y]
    usable = np.isfinite(x) & np.isfinite(values)
    x, first = np.unique(x[usable], return_index=True)
    if not x.size:
        raise PlotError(f"{run.directory} has no rows with both {x_column} and {y}")
    values = values[usable][first]
    window = np.ones(min(smooth, values.size))
    return x, np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def _center(values: np.ndarray, center: str) -> np.ndarray:
    """Mean over axis -2, the seeds; of the middle half of them for iqm (a quarter off each side, rounded down)."""
    cut = values.shape[-2] // 4 if center == "iqm" else 0
    ordered = np.sort(values, axis=-2) if cut else values
    mean: np.ndarray = ordered[..., cut : values.shape[-2] - cut, :].mean(axis=-2)
    return mean


def _bootstrap(values: np.ndarray, center: str) -> tuple[np.ndarray, np.ndarray]:
    n_seeds = len(values)
    if n_seeds == 1:
        return values[0], values[0]
    draws = generator(0, Role.NOISE).integers(n_seeds, size=(N_RESAMPLES, n_seeds))
    columns = np.array_split(np.arange(values.shape[1]), max(1, values.size // 1_000))  # bounds the memory
    bands = [np.percentile(_center(values[:, part][draws], center), [2.5, 97.5], axis=0) for part in columns]
    low, high = np.concatenate(bands, axis=1)
    return low, high


def draw(curves: Sequence[Curve], options: Options, y: str, title: str) -> None:
    """The picture, into `options.out`.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # an extra; this class alone needs no display
    except ImportError:
        raise PlotError('plotting needs matplotlib: pip install "rlframe[plot]"') from None
    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="tight")
    axes = figure.add_subplot()
    scale, x_label = _x_axis(curves, options.x)
    for index, curve in enumerate(curves):
        color, x = COLORS[index % len(COLORS)], curve.x / scale
        style = ("-", "--", ":", "-.")[index // len(COLORS) % 4]
        seeds = f" ({curve.n_seeds} seeds)" if curve.n_seeds > 1 else ""
        marker = "o" if curve.x.size == 1 else ""
        axes.plot(x, curve.center, style, color=color, linewidth=1.8, marker=marker, label=f"{curve.label}{seeds}")
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
    if math.isfinite(options.bound):
        axes.axhline(options.bound, color="0.35", linewidth=1.0, linestyle=(0, (5, 3)), label=f"{options.bound:g}")
    axes.set(title=title, xlabel=x_label, ylabel=y)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if options.x == "env_steps":
        axes.xaxis.set_major_formatter(_short)
    axes.legend(frameon=False, fontsize="small")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out)
    except (OSError, ValueError) as error:
        raise PlotError(f"cannot write {options.out}: {error}") from None


def _x_axis(curves: Sequence[Curve], x: str) -> tuple[float, str]:
    if x == "env_steps":
        return 1.0, "env_steps"
    longest = max(curve.x[-1] for curve in curves)
    scale, unit = (3600.0, "h") if longest > 7200 else (60.0, "min") if longest > 180 else (1.0, "s")
    return scale, f"wall time ({unit})"


def _short(value: float, _position: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _title(experiments: Sequence[Experiment], options: Options) -> str:
    envs = {str(run.config.get("env", "")) for experiment in experiments for run in experiment.runs}
    return options.title or " and ".join(sorted(envs - {""})[:3]) or experiments[0].label


def _summary(curve: Curve, x_column: str, y: str) -> str:
    band = f" [{curve.low[-1]:,.1f}, {curve.high[-1]:,.1f}]" if curve.n_seeds > 1 else ""
    seeds = f"{curve.n_seeds} seed{'s' if curve.n_seeds > 1 else ''}"
    return f"{curve.label}: {y} {curve.center[-1]:,.1f}{band} at {x_column} {curve.x[-1]:,.0f}, {seeds}"


def main(arguments: Sequence[str]) -> int:
    """Draw what the arguments ask for; the exit status."""
    if {"--help", "-h", "help"} & set(arguments):
        print(USAGE)
        return 0
    return run_command(_plot, list(arguments))


def _plot(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    experiments = find_experiments(options.dirs, options.labels)
    y = choose_y(experiments, options.y)
    x_column = X_COLUMNS[options.x]
    curves = [make_curve(each, x_column, y, options.smooth, options.center) for each in experiments]
    draw(curves, options, y, _title(experiments, options))
    for curve in curves:
        print(_summary(curve, x_column, y))
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
