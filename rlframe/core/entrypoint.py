"""Scripts as commands: key=value words, errors in one line, the exit statuses of rlframe's own commands."""

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from rlframe.core.command_line import HELP, KeyValues, exit_with, run_command
from rlframe.core.config import cast
from rlframe.core.errors import ConfigError, Interrupted, aligned


def entrypoint(function: Callable[..., Any], argv: Sequence[str] | None = None) -> NoReturn:
    """Call a function with the key=value words of the command line, and exit; see `rlframe.entrypoint`."""
    exit_with(run_command(partial(_call, function), sys.argv[1:] if argv is None else argv))


def _call(function: Callable[..., Any], argv: Sequence[str]) -> int:
    """Returns the exit status: the number that the function returns, else 0."""
    parameters, kinds = inspect.signature(function).parameters, typing.get_type_hints(function)
    if HELP & set(argv):
        print(_usage(function, parameters, kinds))
        return 0
    words, arguments = KeyValues(argv), {}
    for name, parameter in parameters.items():
        if name in words.remaining:
            arguments[name] = cast(name, words.text(name), kinds.get(name, str))
        elif parameter.default is parameter.empty:
            raise ConfigError(f"{name}= is missing; --help lists the keys")
    words.check_unknown(*parameters)
    try:
        status = function(**arguments)
    except Interrupted as stop:
        if stop.directory:
            print(f"run: {stop.directory}", flush=True)
        raise
    return status if isinstance(status, int) else 0


def _usage(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], kinds: Mapping[str, Any]) -> str:
    rows = []
    for name, parameter in parameters.items():
        kind = kinds.get(name, str)
        default = "" if parameter.default is parameter.empty else repr(parameter.default)
        rows.append([f"  {name}=", getattr(kind, "__name__", str(kind)), default])
    about = inspect.getdoc(inspect.getmodule(function)) or inspect.getdoc(function) or ""
    return "\n".join([about, "", *aligned(rows, "<<<")])
