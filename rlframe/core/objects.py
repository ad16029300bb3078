"""ObjectName: the name of a Python object that was given in the place of `module:name`, and that brings the object.

Configs stay text: to messages and params.json it is its name. What resolves names takes the object from it, and
pickling takes it along, so that it needs no table of objects in this process or in others.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import cloudpickle

from rlframe.core.errors import ConfigError


class ObjectName(str):
    """The name of an object. Other processes get the object by cloudpickle, by value if they cannot import it."""

    __slots__ = ("key", "value")
    key: str  # the setting that it was given for
    value: Any

    def __new__(cls, name: str, value: Any, key: str) -> Self:
        made = super().__new__(cls, name)
        made.key, made.value = key, value
        return made

    def __str__(self) -> str:
        return self  # so that str() of a setting keeps its object

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., ObjectName], tuple[str, bytes, str]]:
        return _unpickled, (self[:], pickled(self.value, self.key, self), self.key)


def _unpickled(name: str, payload: bytes, key: str) -> ObjectName:
    return ObjectName(name, cloudpickle.loads(payload), key)


def name_of(value: Any) -> str:
    """`module:name` of an object, or of the class of an instance; it ends in () if importing it gives another one."""
    defined = defined_by(value)
    module = sys.modules.get(defined.__module__)
    found = vars(module).get(defined.__qualname__) if module else None
    return f"{defined.__module__}:{defined.__qualname__}{'' if found is value else '()'}"


def defined_by(value: Any) -> Any:
    """The class or function that an object is, or that it is made of."""
    inner = value.func if isinstance(value, partial) else value
    return inner if inspect.isclass(inner) or inspect.isroutine(inner) else type(inner)


def is_own(value: Any) -> bool:
    """Whether a class, or that of an object, is the user's."""
    return not (defined_by(value).__module__ or "").startswith("rlframe.")


def name_elsewhere(given: ObjectName, command: Sequence[str]) -> str:
    """The name by which a command, a program of its own, finds the object: in its file if it cannot import it.

    Empty if it has none: it was defined in a notebook, within a function, or made by a call.
    """
    if given.endswith("()"):
        return ""
    module, _, name = given.rpartition(":")
    if not module or can_import(module):
        return given[:]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if not Path(file).is_file():  # such as <stdin>
        return ""
    return given[:] if file in command else f"{Path(file).absolute()}:{name}"


def pickled(value: Any, key: str, name: str) -> bytes:
    """An object by cloudpickle.

    Raises:
        ConfigError: it cannot be pickled.
    """
    try:
        with _by_value(sys.modules.get(defined_by(value).__module__)):
            return cloudpickle.dumps(value)
    except Exception as error:  # pickling runs user code, which may raise anything
        raise ConfigError(
            f"{key}={name} cannot be copied by pickling, for other processes or environments: {type(error).__name__}: "
            f"{error}; give a class, or a function, that makes such objects itself"
        ) from error


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Pickle what a module defines by value, if other processes cannot import it."""
    known = {"__main__", *cloudpickle.list_registry_pickle_by_value()}  # by the user, or around this
    if module is None or module.__name__ in known or can_import(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def can_import(name: str) -> bool:
    """Whether another process would import, under this name, the module that this process has."""
    if name == "__main__":
        return False
    parent = name.rpartition(".")[0]
    if parent and not (can_import(parent) and "__path__" in vars(importlib.import_module(parent))):
        return False
    path = importlib.import_module(parent).__path__ if parent else None
    found = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
    loaded = sys.modules.get(name)
    return found is not None and (loaded is None or found.origin == _origin(loaded))


def _origin(module: ModuleType) -> str | None:
    return module.__spec__.origin if module.__spec__ else vars(module).get("__file__")


def others_beside(found: Any, fits: Callable[[type], bool] = lambda cls: True) -> str:
    """A hint at the classes that fit in a module, or in that of an object."""
    name = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", "")
    own = [cls for cls in vars(sys.modules.get(name, found)).values() if isinstance(cls, type)]
    names = [cls.__name__ for cls in own if cls.__module__ == name and fits(cls)]
    return f"; name a class by :NAME, here {', '.join(names)}" if names else ""
