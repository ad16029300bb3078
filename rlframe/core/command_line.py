"""Parsing of key=value arguments, and the exit status and error output shared by all commands."""

import errno
import io
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, Interrupted, ReadableError, printable, shortened

_MAX_WORD = 1 << 16  # characters
_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA out of memory")  # in torch's errors
_OF_PATHS = (errno.ENAMETOOLONG, errno.EACCES)  # errors that say enough without a traceback
_MAX_SHOWN = 20_000  # characters of an error
HELP = frozenset({"-h", "--help", "help"})
EXIT_S = 5.0  # for threads of users' code to end after the command


class KeyValues:
    """The key=value arguments of a command line. Each getter removes its key; what remains is unknown."""

    def __init__(self, argv: Iterable[str]) -> None:
        """Raise ConfigError for an argument of another form or a repeated key."""
        self.remaining: dict[str, str] = {}
        self._asked: dict[str, None] = {}  # the keys that getters have asked for
        for word in argv:
            if len(word) > _MAX_WORD:
                raise ConfigError(
                    f"{word[:60]!r}... has {len(word):,} characters, more than the limit of {_MAX_WORD:,}"
                )
            key, equals, value = word.partition("=")
            if not equals or not key:
                hint = f"; write {word.lstrip('-').replace('-', '_')}=VALUE" if word.startswith("--") else ""
                raise ConfigError(f"{word!r} is not of the form key=value{hint}; --help lists the keys")
            if key in self.remaining:
                raise ConfigError(f"{key} is set twice: {self.remaining[key]!r} and {value!r}")
            self.remaining[key] = value

    def text(self, key: str, default: str = "") -> str:
        self._asked[key] = None
        return self.remaining.pop(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """The value of a key that is true or false."""
        value = self.text(key, str(default)).lower()
        if value not in ("true", "false"):
            raise ConfigError(f"{key}={value!r} must be true or false")
        return value == "true"

    def count(self, key: str, default: int) -> int:
        """The value of a key that is a whole number >= 0; 1e3 and 1_000 are accepted."""
        value = self.text(key, str(default))
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{key}={value!r} must be a whole number") from None
        if not number.is_integer() or number < 0:
            raise ConfigError(f"{key}={value!r} must be a whole number, not negative")
        return int(value) if value.isdecimal() else int(number)  # exact, where a float is not

    def number(self, key: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
        """The value of a key that is a number from `low` to `high`; the default may be any."""
        given, text = key in self.remaining, self.text(key, str(default))
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if given and not low <= number <= high:
            within = f" from {low:g} to {high:g}" if high < math.inf else ""
            raise ConfigError(f"{key}={text:.60} must be a number{within}")
        return number

    def check_unknown(self, *others: str) -> None:
        """Raise ConfigError for a key that no getter has asked for; `others` are forms of keys besides."""
        known = list(dict.fromkeys((*self._asked, *others)))
        for key in self.remaining:
            raise ConfigError(f"unknown key {key!r}; the keys are {', '.join(known)}{nearest(key, known)}")


def paths_and_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths among the words of a command, and its settings; one with = is a path if it exists or a / comes first.

    A study's run_* are run_0 run_0.log ...: a log beside the run that it is of is left out.
    """
    paths = [word for word in argv if "=" not in word or "/" in word.partition("=")[0] or os.path.exists(word)]
    logs = {f"{path}.log" for path in paths}
    return [path for path in paths if path not in logs], [word for word in argv if word not in paths]


def run_verb(verbs: Mapping[str, Callable[[list[str], KeyValues], None]], argv: Sequence[str]) -> int:
    """Call what the first word names with the paths and the settings that follow it; returns the exit status."""
    verb, *others = argv
    if verb not in verbs:
        raise ConfigError(f"{verb!r:.60} is not one of {', '.join(verbs)}{nearest(verb, verbs)}")
    paths, settings = paths_and_settings(others)
    verbs[verb](paths, KeyValues(settings))
    return 0


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """For imports, which take seconds: inside the block Ctrl-C ends this process at once, without a traceback.

    Does nothing where Ctrl-C does not raise KeyboardInterrupt, or outside the main thread.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _is_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def exit_with(status: int) -> NoReturn:
    """Exit with `status`. Threads that an environment or other code of the user's left running get EXIT_S to end."""
    if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more Ctrl-C shows no traceback of the interpreter's exit
    threads = [thread for thread in threading.enumerate() if not (thread.daemon or thread is threading.main_thread())]
    if threads:
        names = ", ".join(sorted(thread.name for thread in threads))
        threading.Thread(target=_end_process, args=(status, names), daemon=True).start()
    sys.exit(status)  # waits for the threads


def _end_process(status: int, threads: str) -> None:
    time.sleep(EXIT_S)
    print(f"warning: ended although threads still run after {EXIT_S:g} s: {printable(threads)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def with_home(value: Any) -> Any:
    """A value with the home directory for ~/ at its start or that of an entry of a list; shells leave it in words."""
    if isinstance(value, str):
        return re.sub(r"(?:(?<=[\[,])|^)~(?=/)", lambda _: os.path.expanduser("~"), value)
    if isinstance(value, list | tuple):
        return type(value)(map(with_home, value))
    return value.expanduser() if isinstance(value, Path) else value


@contextmanager
def _showing_any_name() -> Iterator[None]:
    """Inside the block, what the terminal's encoding lacks is printed with escapes."""
    streams = [x for x in (sys.stdout, sys.stderr) if isinstance(x, io.TextIOWrapper) and x.errors == "strict"]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream in streams:
            with suppress(OSError, ValueError):  # its reader has exited, or it is closed
                stream.reconfigure(errors="strict")


@_showing_any_name()
def run_command(body: Callable[[list[str]], int], argv: Sequence[str], usage: str = "") -> int:
    """Run `body(argv)` and return the exit status. Without words, or with one that asks for help, print the usage.

    A ReadableError is printed without a traceback unless its cause is user code or `traceback=true` is given.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL and _is_main_thread():  # set by a command for its imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    show_traceback, words = False, [word for word in argv if not word.startswith("traceback=")]
    try:
        show_traceback = KeyValues(word for word in argv if word not in words).flag("traceback")
        if usage and (not words or HELP & set(words)):
            print(usage, flush=True)
            return 0 if words else 2
        split = (word.partition("=") for word in words)
        status = body([f"{key}{equals}{with_home(value)}" for key, equals, value in split])
        sys.stdout.flush()  # here, where a reader that has exited is no error
        return status
    except ReadableError as error:
        if show_traceback:
            traceback.print_exc()
        elif error.shows_cause and error.__cause__:
            cause = "".join(traceback.format_exception(error.__cause__, chain=False))
            print(shortened(cause, _MAX_SHOWN), file=sys.stderr)
        print(printable(f"{error.prefix}: {shortened(str(error), _MAX_SHOWN)}"), file=sys.stderr)
        return error.exit_status
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _OF_MEMORY):
            raise
        if show_traceback:
            traceback.print_exc()
        print(printable(f"error: out of memory: {error}"), file=sys.stderr)
        return 1
    except Interrupted as stop:
        print(f"\n{stop}", file=sys.stderr)
        return stop.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has exited, for example `head`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # else the flush at exit fails
        return 128 + 13
    except OSError as error:
        if error.errno not in _OF_PATHS or not error.filename or show_traceback:
            raise
        print(
            printable(f"error: {shortened(str(error.filename))}: {error.strerror}; use another path"), file=sys.stderr
        )
        return 2
