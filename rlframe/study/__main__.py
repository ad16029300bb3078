"""The study command, `python -m rlframe.study DIR`: shows the progress of a study, or adds runs to it."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rlframe.core.command_line import KeyValues, exit_with, run_command
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, printable
from rlframe.study.add import add_runs
from rlframe.study.overview import read_study
from rlframe.study.record import FILE, read_record
from rlframe.study.table import format_summary, open_status_table, summarize

USAGE = """\
usage: python -m rlframe.study DIR [watch=true]
       python -m rlframe.study DIR add [EXPERIMENT] KEY=VALUE ...

  python -m rlframe.study data/rates                 the state of every run, while the study runs or after it
  python -m rlframe.study data/rates watch=true      the same, until the queue ends; Ctrl-C ends only the watching
  python -m rlframe.study data/rates add algo.learning_rate=1e-4 seed=3
                                                     one more run, with the study's words but for these
  python -m rlframe.study data/rates add ppo seed=3,4
                                                     two, of the experiment ppo, if the study has several
  python -m rlframe.study data/search add algo.learning_rate=1e-3
                                                     one more trial of a search; the searcher chooses the other keys

A queue that runs the study starts the new run when a slot is free. If none runs, launch resume=DIR starts it.

  trust=false   add: allow the study's words to name code that is not part of rlframe (module:Class, ./file.py)
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_command(_study, argv, USAGE)


def _study(argv: list[str]) -> int:
    directory, verb, *rest = Path(argv[0]), *(argv[1:] or [""])
    if "=" in argv[0] and not directory.exists():
        raise ConfigError(f"{argv[0]:.60} is not a directory; the first word is that of the study")
    if verb == "add":
        names = read_record(directory).get("experiments", {}) if (directory / FILE).exists() else {}  # with = in some
        name = rest.pop(0) if rest and ("=" not in rest[0] or rest[0] in names) else ""
        words = KeyValues(rest)
        trust = words.flag("trust")
        print(add_runs(directory, name, words.remaining, trust))
        return 0
    if verb and "=" not in verb:
        raise ConfigError(f"{verb!r:.60} is not add, the only word after DIR{nearest(verb, ('add', 'watch=true'))}")
    words = KeyValues(argv[1:])
    watch = words.flag("watch")
    for key in words.remaining:
        raise ConfigError(f"unknown key {key!r:.60}; to add a run: DIR add {key:.60}=...{nearest(key, ('watch',))}")
    _show(directory, watch)
    return 0


def _show(directory: Path, watch: bool) -> None:
    """Show the table of a study: once, or again and again until its queue ends."""
    with closing(open_status_table()) as table:
        last = False
        while not last:
            study = read_study(directory)
            rows, last = study.rows(), not (watch and study.queue)
            table.show(rows, study.describe(rows), last)
            if not last:
                time.sleep(table.interval_s)
    results = [] if study.search else summarize(study.planned, study.statuses)
    if any(result.scores for result in results):
        print(printable(f"\n{format_summary(results)}"))


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
