"""Scripts as commands: key=value words, errors in one line, the exit statuses of rlframe's own commands."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import GenericAlias
from typing import Any, NoReturn

from rlframe.core.command_line import HELP, KeyValues, exit_with, run_command
from rlframe.core.config import cast
from rlframe.core.errors import ConfigError, Interrupted, aligned


def entrypoint(function: Callable[..., Any], argv: Sequence[str] | None = None) -> NoReturn:
    """Call a function with the key=value words of the command line, and exit; see `rlframe.entrypoint`."""
    exit_with(run_command(partial(_call, function), sys.argv[1:] if argv is None else argv))


def _call(function: Callable[..., Any], argv: Sequence[str]) -> int:
    """Returns the exit status: the number that the function returns, else 0."""
    signature = inspect.signature(function)
    kinds = _kinds(function, signature)
    if HELP & set(argv):
        print(_usage(function, signature, kinds))
        return 0
    words, bound = KeyValues(argv), signature.bind_partial()
    for name, kind in kinds.items():
        if name in words.remaining:
            bound.arguments[name] = cast(name, words.text(name), kind)
        elif signature.parameters[name].default is inspect.Parameter.empty:
            raise ConfigError(f"{name}= is missing; --help lists the keys")
    words.check_unknown(*kinds)
    bound.apply_defaults()
    try:
        status = function(*bound.args, **bound.kwargs)
    except Interrupted as stop:
        if stop.directory:
            print(f"run: {stop.directory}", flush=True)
        raise
    return status if type(status) is int else 0


def _kinds(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """The type of each parameter but *args and **kwargs: as annotated, else that of its default, else str."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    single = (
        each for each in signature.parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    )
    return {each.name: _kind(each, names) for each in single}


def _kind(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    hint, default = parameter.annotation, parameter.default
    if isinstance(hint, str):
        with suppress(NameError, AttributeError):  # it is imported for type checkers alone
            hint = eval(hint, names)
    if hint is not parameter.empty and not isinstance(hint, str):
        return hint
    if default is None or default is parameter.empty:
        return str
    return GenericAlias(tuple, (type(default[0]), ...)) if isinstance(default, tuple) and default else type(default)


def _usage(function: Callable[..., Any], signature: inspect.Signature, kinds: Mapping[str, Any]) -> str:
    rows = []
    for name, kind in kinds.items():
        default = signature.parameters[name].default
        shown = "" if default is inspect.Parameter.empty else repr(default)
        rows.append([f"  {name}=", getattr(kind, "__name__", str(kind)), shown])
    about = inspect.getdoc(inspect.getmodule(function)) or inspect.getdoc(function) or ""
    return "\n".join([about, "", *aligned(rows, "<<<")])
