"""Digests of the user's own code that a config names: what is neither rlframe, nor an installed package, nor Python.

A file or a module counts with all own ones that it imports, so that an edit of a helper is an edit. An object that was
given in Python counts with the code of its class or function, the values that this refers to, and what pickling would
take of it. Nothing is imported, and the place of a file does not matter.
"""

from __future__ import annotations

import ast
import copyreg
import dis
import hashlib
import inspect
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from rlframe.core.objects import ObjectName, defined_by

_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_ENTRY = re.compile(rf"({_MODULE.pattern}):[A-Za-z_][\w.]*")  # module:Name, as an entry point is written
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_DIGITS, _DEEPEST = 16, 80
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_RANDOM = (np.random.Generator, random.Random)  # drawn anew in each process
_SEED = "_np_random_seed"  # of a Gymnasium environment, too


def own_code(config: Mapping[str, Any]) -> dict[str, str]:
    """A digest for each name in a config that means own code: ./my_ppo.py, my_package.ppo, or that of an object."""
    found: dict[str, list[tuple[str, str]]] = {}
    for key, value in config.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, str):
                name, digest = _named(each)
                found.setdefault(name, []).extend([(key, digest)] if digest else [])
    return {name: _of_all(each) for name, each in found.items() if each}


def _of_all(found: list[tuple[str, str]]) -> str:
    """The digest of a name; of several objects with this name, in which keys they stand."""
    return found[0][1] if len({digest for _, digest in found}) == 1 else _hash(map(str, found))


def _named(text: str) -> tuple[str, str]:
    """A name and its digest: that of a file or module, or that of an object which neither defines."""
    name = source_name(text)
    if isinstance(text, ObjectName) and (text.endswith("()") or not source_digest(name)):
        is_plain = inspect.isclass(text.value) or inspect.isroutine(text.value)
        installed = is_plain and not text.endswith("()") and _is_installed(defined_by(text.value).__module__)
        return text[:], "" if installed else object_digest(text.value)
    module = sys.modules.get(Path(name).stem) if name.endswith(".py") else None
    found = vars(module) if module and "__getattr__" in vars(module) else {}  # a study's objects, made when asked for
    value = found.get(text.rpartition(":")[2])
    return (name, source_digest(name)) if value is None else (text, object_digest(value))


def source_name(text: str) -> str:
    """The file or module that a setting such as ./file.py:Name or module:Name names; empty if it names none."""
    head, _, rest = text.partition(":")
    return head if head.endswith(".py") or (rest and _MODULE.fullmatch(head) and rest[0].isidentifier()) else ""


def source_digest(name: str) -> str:
    """Of a file ./name.py, or of a dotted module, and all own ones that it imports.

    Empty if it is not own code, or cannot be read.
    """
    with suppress(OSError, RuntimeError, ValueError):  # ~nobody has no home; a name may have any character
        is_file = name.endswith(".py")
        path = Path(name).expanduser().absolute() if is_file else _own_file(name, "") if name else None
        if path is not None and path.is_file():
            found = _reached(path, path.stem if is_file else name, str(path.parent) if is_file else "")
            return _hash(sorted(hashlib.sha256(content).hexdigest() for content in found.values()))
    return ""


def _reached(path: Path, module: str, root: str) -> dict[Path, bytes]:
    """The contents of a file and of the own files that it imports, and that these import.

    `root`: the folder that is searched last, as a named file's is.
    """
    found: dict[Path, bytes] = {}
    waiting = [(path, module)]
    while waiting:
        path, module = waiting.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        with suppress(SyntaxError, RecursionError):
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            names = {part for name in _imports(ast.parse(found[path]), package) for part in _with_parents(name)}
            files = ((name, _own_file(name, root)) for name in sorted(names))
            waiting += [(file, name) for name, file in files if file is not None]
    return found


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """The names of modules that a module imports, also within functions and as entry points; some mean no module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" if alias.name != "*" else module for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (entry := _ENTRY.fullmatch(node.value)):
            yield entry[1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            yield from [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _spec(name: str, below: Sequence[str] | None) -> ModuleSpec | None:
    """Where a module is, of the folders `below` of the package above, which nothing may have imported."""
    try:
        return next(filter(None, (finder.find_spec(name, below) for finder in sys.meta_path)), None)
    except KeyError:  # raised for a folder without __init__.py
        folders = (Path(each, name.rpartition(".")[2]) for each in below or ())
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
        return spec


def _own_file(name: str, root: str) -> Path | None:
    """The Python file of a module, which is also searched in `root`; None if it is not own code."""
    if _is_known(name):
        return None
    spec: ModuleSpec | None = None
    for part in _with_parents(name):
        below = spec.submodule_search_locations if spec else None
        if spec and below is None:
            return None
        found = _spec(part, below)
        here = PathFinder.find_spec(part, [root]) if root and spec is None and found is None else None
        spec = found or here
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
    loaded = sys.modules.get(module)
    has_file = loaded is not None and (getattr(loaded, "__file__", None) or module in sys.builtin_module_names)
    return _is_known(module) or bool(has_file and _own_file(module, "") is None)


def object_digest(value: Any) -> str:
    """Of a class, a function, a partial or an instance; equal in each process of one version of Python."""
    found = _Description()
    found.add(value)
    return _hash(found.texts)


class _Description:
    """What an object is, as texts: those of two objects are equal if their code and what pickling takes are.

    Not looked at are the states of random generators, objects in sets, what lies deeper than `_DEEPEST`, and what
    cannot be pickled, such as a lock.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, so that no other gets its id
        self._sources: dict[str, str] = {}
        self._depth = 0

    def add(self, value: Any) -> None:
        cls = type(value)
        if cls in _PLAIN:
            long = isinstance(value, str | bytes) and len(value) > 1000
            self.texts.append(f"{cls.__name__} {_sha(value) if long else repr(value)}")
            if cls is str and (entry := _ENTRY.fullmatch(value)):
                self._add_source(entry[1])
        elif id(value) in self._seen:
            self.texts.append(f"again {self._seen[id(value)][0]}")
        elif self._depth < _DEEPEST:
            self._seen[id(value)] = len(self._seen), value
            self.texts.append(f"{cls.__module__}:{cls.__qualname__}")
            self._depth += 1
            try:
                self._add_parts(value)
            except Exception:  # what is the user's may raise anything, and a record stops no training
                self.texts.append("unknown")
            finally:
                self._depth -= 1

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self._add_source(value.__name__)
        elif isinstance(value, CodeType):
            self._add_code(value)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, partial):
            self._add_all([value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self._add_all([value.__func__, value.__self__])
        elif isinstance(value, property):
            self._add_all([value.fget, value.fset])
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif hasattr(value, "__wrapped__"):
            self.add(value.__wrapped__)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.texts += [str(value.dtype), str(value.shape), _sha(np.ascontiguousarray(value))]
        elif (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):  # its pickle has an address
            content = value.detach().cpu().flatten().view(torch.uint8).numpy()
            self.texts += [str(value.dtype), str(tuple(value.shape)), _sha(np.ascontiguousarray(content))]
        elif type(value) is dict:
            self._add_all(part for item in value.items() for part in item)
        elif isinstance(value, set | frozenset):
            self.texts += sorted(repr(x) if type(x) in _PLAIN else str(type(x)) for x in value)
        elif type(value) in (list, tuple):
            self._add_all(value)
        elif inspect.isbuiltin(value):
            self._add_all([value.__qualname__, None if isinstance(value.__self__, ModuleType) else value.__self__])
        elif not isinstance(value, _RANDOM):
            self._add_instance(value)

    def _add_all(self, values: Iterable[Any]) -> None:
        for each in values:
            self.add(each)
        self.texts.append("end")

    def _add_source(self, module: str) -> str:
        if module not in self._sources:
            self._sources[module] = source_digest(module)
        self.texts.append(self._sources[module])
        return self._sources[module]

    def _add_function(self, value: FunctionType) -> None:
        """By its module's source if that is all, else by its own code and the global values that this uses."""
        module = str(value.__globals__.get("__name__"))  # its __module__ may be that of what it wraps
        self.texts += [module, value.__qualname__]
        digest = self._add_source(module)
        is_wrapper = hasattr(value, "__wrapped__") or value.__code__.co_name != value.__name__
        is_all = not is_wrapper and "<" not in value.__qualname__
        if is_all and _is_installed(module):
            return
        self._add_all([*map(_contents, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__])
        self.add({name: x for name, x in vars(value).items() if name != "__wrapped__"})
        if is_all and digest:
            return
        self.add(value.__code__)
        for name in _names(value.__code__, _GLOBALS):
            if name in value.__globals__:
                self.add(name)
                self.add(found := value.__globals__[name])
                below = (
                    (f"{found.__name__}.{part}" for part in value.__code__.co_names) if inspect.ismodule(found) else ()
                )
                self._add_all(sys.modules[part] for part in below if part in sys.modules)
        for name in _names(value.__code__, ("IMPORT_NAME",)):
            self._add_source(name)

    def _add_class(self, value: type) -> None:
        self.texts += [value.__module__, value.__qualname__]
        digest = self._add_source(value.__module__)
        if "<" not in value.__qualname__ and (digest or _is_installed(value.__module__)):
            return
        self._add_all([*value.__bases__, type(value)])
        for name, part in sorted(vars(value).items()):
            if not name.startswith("__") or callable(part):
                self.texts.append(name)
                self.add(part)

    def _add_code(self, code: CodeType) -> None:
        counts = code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        self.texts += [code.co_code.hex(), code.co_exceptiontable.hex(), str(counts)]
        self.texts += [*code.co_names, *code.co_varnames, *code.co_freevars]
        self._add_all(code.co_consts)

    def _add_instance(self, value: Any) -> None:
        """As it says itself, else by what pickling takes: its class, arguments, attributes and items."""
        if hasattr(type(value), "__own_code__"):
            self.add(value.__own_code__())
            return
        self.add(type(value))
        reduce = copyreg.dispatch_table.get(type(value))
        found: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(found, tuple):
            made, arguments, state, *items = (*found, None, None, None)[:5]
            state = {name: x for name, x in state.items() if name != _SEED} if type(state) is dict else state
            self._add_all([made, arguments, state, *(list(each) for each in items if each is not None)])


def _contents(cell: CellType) -> Any:
    """Of a variable that a function has from around it; None while it has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: CodeType, operations: tuple[str, ...]) -> list[str]:
    """The names that operations of a function have, also of functions within it, in order."""
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in operations}
    within = (name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part, operations))
    return sorted(names.union(within))


def _sha(data: Any) -> str:
    return hashlib.sha256(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data).hexdigest()


def _hash(texts: Iterable[str]) -> str:
    return _sha("\0".join(texts))[:_DIGITS]
