"""Exceptions whose message is enough for the user, warnings, and formatting of messages."""

import functools
import logging
import signal

ONCE = "once"  # attribute of a log record that is not repeated
_BEGINNING, _END = 1_500, 500  # characters of a long message that are kept


class ReadableError(Exception):
    """Base of errors that commands print without a traceback."""

    prefix = "error"
    exit_status = 1
    shows_cause = False  # whether to print the traceback of its cause, which is user code


class ConfigError(ReadableError):
    """An invalid setting, found before anything starts; one line, whatever the setting's own text is."""

    exit_status = 2

    def __init__(self, message: str) -> None:
        text = message.replace("\n", " ")
        is_long = len(text) > _BEGINNING + _END
        super().__init__(f"{text[:_BEGINNING]} ... {text[-_END:]}" if is_long else text)


class SnapshotError(ReadableError):
    """A snapshot that cannot be used; the message names the file, the problem and the remedy."""

    def __init__(self, message: str, damaged: bool = False) -> None:
        """`damaged`: the file was valid once, so another snapshot of the run may be used instead."""
        super().__init__(message)
        self.damaged = damaged


class RecordError(ReadableError):
    """A snapshot or log row that could not be written; earlier ones are unchanged."""


class Interrupted(KeyboardInterrupt):
    """A run stopped by a signal. `exit_status` is the shell's: 128 + signal."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{signal.Signals(signum).name}: {message}")
        self.exit_status = 128 + signum


def pluralize(n: int, noun: str) -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def printable(text: str) -> str:
    """Escape all characters that a terminal would interpret, except line ends. For text from untrusted files."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning unless this process has logged it before; one from a worker process counts as its parent's."""
    logging.getLogger("rlframe").warning(text, extra={ONCE: True})
