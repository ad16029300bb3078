"""python -m rlframe.results VERB ...: keep the learning curves of all seeds in small files, and make tables of them."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import functools
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rlframe.analysis.add_runs import add_runs, add_settings
from rlframe.analysis.comparison_figure import fill_figure
from rlframe.analysis.figures import new_figure, save_figure
from rlframe.analysis.results import spell_seeds
from rlframe.analysis.tables import aggregates_table, compare, improvements_table, results_table
from rlframe.core.command_line import KeyValues, exit_with, run_command, run_verb
from rlframe.core.errors import ConfigError, pluralize, printable
from rlframe.core.files import prepare_output

USAGE = """\
usage: python -m rlframe.results VERB ... [key=value ...]

  add DIR... out=FILE.csv             add the seeds of run directories, or of a study's, to a result file
  add DIR... out=FOLDER/              the same, to a file for each setting of a study: FOLDER/SETTING.csv
  table FILE.csv...                   the returns of each file: mean and IQM over the seeds at the end
  compare NAME=FILE.csv,FILE.csv...   algorithms over tasks: mean, median, IQM, optimality gap, and for each pair the
                                      probability of improvement; the files in the same order of tasks

A result file has every evaluation of every seed of one configuration, in columns named as in progress.csv. Beside it,
FILE.json has the configuration, and for each seed the command, the versions, the machine and the day. Runs that differ
in more than the seed, threads, compile and when they stop early are refused; a seed that is there already must have the
same numbers.
Tables are Markdown; [a, b] is a 95 % interval (stratified percentile bootstrap over the seeds), if each task has three
seeds. The end is the last evaluation, not the best. `rlframe plot FILE.csv...` draws the curves.

of add:
  out=FILE.csv             the file, made if it is new, or with / at its end the folder of several
  columns=a,b              metrics to keep besides env_steps, updates and time/elapsed_s; by default the mean returns
                           of evaluations, or of training episodes if there was no evaluation
  note=TEXT                circumstances, such as other work on the machine
  partial=true             accept runs that have not reached their end
of table and compare:
  metric=eval/return_mean  the column
  at=50k,100k              env_steps (updates, of runs from data) at which to compare; table adds them to the end;
                           between two evaluations the value is on the line through them
of table:
  bound=475 within=100k    how many seeds reach a return, and when
of compare:
  low=0,-20 high=1000,20   the returns that score 0 and 1, for each task or for all; one task needs none
  out=FIGURE.png           draw performance profiles, and the IQM of the scores by env_steps and by wall time
"""
_MULTIPLES = {"k": 1e3, "M": 1e6}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_command(functools.partial(run_verb, _VERBS), argv, USAGE)


def _add(dirs: Sequence[str], words: KeyValues) -> None:
    out, columns, note = words.text("out"), words.text("columns"), words.text("note")
    partial = words.flag("partial")
    words.check_unknown()
    if not dirs or not out.endswith((".csv", "/")):
        raise ConfigError(
            f"name run directories and a file, DIR... out=FILE.csv, or a folder, out=FOLDER/: {len(dirs)} directories, "
            f"out={out!r}"
        )
    choices = Path(out), columns.split(",") if columns else (), note, partial
    paths = list(map(Path, dirs))
    for results in add_settings(paths, *choices) if out.endswith("/") else [add_runs(paths, *choices)]:
        seeds = f"{pluralize(len(results.rows), 'seed')} ({spell_seeds(list(results.rows))})"
        print(printable(f"{results.path}: {seeds} of {results.command()}"))


def _table(files: Sequence[str], words: KeyValues) -> None:
    metric, marks = words.text("metric", "eval/return_mean"), _numbers(words, "at")
    bound, within = _numbers(words, "bound"), _numbers(words, "within")
    words.check_unknown()
    if not files or max(len(bound), len(within)) > 1 or (within and not bound):
        raise ConfigError("name result files, FILE.csv..., and at most one bound= and one within=, which needs bound=")
    goal = *(bound or [math.nan]), *(within or [math.inf])
    print(printable(results_table(list(map(Path, files)), metric, marks, *goal)))


def _compare(files: Sequence[str], words: KeyValues) -> None:
    metric, marks, out = words.text("metric", "eval/return_mean"), _numbers(words, "at"), words.text("out")
    low, high = _numbers(words, "low"), _numbers(words, "high")
    files_of = functools.partial(re.split, r"(?<=\.csv),")  # a file's name may have commas
    named = {name: list(map(Path, files_of(text))) for name, text in words.remaining.items() if text.endswith(".csv")}
    words.remaining = {name: text for name, text in words.remaining.items() if name not in named}
    for name, text in words.remaining.items():
        _check_file(name, Path(files_of(text)[0]))
    words.check_unknown("NAME=FILE.csv")
    if files or not named or len(marks) > 1:
        raise ConfigError("name the files of each algorithm, NAME=FILE.csv,FILE.csv..., and at most one at=")
    if out:
        prepare_output(Path(out))
    step = marks[0] if marks else math.nan
    comparison = compare(named, metric, low, high)
    clocks = {each.clock() for files in comparison.files.values() for each in files}
    if len(clocks) > 1 and (marks or out):
        raise ConfigError("some of these runs step no environment, so they have no clock in common; leave at= and out=")
    print(printable(aggregates_table(comparison, step)))
    if len(named) > 1:
        print("\n" + printable(improvements_table(comparison, step)))
    if out:
        figure = new_figure(13.0, 3.8)
        fill_figure(figure, comparison, step)
        save_figure(figure, Path(out))
        print(f"\n{printable(out)}")


def _check_file(name: str, path: Path) -> None:
    """Raise ConfigError if a path is a directory, or a result file without its suffix."""
    if path.is_dir():
        files = sorted(each.name for each in path.glob("*.csv"))
        remedy = "make one of its runs by: rlframe results add DIR out=FILE.csv"
        if files:
            remedy = f"name its files, such as {name}={path / files[0]}"
        raise ConfigError(f"{name}={path} is a directory, not a result file; {remedy}")
    if path.with_name(f"{path.name}.csv").is_file():
        raise ConfigError(f"{name}={path} does not exist; did you mean {name}={path}.csv?")


def _numbers(words: KeyValues, key: str) -> list[float]:
    """The numbers of a key, separated by commas: 500, 50k, 1.5M."""
    text = words.text(key)
    try:
        parts = [(part[:-1], part[-1]) if part[-1:] in _MULTIPLES else (part, "") for part in text.split(",") if text]
        return [float(number) * _MULTIPLES.get(unit, 1.0) for number, unit in parts]
    except ValueError:
        raise ConfigError(f"{key}={text!r} must be numbers, such as 500 or 50k,1.5M") from None


_VERBS = {"add": _add, "table": _table, "compare": _compare}


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
