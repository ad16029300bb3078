"""Errors whose message is all that a user needs: what is wrong, with which numbers, and what to do."""

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
