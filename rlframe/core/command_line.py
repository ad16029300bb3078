"""What the commands share: key=value words, readable refusals, and exit statuses."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, Interrupted, ReadableError, printable


class Words:
    """The words of a command line, key=value, taken out one after another; what is left over is unknown."""

    def __init__(self, argv: Iterable[str]) -> None:
        """Raises:
        ConfigError: a word of another form, or a key given twice.
        """
        self.rest: dict[str, str] = {}
        for word in argv:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise ConfigError(f"{word!r} is not of the form key=value; --help lists the keys")
            if key in self.rest:
                raise ConfigError(f"{key} is given twice: {self.rest[key]!r} and {value!r}")
            self.rest[key] = value

    def text(self, key: str, default: str = "") -> str:
        """A word's value."""
        return self.rest.pop(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A word that is true or false."""
        value = self.text(key, str(default)).lower()
        if value not in ("true", "false"):
            raise ConfigError(f"{key}={value!r} must be true or false")
        return value == "true"

    def count(self, key: str, default: int) -> int:
        """A word that is a whole number, 1e3 or 1_000 included."""
        value = self.text(key, str(default))
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{key}={value!r} must be a whole number") from None
        if not number.is_integer() or number < 0:
            raise ConfigError(f"{key}={value!r} must be a whole number, not negative")
        return int(number)

    def refuse_rest(self, known: Iterable[str]) -> None:
        """Raises:
        ConfigError: a word nobody took.
        """
        for key in self.rest:
            raise ConfigError(f"unknown key {key!r}; the keys are {', '.join(known)}{nearest(key, known)}")


def run_command(body: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run `body` and turn what it raises into one readable message and an exit status.

    A ReadableError needs no traceback but that of foreign code behind it; `traceback=true` among the words shows it all
    the same. Any other exception is a bug, ours or the user's, and keeps its traceback.
    """
    show_traceback = "traceback=true" in argv
    try:
        return body([word for word in argv if not word.startswith("traceback=")])
    except ReadableError as error:
        if show_traceback:
            traceback.print_exc()
        elif error.shows_cause and error.__cause__:
            print("".join(traceback.format_exception(error.__cause__, chain=False)), file=sys.stderr)
        print(printable(f"{error.prefix}: {error}"), file=sys.stderr)
        return error.exit_status
    except MemoryError as error:
        if show_traceback:
            traceback.print_exc()
        print(printable(f"error: there is not enough memory: {error}"), file=sys.stderr)
        return 1
    except Interrupted as stop:
        print(f"\n{stop}", file=sys.stderr)
        return stop.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has gone, for example `head`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # else the interpreter's last flush fails
        return 128 + 13
