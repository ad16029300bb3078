"""Errors whose message is all that a user needs, and the words of messages."""

from __future__ import annotations

import signal


class ReadableError(Exception):
    """Base of refusals and failures that commands print without a traceback."""

    prefix = "error"
    exit_status = 1
    shows_cause = False  # whether the traceback of its cause, somebody else's code, is part of what a user needs


class ConfigError(ReadableError):
    """A refusal before anything starts."""

    exit_status = 2


class Interrupted(KeyboardInterrupt):
    """A run stopped because it was asked to. `exit_status` is the shell's: 128 + signal."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{signal.Signals(signum).name}: {message}")
        self.exit_status = 128 + signum


def counted(n: int, noun: str) -> str:
    """A number and what it counts: 1 worker, 2 workers."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def printable(text: str) -> str:
    """The text with every character that a terminal would obey instead of showing written as its escape.

    Line ends stay. What comes from files of somebody else is printed through this.
    """
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
