"""Where the messages of a run go: into its debug.log, and to its console. Used by `record.run`."""

import io
import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from rlframe.core.files import is_in_place, open_to_append
from rlframe.record.console import Console

_logger = logging.getLogger("rlframe")


class DebugLog(logging.FileHandler):
    """debug.log. A message lost to a disk error is still shown on the console."""

    def is_in_place(self) -> bool:
        return self.stream is not None and is_in_place(self.stream)

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BufferedWriter(open_to_append(Path(self.baseFilename))), "utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def open_debug_log(path: Path) -> DebugLog:
    """Open debug.log to append to it. Raises as `open_to_append`."""
    handler = DebugLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    return handler


class ConsoleMessages(logging.Handler):
    """Shows messages of a level and above on the run's console, so that they do not break its table."""

    def __init__(self, console: Console, level: str) -> None:
        super().__init__(level)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._console.message(level + self.format(record))


def attach(handler: logging.Handler, until: ExitStack) -> None:
    """Give rlframe's messages of all levels to a handler until the stack is closed, which closes it."""
    before = _logger.level
    _logger.addHandler(handler)
    _logger.setLevel(logging.DEBUG)
    until.callback(handler.close)
    until.callback(_logger.removeHandler, handler)
    until.callback(_logger.setLevel, before)
