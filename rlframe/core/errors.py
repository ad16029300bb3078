"""Exceptions whose message is enough for the user, warnings, and formatting of messages."""

import functools
import logging
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

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


class PartError(ReadableError):
    """Code of the user's raised an exception, called sys.exit or returned what it must not; the message names it."""

    shows_cause = True


class StateLost(ReadableError):
    """A part of a state was lost while it was being saved; the rest can be saved again."""


class StateError(ReadableError, TypeError):
    """A state, often of a part of the user's own, has what a snapshot cannot hold; the message has its path."""


class Stopped(SystemExit):
    """Raised by rlframe itself to end its own process; any other SystemExit is a sys.exit in code of the user's."""


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Raise PartError, `part: <the exception>`, if the user's code inside raises an exception or calls sys.exit."""
    try:
        yield
    except (ReadableError, Stopped):
        raise
    except (Exception, SystemExit) as error:
        raise PartError(f"{part}: {describe(error)}") from error


@contextmanager
def naming_if(is_own: bool, part: str) -> Iterator[None]:
    """`naming` of a part that may be rlframe's; a ValueError that rlframe raised becomes a ConfigError of its text."""
    with naming(part) if is_own else nullcontext():
        try:
            yield
        except ValueError as error:
            if is_own and not _raised_here(error):
                raise
            raise ConfigError(str(error)) from error


def _raised_here(error: BaseException) -> bool:
    """Whether the line that raised an exception is rlframe's."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].startswith("rlframe.")


@contextmanager
def prefixed(text: str) -> Iterator[None]:
    """Put a text and a colon, if the text is not empty, before the message of a ConfigError in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}" if text else str(error)) from None


@contextmanager
def refused(source: str) -> Iterator[None]:
    """Raise ConfigError, `source: <the message>`, for a ValueError in the block: one about what `source` returned."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


class Interrupted(KeyboardInterrupt):
    """A run stopped by a signal. `exit_status` is the shell's: 128 + signal."""

    directory: Path | None = None  # of the run that was open

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{signal.Signals(signum).name}: {message}")
        self.exit_status = 128 + signum


def pluralize(n: int, noun: str) -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def decimals(x: float) -> str:
    """A return with one decimal, such as 500.0, or with three where it is nearer to 0 than 10: 0.953."""
    return f"{x:.1f}" if abs(x) >= 10 or x == round(x, 1) else f"{x:.3f}"


def aligned(lines: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Lines of cells as text, each column as wide as its longest cell, with its cells at the side < or >."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(format, line, map("{}{}".format, sides, widths))).rstrip() for line in lines]


def spans(numbers: Iterable[int], separator: str = ",") -> str:
    """Whole numbers in short form: 0-7,16-23."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return separator.join("-".join(map(str, span)) for span in found)


def shortened(text: str, n: int = 200) -> str:
    """The first `n` characters of a text that may be of any length."""
    return text if len(text) <= n else f"{text[:n]}... ({len(text):,} characters)"


def one_line(value: object, n: int = 200) -> str:
    """A text of any length, or what an error says, in a line of its first `n` characters."""
    return shortened(" ".join(str(value).split()), n)


def describe(error: BaseException) -> str:
    """An exception of foreign code in one short line."""
    return f"{type(error).__name__}: {shortened(str(error))}".replace("\n", " ")


def describe_import(module: str, error: Exception) -> str:
    """What importing a module raised, and in which line of which file, as one line."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    says_where = isinstance(error, SyntaxError)  # in its text
    where = "" if says_where or not lines else f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno})"
    text = shortened(str(error), 500).replace("\n", " ")
    return f"importing {module} raised {type(error).__name__}: {text}{where}"


def qualified_name(cls: type) -> str:
    """module:Class, as in a setting."""
    return f"{cls.__module__}:{cls.__qualname__}"


def printable(text: str) -> str:
    """Escape all characters that a terminal would interpret, except line ends. For text from untrusted files."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning unless this process has logged it before; one from a worker process counts as its parent's."""
    logging.getLogger("rlframe").warning(text, extra={ONCE: True})
