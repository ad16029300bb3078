"""Names of Python objects in settings: module:name or ./file.py:name, also with arguments, module:name(key=value)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from rlframe.core.config import nearest, split_values
from rlframe.core.errors import ConfigError, naming
from rlframe.core.imports import imported
from rlframe.core.objects import ObjectName
from rlframe.core.yaml import parse_value

_T = TypeVar("_T")

_CALL = re.compile(r"(.*?:[\w.]+)\((.+)\)", re.DOTALL)


def split_call(name: str) -> tuple[str, str]:
    """The name and the arguments of module:name(key=value,...); without arguments, all of it and nothing."""
    match = _CALL.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def find_attribute(name: str, key: str) -> Any:
    """What `package.module:name` or `./file.py:name` means, or the object of an ObjectName.

    Of `./file.py:name(key=value)` it is a partial of these arguments, whose values are YAML.

    Args:
        key: the setting that says so, for messages; empty if the caller puts it before them.
    Raises:
        ConfigError: it is not of this form, there is no such module or name, or it does not take these arguments.
    """
    if isinstance(name, ObjectName):
        return name.value
    called, arguments = split_call(name)
    module_name, _, attribute = called.rpartition(":")
    at = f"{key}={name}: " if key else ""
    form = "package.module:name or ./file.py:name"
    if not module_name:
        raise ConfigError(f"{f'{key}=' * bool(key)}{name} must be written {form}")
    try:
        module = imported(module_name)
    except ConfigError as error:
        raise ConfigError(f"{at}{error}") from error.__cause__
    except ModuleNotFoundError as error:
        raise ConfigError(f"{at}{error}; write {form}") from error
    found = vars(module)
    if attribute not in found and "__getattr__" in found:
        with suppress(AttributeError):
            found["__getattr__"](attribute)
    if attribute not in found:
        hint = "; its arguments lack the last bracket" if "(" in attribute else nearest(attribute, found)
        raise ConfigError(f"{at}{module_name} has no {attribute}{hint}")
    return _with_arguments(found[attribute], arguments, at) if arguments else found[attribute]


def find_maker(name: str, key: str, kind: type[_T], shown: str) -> Callable[..., _T]:
    """What makes a `kind`: a subclass, or a function that was given as an object or with arguments.

    It is not called, so that what a mistyped name means does nothing.

    Args:
        shown: the name of `kind` in messages.
    Raises:
        ConfigError: as `find_attribute`, or it is something else.
    """
    found = find_attribute(name, key)
    has_arguments = isinstance(found, partial)
    called = found.func if has_arguments else found
    if isinstance(called, type):
        makes = issubclass(called, kind)
    else:
        makes = callable(called) and (has_arguments or isinstance(name, ObjectName)) and not isinstance(called, kind)
    if not makes:
        raise ConfigError(f"{key}={name} is not a subclass of {shown}, or a function object that makes one")
    return found


def made_by(name: str, key: str, kind: type[_T], shown: str, *arguments: Any) -> _T:
    """What `find_maker` makes of these arguments.

    Raises:
        ConfigError: as `find_maker`, or a function made something else.    PartError: it raised an exception.
    """
    make = find_maker(name, key, kind, shown)
    with naming(f"{key}={name} cannot be made"):
        made = make(*arguments)
    if not isinstance(made, kind):
        raise ConfigError(f"{key}={name} made {made!r:.60}, which is no {shown}")
    return made


def find_class(name: str, key: str) -> Any:
    """The class that a part names, whose arguments are KEY.kwargs. Raises ConfigError as `find_attribute`."""
    called, arguments = split_call(name)
    if not name:
        raise ConfigError(f"{key}=own needs {key}.name=module:Class")
    if arguments:
        first = arguments.partition("=")[0].strip()
        raise ConfigError(f"{key}={name}: write {key}={called} and {key}.kwargs.{first}=VALUE")
    return find_attribute(name, key)


def _with_arguments(found: Any, text: str, at: str) -> Any:
    arguments: dict[str, Any] = {}
    for each in split_values(text):
        argument, equals, value = each.partition("=")
        if not (equals and argument.strip().isidentifier()):
            raise ConfigError(f"{at}{each!r} is no argument; write name(key=value,key=value)")
        try:
            arguments[argument.strip()] = parse_value(value)
        except ValueError as error:
            raise ConfigError(f"{at}{error}") from None
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a builtin
        return partial(found, **arguments)
    except TypeError:
        raise ConfigError(f"{at}{found!r:.60} takes no arguments") from None
    try:
        signature.bind_partial(**arguments)
    except TypeError as error:
        unknown = next((argument for argument in arguments if argument not in signature.parameters), "")
        raise ConfigError(f"{at}{error}{nearest(unknown, signature.parameters)}") from None
    return partial(found, **arguments)
