"""Tracker: base of the loggers that copy a run's rows to an experiment tracker."""

import json
import logging
import os
import re
import secrets
import sys
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError, describe
from rlframe.core.files import open_regular_file, read_json, replace_file
from rlframe.record.loggers import Logger
from rlframe.record.metrics import step_of

_ID_FILE = "tracker.json"
_ID = re.compile(r"[0-9a-f]{16}")
_CLOSE_S = 10.0  # for the last rows, at the end of the run

Points = Mapping[int, Set[str]]  # the names of metrics, by env_steps

_logger = logging.getLogger("rlframe")


class Tracker(Logger):
    """Copies progress.jsonl to a tracker in a thread, so that neither its network nor its disk slows the training.

    The thread asks the tracker which points (metrics at an env_steps) it has, and sends the others, in the order of the
    file. After an error, it starts again with asking, at the next row. So a kill at any moment loses no point and
    doubles none, also between the line in the file and its arrival at the tracker.

    A resumed run makes the rows after its snapshot again. Points that the tracker has already are kept, not replaced:
    they are equal if the resume is exact, except for times and memory. If it is not, they are those of the first time.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], name: str) -> None:
        """Connect to the tracker. Raises ConfigError if that fails."""
        self._rows = directory / "progress.jsonl"
        self._known: Points | None = None  # what the tracker had; None: ask it, and read from the first row
        self._position = 0  # in the file, in bytes
        self._wake, self._closing, self._failed = threading.Event(), False, False
        self._problem = ""  # the last that was logged
        self._thread = threading.Thread(target=self._copy, daemon=True, name=type(self).__name__)
        resumed = os.path.lexists(directory / _ID_FILE)
        run_id = _read_id(directory / _ID_FILE) if resumed else secrets.token_hex(8)
        try:
            self.connect(directory, config, name, run_id, resumed)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{self.title} cannot start: {describe(error)}; leave it out of loggers, or try again"
            ) from error
        if not resumed:
            replace_file(directory / _ID_FILE, json.dumps({"id": run_id}) + "\n")

    @property
    def title(self) -> str:
        """The name in `loggers=`."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def connect(self, directory: Path, config: Mapping[str, Any], name: str, run_id: str, resumed: bool) -> None:
        """Start the tracker's run `run_id`, or continue it if it exists. May raise any exception."""

    @abstractmethod
    def points(self) -> Points:
        """What the tracker has of the run."""

    @abstractmethod
    def send(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """Send the points of a row, under names of `metric_name`."""

    @abstractmethod
    def finish(self, failed: bool) -> None:
        """End the tracker's run; all rows were sent. `failed`: the run ended by an exception."""

    def metric_name(self, name: str) -> str:
        """The tracker's name of a metric."""
        return name

    def write(self, row: Mapping[str, float]) -> None:
        """Let the thread send the row, which is in progress.jsonl already."""
        self._wake.set()
        if not self._thread.ident:
            self._thread.start()

    def truncate_after(self, env_steps: int) -> None:
        """Let the thread read progress.jsonl, which was trimmed before, from its start."""
        self._known = None
        self.write({})

    def close(self) -> None:
        """Wait for the last rows, a few seconds; if they cannot be sent, the run sends them when it is resumed."""
        if self._closing:
            return
        self._failed, self._closing = sys.exc_info()[0] is not None, True
        self.write({})
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _logger.warning("%s is still busy after %g s; rows that it misses are sent on resume", self.title, _CLOSE_S)

    def _copy(self) -> None:
        closing = False
        while not closing:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing
            try:
                self._send_rows()
                if closing:
                    self.finish(self._failed)
            except (Exception, SystemExit) as error:  # sys.exit would end this thread without a word
                self._known = None
                self.n_failed += 1
                if self.n_failed == 1 or closing:
                    self._warn(f"{self.title} did not take all rows: {describe(error)}", closing)

    def _warn(self, problem: str, closing: bool) -> None:
        """Log a problem, and what becomes of the rows; the same problem is not repeated."""
        text = f"{self.title} did not take all rows to the end" if problem == self._problem else problem
        self._problem = problem
        _logger.warning("%s; %s", text, "resume= sends them" if closing else "they are sent later")

    def _send_rows(self) -> None:
        known = self._known
        if known is None:
            self._known = known = self.points()
            self._position = 0
        for row, position in _rows_from(self._rows, self._position):
            step = step_of(row)
            del row["env_steps"]
            metrics = {self.metric_name(name): value for name, value in row.items()}
            if missing := {name: value for name, value in metrics.items() if name not in known.get(step, ())}:
                self.send(step, missing)
            self._position = position


def _rows_from(path: Path, position: int) -> Iterator[tuple[dict[str, float], int]]:
    """The complete rows of a progress.jsonl from a position on, each with the position after it."""
    if not os.path.lexists(path):  # the run did not start
        return
    with open_regular_file(path, sys.maxsize) as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield {k: float(v) if isinstance(v, str) else v for k, v in json.loads(line).items()}, position


def _read_id(path: Path) -> str:
    run_id = str(read_json(path).get("id"))
    if not _ID.fullmatch(run_id):
        raise ConfigError(f"{path} is damaged: its id must have 16 hexadecimal digits; remove it to start new ones")
    return run_id
