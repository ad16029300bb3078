"""Digests of the user's own code that a config names: what is neither rlframe, nor an installed package, nor Python.

A file or a module counts with all own ones that it imports, so that an edit of a helper is an edit. An object that was
given in Python counts with the code of its class or function, the values that this refers to, and its plain attributes.
Nothing is imported, and the place of a file does not matter.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from rlframe.core.objects import ObjectName, defined_by

_SOURCE = re.compile(r"([^:=(),\s]+\.py)(?::.*)?|([A-Za-z_][\w.]*):[A-Za-z_].*", re.DOTALL)  # ./file.py:X, module:X
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_DIGITS = 16
_SEED = "_np_random_seed"  # of a Gymnasium environment, drawn anew in each process


def own_code(config: Mapping[str, Any]) -> dict[str, str]:
    """A digest for each name in a config that means own code: ./my_ppo.py, my_package.ppo, or an object's name."""
    found: dict[str, set[str]] = {}
    for value in config.values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, str):
                name, digest = _named(each)
                found.setdefault(name, set()).update([digest] if digest else [])
    return {name: _hash(digests) if len(digests) > 1 else min(digests) for name, digests in found.items() if digests}


def _named(text: str) -> tuple[str, str]:
    name = source_name(text)
    digest = source_digest(name) if name and not text.endswith("()") else ""
    if digest or not isinstance(text, ObjectName):
        return name, digest
    is_plain = not text.endswith("()") and _is_installed(defined_by(text.value).__module__)
    return text[:], "" if is_plain else object_digest(text.value)


def source_name(text: str) -> str:
    """The file or module that a setting such as ./file.py:Name or module:Name names; empty if it names none."""
    match = _SOURCE.fullmatch(text)
    return (match[1] or match[2]) if match else ""


def source_digest(name: str) -> str:
    """Of a file ./name.py, or of a dotted module, and all own ones that it imports.

    Empty if it is not own code, or cannot be read.
    """
    with suppress(OSError, RuntimeError, ValueError):  # ~nobody has no home; a name may have any character
        path = Path(name).expanduser().absolute() if name.endswith(".py") else _own_file(name, "")
        if path is not None and path.is_file():
            module = path.stem if name.endswith(".py") else name
            return _hash(hashlib.sha256(content).hexdigest() for content in _reached(path, module).values())
    return ""


def _reached(path: Path, module: str) -> dict[Path, bytes]:
    """The contents of a file and of the own files that it imports, and that these import."""
    found: dict[Path, bytes] = {}
    root, waiting = str(path.parent), [(path, module)]
    while waiting:
        path, module = waiting.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        with suppress(SyntaxError):
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            names = {part for name in _imports(ast.parse(found[path]), package) for part in _with_parents(name)}
            files = ((name, _own_file(name, root)) for name in sorted(names))
            waiting += [(file, name) for name, file in files if file is not None]
    return found


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """The names of modules that a module imports, also within functions; some are no modules but names in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" if alias.name != "*" else module for alias in node.names)


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _own_file(name: str, root: str) -> Path | None:
    """The Python file of a module, as an import from a file in `root` finds it; None if it is not own code."""
    if _is_known(name):
        return None
    spec: ModuleSpec | None = None
    for part in _with_parents(name):
        below = spec.submodule_search_locations if spec else None
        if spec and below is None:
            return None
        here = PathFinder.find_spec(part, [root]) if root and spec is None else None
        spec = here or next(filter(None, (finder.find_spec(part, below) for finder in sys.meta_path)), None)
        if spec is None:
            return None
    file = Path(spec.origin) if spec and spec.origin else Path()
    return file if file.suffix == ".py" and not {"site-packages", "dist-packages"} & {*file.parts} else None


def _is_known(module: str) -> bool:
    top = module.partition(".")[0]
    return top in ("", "rlframe", "__main__") or top in sys.stdlib_module_names


def _is_installed(module: str) -> bool:
    """Whether a module has no own code: its name says all."""
    if module == "__main__":
        return False
    return _is_known(module) or (module in sys.modules and _own_file(module, "") is None and _has_file(module))


def _has_file(module: str) -> bool:
    return getattr(sys.modules[module], "__file__", None) is not None or module in sys.builtin_module_names


def object_digest(value: Any) -> str:
    """Of a class, a function, a partial or an instance; equal in each process of one version of Python."""
    found = _Description()
    found.add(value)
    return _hash(found.texts, in_order=True)


class _Description:
    """What an object is, as texts: those of two objects are equal if their code and plain values are."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, so that no other gets its id

    def add(self, value: Any) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
            self.texts.append(f"{type(value).__name__} {value!r}")
            if isinstance(value, str) and (name := source_name(value)):
                self.texts.append(source_digest(name))
            return
        if id(value) in self._seen:
            self.texts.append(f"again {self._seen[id(value)][0]}")
            return
        self._seen[id(value)] = len(self._seen), value
        self.texts.append(_type_name(type(value)))
        self._add_parts(value)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, CodeType):
            self._add_code(value)
        elif isinstance(value, ModuleType):
            self.texts += [value.__name__, source_digest(value.__name__)]
        elif isinstance(value, type | FunctionType):
            self._add_definition(value)
        elif isinstance(value, partial):
            self._add_all([value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self._add_all([value.__func__, value.__self__])
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, property):
            self._add_all([value.fget, value.fset])
        elif isinstance(value, np.ndarray):
            self.texts += [str(value.dtype), str(value.shape)]
            self.add(value.tolist() if value.dtype.hasobject else value.tobytes())
        elif isinstance(value, Mapping):
            self._add_all(part for item in value.items() for part in item)
        elif isinstance(value, set | frozenset):
            self.texts += sorted(map(object_digest, value))
        elif isinstance(value, list | tuple):
            self._add_all(value)
        elif inspect.isroutine(value):
            self.texts.append(str(getattr(value, "__qualname__", "")))
        else:
            self._add_instance(value)

    def _add_all(self, values: Iterable[Any]) -> None:
        for each in values:
            self.add(each)
        self.texts.append("end")

    def _add_definition(self, value: Any) -> None:
        """A class or a function: by its module's source if that is known, else by its own code."""
        self.texts += [value.__module__, value.__qualname__]
        module = value.__module__ or ""
        digest = source_digest(module)
        self.texts.append(digest)
        if isinstance(value, FunctionType):
            self._add_all([*map(_contents, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__])
        if "<" not in value.__qualname__ and (digest or _is_installed(module)):  # else a lambda, or within a function
            return
        if isinstance(value, type):
            self._add_all(value.__bases__)
            for name, part in sorted(vars(value).items()):
                if not name.startswith("__") or inspect.isroutine(part):
                    self.texts.append(name)
                    self.add(part)
        else:
            self.add(value.__code__)
            used = {name: value.__globals__[name] for name in _globals_of(value.__code__) if name in value.__globals__}
            self.add(used)

    def _add_code(self, code: CodeType) -> None:
        self.texts += [code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars]
        self._add_all(code.co_consts)

    def _add_instance(self, value: Any) -> None:
        """Its class, and its attributes; of an installed class, such as a Tensor, the name alone unless a dataclass."""
        self.add(type(value))
        if dataclasses.is_dataclass(value):
            self.add({field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare})
        elif not _is_installed(type(value).__module__):
            self.add({name: each for name, each in getattr(value, "__dict__", {}).items() if name != _SEED})


def _contents(cell: CellType) -> Any:
    """Of a variable that a function has from around it; None while it has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _globals_of(code: CodeType) -> list[str]:
    """The global names that a function uses, also in functions within it, in order."""
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in _GLOBALS}
    within = (name for part in code.co_consts if isinstance(part, CodeType) for name in _globals_of(part))
    return sorted(names.union(within))


def _hash(texts: Iterable[str], in_order: bool = False) -> str:
    each = list(texts) if in_order else sorted(texts)
    return hashlib.sha256("\0".join(each).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
