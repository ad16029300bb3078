"""Importing what a setting names: a dotted module, or a Python file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from rlframe.core.errors import ConfigError, ReadableError, describe_import


def imported(name: str) -> ModuleType:
    """The module of this dotted name, or of this file.

    Raises:
        ConfigError: importing it raised an exception.    ModuleNotFoundError: there is none.
    """
    module = _module_of(Path(name)) if name.endswith(".py") else name
    try:
        found = importlib.import_module(module)
        _note_loaded(found)
        return found
    except ReadableError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(describe_import(name, error)) from error


_loaded: dict[str, tuple[Any, str]] = {}  # by module: its spec, which a reload replaces, and the digest of its file


def _note_loaded(module: ModuleType) -> None:
    """Remember a module of the user's as it is on disk now, for `check_loaded`."""
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not file:  # one that has put an object in its place; a built-in
        return
    name, known = module.__name__, _loaded.get(module.__name__)
    if not name.startswith("rlframe.") and "site-packages" not in file and not (known and known[0] is module.__spec__):
        _loaded[name] = module.__spec__, _digest(file)


def _digest(file: str) -> str:
    with suppress(OSError):
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""


def check_loaded(names: Iterable[str]) -> None:
    """Raise ConfigError if a file or module, by the name of a setting, is not on disk as this process imported it.

    What runs would not be what a record has the digest of.
    """
    for name in names:
        module = sys.modules.get(Path(name).stem if name.endswith(".py") else name)
        spec, digest = _loaded.get(getattr(module, "__name__", ""), (None, ""))
        is_same = spec is not None and spec is getattr(module, "__spec__", None)
        if is_same and digest != _digest(str(getattr(module, "__file__", ""))):
            raise ConfigError(
                f"{name} has changed since this process imported it; restart, or importlib.reload the module"
            )


def _module_of(path: Path) -> str:
    """The name by which a file is imported, its stem, with its folder on sys.path, which worker processes inherit."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    if not path.stem.isidentifier():
        raise ConfigError(f"{path} cannot be imported: {path.stem!r} is not a Python name; rename the file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(path.stem)
    origin = spec.origin if spec is not None else None
    if origin is None or Path(origin).resolve() != path.resolve():
        raise ConfigError(f"{path} cannot be imported: the name {path.stem!r} means {origin}; rename the file")
    return path.stem
