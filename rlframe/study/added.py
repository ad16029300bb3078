"""added.jsonl, the runs that were added to a study one by one: a line of JSON each, in the study's directory.

`python -m rlframe.study DIR add` appends a line. The queue of the study reads the new ones when a slot is free, and all
of them when the study is continued.
"""

import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import append, drop_torn_line, open_to_append, parse_json, read_regular_file
from rlframe.study.plan import MAX_RUNS, PlannedRun
from rlframe.study.queue import MoreRuns
from rlframe.study.record import FILE, is_occupied, read_record, size_and_time

ADDED_FILE = "added.jsonl"
_SETTING = re.compile(r"(\w[\w+=.,-]*(/\w[\w+=.,-]*)?)?")  # no path that leads out of the study
_MAX_NAME, _MAX_ID = 500, 10**15


@dataclass(frozen=True)
class Added:
    """A run of a grid; or a trial of a search, whose arguments are values of searched keys alone."""

    setting: str  # directory within the study; empty for a trial
    run_ID: int
    arguments: Mapping[str, str]
    own_length: bool = False  # runner.n_steps was given for this run; else it becomes longer with the study
    token: str = field(default_factory=partial(secrets.token_hex, 8), compare=False)  # of its line

    @property
    def name(self) -> str:
        """Its directory within the study."""
        return f"{self.setting}/run_{self.run_ID}" if self.setting else f"run_{self.run_ID}"


def append_added(directory: Path, added: Added) -> None:
    """Add a run. Raises ConfigError if the file is a link, OSError on a disk error; then nothing is added."""
    with closing(open_to_append(directory / ADDED_FILE)) as file:
        drop_torn_line(file)  # which would make a wrong line of this one
        append(file, f"{json.dumps(vars(added))}\n")


def read_added(directory: Path) -> list[Added]:
    """The runs that were added to a study, in order; a line that is being written is left out.

    Raises:
        ConfigError: the file is damaged, or no regular file.
    """
    path = directory / ADDED_FILE
    if not path.exists():
        return []
    lines = read_regular_file(path).split(b"\n")[:-1]
    try:
        if len(lines) > MAX_RUNS:
            raise ValueError(f"{len(lines):,} lines, more than the limit of {MAX_RUNS:,}")
        return [_read_line(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {printable(str(error)[:200])}; remove the wrong line") from None


def _read_line(line: bytes) -> Added:
    content = parse_json(line)
    setting, run_id, arguments, token = (content[key] for key in ("setting", "run_ID", "arguments", "token"))
    if not isinstance(setting, str) or len(setting) > _MAX_NAME or not _SETTING.fullmatch(setting):
        raise ValueError("setting is not a folder of the study")
    if type(run_id) is not int or not 0 <= run_id < _MAX_ID:
        raise ValueError("run_ID is not a whole number")
    if not isinstance(arguments, dict) or not all(isinstance(text, str) for text in arguments.values()):
        raise ValueError("arguments are not words")
    if not isinstance(token, str):
        raise ValueError("token is not a text")
    own_length = content.get("own_length", True)
    if not isinstance(own_length, bool):
        raise ValueError("own_length is not true or false")
    return Added(setting, run_id, arguments, own_length, token)


class AddedFile:
    """Reads the lines that are new since the last time."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stat, self._seen = directory, (0, 0), set[str]()

    def has_new(self) -> bool:
        """Whether `new` has some."""
        with suppress(ConfigError):
            return any(added.token not in self._seen for added in read_added(self._directory))
        return False

    def new(self) -> list[Added]:
        """The new lines; none, and a warning once, while the file is damaged."""
        stat = size_and_time(self._directory / ADDED_FILE)
        if stat == self._stat:
            return []
        self._stat = stat
        try:
            lines = read_added(self._directory)
        except ConfigError as error:
            warn(str(error))
            return []
        found = [added for added in lines if added.token not in self._seen]
        self._seen.update(added.token for added in found)
        return found


def warn(text: str) -> None:
    """Print a warning; the queue goes on."""
    print(printable(f"warning: {text}"), file=sys.stderr, flush=True)


class AddedRuns(MoreRuns):
    """The runs that are added to a study while its queue runs."""

    def __init__(self, directory: Path, make_run: Callable[[Added], PlannedRun], known: Sequence[PlannedRun]) -> None:
        """Args:
        make_run: raises ConfigError for one that must not be run.    known: runs that are in the study already.
        """
        self._file, self._make_run = AddedFile(directory), make_run
        self._known = {run.name for run in known}
        entries = read_record(directory)["runs"] if (directory / FILE).exists() else []
        self._recorded = {entry["name"] for entry in entries}  # whose folders are the study's

    def has_more(self) -> bool:
        return self._file.has_new()

    def more(self) -> list[PlannedRun]:
        found = []
        for added in self._file.new():
            try:
                run = self._make_run(added)
            except ConfigError as error:
                warn(str(error))
                continue
            if run.name in self._known:
                continue
            self._known.add(run.name)
            if run.name not in self._recorded and is_occupied(run.directory):
                warn(f"{run.directory} is not empty and not a run of this study; move it away to add the run")
            else:
                found.append(run)
        return found
