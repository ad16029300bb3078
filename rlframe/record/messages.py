"""Where the messages of a run go: to the console that is opened for it, and into debug.log. Used by `record.run`."""

import io
import logging
import sys
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from pathlib import Path

from rlframe.core.context import set_within
from rlframe.core.files import is_in_place, open_to_append
from rlframe.record.console import Console, NotebookConsole, PlainConsole, in_notebook, on_terminal

LEVELS = ("DEBUG", "INFO", "WARNING")

_logger = logging.getLogger("rlframe")
_speaker: ContextVar[str] = ContextVar("rlframe_speaker", default="")


def open_console(title: str, log_level: str) -> Console:
    """The console of a run that shows messages of `log_level`: empty, of none; with WARNING it shows no rows."""
    if log_level in ("", "WARNING"):
        return Console()
    if not on_terminal():
        return NotebookConsole() if in_notebook() else PlainConsole()
    from rich.console import Console as RichConsole  # imported for terminals only: it takes 50 ms

    from rlframe.record.rich_console import LiveConsole

    return LiveConsole(title, RichConsole())


class DebugLog(logging.FileHandler):
    """debug.log. A message lost to a disk error is still shown on the console."""

    level_before = logging.NOTSET  # of the logger, before any run's handlers; see `attach`

    def __init__(self, path: Path) -> None:
        """Open it to append. Raises as `open_to_append`."""
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))

    def is_in_place(self) -> bool:
        return self.stream is not None and is_in_place(self.stream)

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BufferedWriter(open_to_append(Path(self.baseFilename))), "utf-8", "backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class ConsoleMessages(logging.Handler):
    """Shows messages of a level and above on the run's console, so that they do not break its table."""

    level_before = logging.NOTSET  # see DebugLog

    def __init__(self, console: Console, level: str) -> None:
        super().__init__(level)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._console.message(level + self.format(record))


def debug_is_shown() -> bool:
    """Whether a console shows messages of the level DEBUG."""
    return any(isinstance(each, ConsoleMessages) and each.level <= logging.DEBUG for each in _logger.handlers)


def speaking_as(name: str) -> AbstractContextManager[None]:
    """Context of one of several runs at once: handlers attached in it take no messages of the other runs."""
    return set_within(_speaker, name)


def attach(handler: DebugLog | ConsoleMessages, until: ExitStack) -> None:
    """Give rlframe's messages of all levels to a handler until the stack is closed, which closes it."""
    others, own = _attached(), _speaker.get()
    handler.level_before = others[0].level_before if others else _logger.level
    handler.addFilter(lambda _: not own or _speaker.get() in ("", own))
    _logger.addHandler(handler)
    _logger.setLevel(logging.DEBUG)
    until.callback(_restore_level, handler.level_before)
    until.callback(handler.close)
    until.callback(_logger.removeHandler, handler)


def _restore_level(level: int) -> None:
    """As it was before any handler was attached, once none is."""
    if not _attached():
        _logger.setLevel(level)


def _attached() -> list[DebugLog | ConsoleMessages]:
    return [each for each in _logger.handlers if isinstance(each, DebugLog | ConsoleMessages)]
