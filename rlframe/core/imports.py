"""Importing what a setting names: a dotted module, or a Python file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rlframe.core.errors import ConfigError, ReadableError, describe_import


def imported(name: str) -> ModuleType:
    """The module of this dotted name, or of this file.

    Raises:
        ConfigError: importing it raised an exception.    ModuleNotFoundError: there is none.
    """
    module = _module_of(Path(name)) if name.endswith(".py") else name
    try:
        return importlib.import_module(module)
    except ReadableError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(describe_import(name, error)) from error


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
