"""The plot command, `python -m rlframe.plot DIR...`: draws learning curves with bands over seeds, or a search."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.curves import LearningCurve, RunData, SeedGroup, choose_x, choose_y, make_curve
from rlframe.analysis.figures import COLORS, literal, new_figure, save_figure, time_scale
from rlframe.analysis.results import find_curves
from rlframe.analysis.search_figure import fill_figure
from rlframe.analysis.trials import DONE, SEARCH_JOURNAL, SearchData, importance, read_search
from rlframe.core.command_line import KeyValues, exit_with, paths_and_settings, run_command
from rlframe.core.config import check_one_of, nearest
from rlframe.core.errors import ConfigError, decimals, pluralize, printable
from rlframe.core.files import prepare_output

USAGE = """\
python -m rlframe.plot DIR... [key=value ...]

DIR is a run directory, a directory of run_* (the seeds of one experiment), a study (a directory of those), or a result
file (FILE.csv of `rlframe results add`).
Runs of one directory that differ only in their seed are one curve: their mean with a 95 % bootstrap band.
A search (a study with search.KEY=) is drawn as the scores of its trials in order, the importance of its keys, and the
scores along each key; DIR/trial_* draws the curves of its trials. It takes out=, bound= and title=.

  out=curves.png           the image file; its suffix sets the format (png, pdf, svg)
  x=env_steps              env_steps | updates | elapsed (wall time); by default updates if all learned from data alone
  y=eval/return_mean       any column of progress.csv; episode/return_mean if there was no evaluation
  labels=a,b               one label per curve, in the order of the DIRs
  smooth=1                 moving average over this many rows of each run
  center=mean              mean | iqm (interquartile mean) over the seeds
  bound=475                a horizontal line, such as the return that counts as solved
  title=...                title of the plot; by default the environment's name
"""
X_COLUMNS = {"env_steps": "env_steps", "updates": "updates", "elapsed": "time/elapsed_s"}

_CONVERT: dict[str, Callable[[str], Any]] = {
    "out": Path,
    "labels": lambda text: tuple(text.split(",")),
    "smooth": int,
    "bound": float,
}


@dataclass(frozen=True)
class PlotOptions:
    """The options of the command line."""

    dirs: tuple[Path, ...]
    out: Path = Path("curves.png")
    x: str = ""  # decided by what the runs learned from
    y: str = "eval/return_mean"
    labels: tuple[str, ...] = ()
    smooth: int = 1  # rows
    center: str = "mean"
    bound: float = math.nan  # nan: no line
    title: str = ""

    def decided(self, experiments: Sequence[SeedGroup]) -> "PlotOptions":
        """With an x, and a y that the experiments have."""
        return replace(self, x=self.x or choose_x(experiments), y=choose_y(experiments, self.y))


def parse(arguments: Sequence[str]) -> PlotOptions:
    """The options from DIRs and key=value arguments; raises ConfigError for wrong ones."""
    dirs, settings = paths_and_settings(arguments)
    given = {key: _value(key, value) for key, value in KeyValues(settings).remaining.items()}
    if not dirs:
        raise ConfigError("no run directory is given; see python -m rlframe.plot --help")
    return replace(PlotOptions(tuple(map(Path, dirs))), **given)


def _value(key: str, text: str) -> Any:
    known = [option.name for option in fields(PlotOptions) if option.name != "dirs"]
    if key not in known:
        raise ConfigError(f"{key!r} is not an option ({', '.join(known)}){nearest(key, known)}")
    if choices := {"x": tuple(X_COLUMNS), "center": ("mean", "iqm")}.get(key):
        check_one_of(key, text, choices)
    try:
        value = _CONVERT.get(key, str)(text)
    except ValueError:
        value = None
    if value is None or (key == "smooth" and value < 1):
        raise ConfigError(f"{key}={text!r} is not a {'whole number >= 1' if key == 'smooth' else 'number'}")
    return value


def drawn_columns(experiments: Sequence[SeedGroup], options: PlotOptions) -> list[np.ndarray]:
    """What the figure of `decided` options is drawn from: x and y of each run."""
    return [
        run.columns[name] for each in experiments for run in each.runs for name in (X_COLUMNS[options.x], options.y)
    ]


def draw(experiments: Sequence[SeedGroup], options: PlotOptions, title: str) -> list[LearningCurve]:
    """Draw the curves of experiments into `options.out`, which is `decided`; returns them.

    Raises:
        ConfigError: they have no curves, there is no matplotlib, or the file cannot be written.
    """
    curves = [make_curve(each, X_COLUMNS[options.x], options.y, options.smooth, options.center) for each in experiments]
    figure = new_figure()
    from matplotlib.ticker import EngFormatter  # an optional extra

    axes = figure.add_subplot()
    scale, x_label = 1.0, options.x
    if options.x == "elapsed":
        scale, x_label = time_scale(max(curve.x[-1] for curve in curves))
    for index, curve in enumerate(curves):
        color, x = COLORS[index % len(COLORS)], curve.x / scale
        style = ("-", "--", ":", "-.")[index // len(COLORS) % 4]
        seeds = f" ({curve.n_seeds} seeds)" if curve.n_seeds > 1 else ""
        marker = "o" if curve.x.size == 1 else ""
        label = literal(f"{curve.label}{seeds}")
        axes.plot(x, curve.center, style, color=color, linewidth=1.8, marker=marker, label=label)
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
    if math.isfinite(options.bound):
        axes.axhline(options.bound, color="0.35", linewidth=1.0, linestyle=(0, (5, 3)), label=f"{options.bound:g}")
    axes.set(title=literal(title), xlabel=x_label, ylabel=options.y)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if options.x != "elapsed":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k, 2M
    axes.legend(frameon=False, fontsize="small")
    save_figure(figure, options.out, drawn_columns(experiments, options))
    return curves


def draw_search(data: SearchData, options: PlotOptions) -> None:
    """Draw a search into `options.out`; raises ConfigError as `draw`, or if no trial has a score yet."""
    defaults, given = vars(PlotOptions(options.dirs)), vars(options)
    for key in ("x", "y", "labels", "smooth", "center"):
        if given[key] != defaults[key]:
            raise ConfigError(f"{key}= is for curves, and {options.dirs[0]} is a search; plot its trials: DIR/trial_*")
    if not data.scored(DONE):
        raise ConfigError(f"{options.dirs[0]} has no trial with a score yet; for curves plot its trials: DIR/trial_*")
    figure = new_figure()
    title = printable(options.title) or f"{options.dirs[0].resolve().name}: {pluralize(len(data.trials), 'trial')}"
    fill_figure(figure, data, title, options.bound)
    save_figure(figure, options.out)


def plot_runs(runs: Any, labels: Sequence[str] = (), y: str = "eval/return_mean", **options: Any) -> Path:
    """Draw the learning curves of runs into a file, from a script or notebook; returns its path.

        plot_runs(["data/ppo", "data/dqn"], out="curves.png")  # directories: of a run, of its seeds, of a study
        plot_runs([run.metrics, frame], ["here", "there"])  # columns by name: rlframe.build's run, or a pandas frame
        plot_runs(["data/search"])  # a search by itself: its history, importance and slices
        plot_runs([[one.metrics, two.metrics]], ["two seeds"])
        plot_runs({"here": run, "there": frame})
        plot_runs("data/ppo")  # one needs no list

    Args:
        options: those of the command (`USAGE`), but for DIR: out, x, smooth, center, bound, title.
    Raises:
        ConfigError: a wrong option, no rows, the file cannot be written, or matplotlib is not installed.
    """
    if isinstance(runs, Mapping) and runs and all(map(_is_run, runs.values())):
        if labels:
            raise ConfigError("plot_runs takes no labels beside a mapping, whose keys they are")
        labels, runs = list(map(str, runs)), list(runs.values())
    if isinstance(runs, str | Path) or _has_rows(runs):
        runs = [runs]
    if not len(runs):
        raise ConfigError("plot_runs needs a run")
    if labels and len(labels) != len(runs):
        raise ConfigError(f"plot_runs needs one label for each of its runs, or none, not {len(labels)} for {len(runs)}")
    checked = {key: _value(key, str(value)) for key, value in options.items()}
    runs = [Path(each).expanduser() if isinstance(each, str | Path) else each for each in runs]
    names = list(labels) or ["" if isinstance(each, Path) else f"run {n}" for n, each in enumerate(runs)]
    if len(runs) == 1 and isinstance(runs[0], Path) and (runs[0] / SEARCH_JOURNAL).is_file():
        search = replace(PlotOptions((runs[0],), y=y, labels=tuple(labels)), **checked)
        prepare_output(search.out)
        draw_search(read_search(search.dirs[0]), search)
        return search.out
    found = [one for each, name in zip(runs, names, strict=True) for one in _experiments(each, name)]
    chosen = replace(PlotOptions((), y=y), **checked).decided(found)
    prepare_output(chosen.out)
    draw(found, chosen, printable(chosen.title))
    return chosen.out


def _has_rows(run: Any) -> bool:
    """Whether these are columns by name, or a run of rlframe.build, which has some."""
    return hasattr(run, "keys") or hasattr(run, "metrics")


def _is_run(given: Any) -> bool:
    """Whether it is a directory, has columns, or is a list of several seeds' columns."""
    is_list = isinstance(given, list | tuple) and all(map(_has_rows, given))
    return is_list or isinstance(given, str | Path) or _has_rows(given)


def _experiments(runs: Any, label: str) -> list[SeedGroup]:
    """One or more experiments of a directory, or one of columns or of several seeds' columns."""
    if isinstance(runs, Path):
        return find_curves([runs], [label] if label else [])
    seeds = runs if isinstance(runs, list | tuple) else [runs]
    found = [dict(getattr(each, "metrics", each)) for each in seeds]
    columns = [{str(name): np.asarray(values, float) for name, values in each.items()} for each in found]
    return [SeedGroup(label, tuple(RunData(Path(label), each, {}) for each in columns))]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_command(_plot, arguments, USAGE if arguments else "")


def _plot(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    prepare_output(options.out)
    if len(options.dirs) == 1 and (options.dirs[0] / SEARCH_JOURNAL).is_file():
        return _plot_search(options)
    experiments = find_curves(options.dirs, options.labels)
    options = options.decided(experiments)
    envs = {str(run.config.get("env", "")) for experiment in experiments for run in experiment.runs}
    title = options.title or " and ".join(sorted(envs - {""})[:3]) or experiments[0].label
    x_column = X_COLUMNS[options.x]
    for curve in draw(experiments, options, printable(title)):
        band = f" [{decimals(curve.low[-1])}, {decimals(curve.high[-1])}]" if curve.n_seeds > 1 else ""
        end = f"at {x_column} {curve.x[-1]:,.0f}, {pluralize(curve.n_seeds, 'seed')}"
        print(printable(f"{curve.label}: {options.y} {decimals(curve.center[-1])}{band} {end}"))
    print(options.out)
    return 0


def _plot_search(options: PlotOptions) -> int:
    data = read_search(options.dirs[0])
    draw_search(data, options)
    if best := data.best():
        print(printable(f"best: trial_{best.number}, {data.metric} {best.score:.6g}: {data.words(best)}"))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in importance(data).items())
    print(printable(f"importance: {shares or 'too few trials yet'}"))
    print(options.out)
    return 0


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
