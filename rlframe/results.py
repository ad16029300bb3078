"""python -m rlframe.results VERB ...: keep the learning curves of all seeds in small files, and make tables of them."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import sys
from collections.abc import Sequence
from pathlib import Path

from rlframe.analysis.results import add_runs, spell_seeds
from rlframe.core.command_line import KeyValues, exit_with, run_command
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, pluralize, printable

USAGE = """\
usage: python -m rlframe.results VERB ... [key=value ...]

  add DIR... out=FILE.csv    add the seeds of run directories, or of a study's, to a result file, made if it is new

A result file has every evaluation of every seed of one configuration, in columns named as in progress.csv. Beside it,
FILE.json has the configuration, and for each seed the command, the versions, the machine and the day. Runs that differ
in more than the seed are refused; a seed that is there already must have the same numbers.

of add:
  out=FILE.csv           the file
  columns=a,b            metrics to keep besides env_steps, updates and time/elapsed_s; by default the mean returns
                         of evaluations, or of training episodes if there was no evaluation
  note=TEXT              circumstances, such as other work on the machine
  partial=true           accept runs that have not reached their end
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if not argv or {"--help", "-h", "help"} & set(argv):
        print(USAGE)
        return 0 if argv else 2
    return run_command(_run, list(argv))


def _run(argv: Sequence[str]) -> int:
    verb, *others = argv
    if verb not in _VERBS:
        raise ConfigError(f"{verb!r:.60} is not one of {', '.join(_VERBS)}{nearest(verb, _VERBS)}")
    paths = [word for word in others if "=" not in word or Path(word).exists()]
    _VERBS[verb](list(map(Path, paths)), KeyValues(word for word in others if word not in paths))
    return 0


def _add(dirs: Sequence[Path], words: KeyValues) -> None:
    out, columns, note = words.text("out"), words.text("columns"), words.text("note")
    partial = words.flag("partial")
    words.check_unknown(("out", "columns", "note", "partial"))
    if not dirs or not out.endswith(".csv"):
        raise ConfigError(f"name run directories and a file, DIR... out=FILE.csv: {len(dirs)} directories, out={out!r}")
    results = add_runs(dirs, Path(out), columns.split(",") if columns else (), note, partial)
    seeds = f"{pluralize(len(results.rows), 'seed')} ({spell_seeds(list(results.rows))})"
    print(printable(f"{results.path}: {seeds} of {results.command()}"))


_VERBS = {"add": _add}


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
