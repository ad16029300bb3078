"""Save the attributes of Python objects as plain data that a snapshot can store, and load them into new objects.

Handles numbers, arrays, containers, random generators, and attributes that are objects with attributes alone; others
need a codec (see episode_state.py).
"""

from __future__ import annotations

import enum
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

_SCALARS = (type(None), bool, int, float, str)  # exact types: a subclass may hold more
_BIT_GENERATORS = {
    each.__name__: each
    for each in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_MAX_INLINE = 64  # arrays of up to this many elements are saved as text, which saves an entry in the file
_MAX_VALUES = 20_000  # of an environment, besides arrays; a snapshot has room for two million
# Attributes of Gymnasium's and ALE's objects that the constructor sets; they are not saved.
_CONSTRUCTION = (
    *("spec", "metadata", "_metadata", "_cached_spec", "_action_set"),
    *("_ezpickle_args", "_ezpickle_kwargs", "_saved_kwargs"),
)


class EnvStateError(Exception):
    """A value that cannot be saved as plain data, or cannot be loaded; the message says which."""


class Codec(NamedTuple):
    """Functions that save and load a simulator's object, whose state is not in Python attributes."""

    save: Callable[[Any], Any]  # (object): its state as scalars, lists, dicts with string keys, and arrays
    load: Callable[[Any, Any], None]  # (new object, saved state); raises EnvStateError if they do not fit


Codecs = Mapping[str, Codec]  # by `type_name`


def type_name(kind: type) -> str:
    """The module and name of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def save_attributes(holders: Sequence[Any], owners: Sequence[Any], codecs: Codecs) -> list[Any]:
    """The attributes of each holder, which may refer to the owners, as plain data; EnvStateError if one is not."""
    saver = _Saver(owners, codecs)
    try:
        found = [saver.attributes(holder, _CONSTRUCTION) for holder in holders]
    except RecursionError:
        raise EnvStateError("has objects within objects too deep to be saved") from None
    spans = sorted((array.ctypes.data, array.nbytes) for array in saver.arrays if array.nbytes)
    for (start, n_bytes), (following, _) in pairwise(spans):
        if following < start + n_bytes:
            raise EnvStateError("two of its arrays share memory, which is not supported")
    return found


def load_attributes(holders: Sequence[Any], owners: Sequence[Any], saved: Sequence[Any], codecs: Codecs) -> None:
    """Set saved attributes on newly made objects. Raises EnvStateError if they do not fit; some may be set already."""
    if len(saved) != len(holders):
        raise EnvStateError(f"there are {len(holders)} layers of wrappers, but {len(saved)} were saved")
    loader = _Loader(owners, codecs)
    for holder, attributes in zip(holders, saved, strict=True):
        loader.attributes(holder, attributes, _CONSTRUCTION)


def has_objects(attributes: Mapping[str, Any]) -> bool:
    """Whether saved attributes are of objects, which loading finds in a new one."""
    return any(isinstance(value, dict) and "object" in value for value in attributes.values())


class _Saver:
    def __init__(self, owners: Sequence[Any], codecs: Codecs) -> None:
        self.owners, self.codecs = owners, codecs
        self.indices: dict[int, int] = {}  # by id(): objects that are referred to twice are saved once
        self.seen: list[Any] = []  # keeps those objects alive, so that their ids stay unique
        self.arrays: list[np.ndarray] = []
        self.n_values = 0

    def attributes(self, holder: Any, skipped: Sequence[str] = ()) -> dict[str, Any]:
        if slots := _slots(type(holder)):
            raise EnvStateError(f"{type(holder).__name__} has __slots__ ({', '.join(slots)}), which are not saved")
        found = {}
        save = self.value if isinstance(holder, types.SimpleNamespace) else self.attribute  # of get_state(): no object
        for name, value in vars(holder).items():
            if name in skipped:
                continue
            try:
                found[name] = save(value)
            except EnvStateError as problem:
                raise EnvStateError(f"{type(holder).__name__}.{name} {problem}") from None
        return found

    def attribute(self, value: Any) -> Any:
        """An attribute's value; unlike values inside containers, it may be an object that loading updates in place."""
        codec = self.codecs.get(type_name(type(value)))
        if codec is not None:
            return {"simulator": codec.save(value)}
        if isinstance(value, spaces.Space):
            rngs = [space._np_random for space in _with_parts(value)]  # None if not made yet
            return {"space": [None if rng is None else _generator_state(rng) for rng in rngs]}
        if isinstance(value, enum.Enum):
            return {"enum": value.name}
        if (name := _constant_name(value, self.owners)) is not None:
            return {"constant": name, "cells": [self.value(cell.cell_contents) for cell in _cells(value)]}
        known = id(value) in self.indices or any(value is owner for owner in self.owners)
        if not known and _is_of_attributes(value):
            self.indices[id(value)] = len(self.seen)
            self.seen.append(value)
            return {"object": type_name(type(value)), "attributes": self.attributes(value)}
        return self.value(value)

    def value(self, value: Any) -> Any:
        self.n_values += 1
        if self.n_values > _MAX_VALUES:
            raise EnvStateError(f"is one of more than {_MAX_VALUES:,} values; make it an array")
        if type(value) in _SCALARS:
            return value
        for number, owner in enumerate(self.owners):
            if value is owner:
                return {"owner": number}
        if id(value) in self.indices:
            return {"shared": self.indices[id(value)]}
        if isinstance(value, np.generic):
            return _array_state(value)
        self.indices[id(value)] = len(self.seen)
        self.seen.append(value)
        return self.fresh_value(value)

    def fresh_value(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            self.arrays.append(value)
            return _array_state(value)
        if kind is list and (array := _packed(value)) is not None:
            return {"list": array}
        if kind in (set, frozenset) and list(kind(list(value))) != list(value):
            raise EnvStateError(f"is a {kind.__name__} in an order that follows from what was in it before; use a dict")
        if kind in (list, tuple, set, frozenset):
            return {kind.__name__: [self.value(item) for item in value]}
        if kind is deque:
            return {"deque": [self.value(item) for item in value], "maxlen": value.maxlen}
        if kind is dict:
            return {"dict": [[self.value(key), self.value(item)] for key, item in value.items()]}
        if kind in (bytes, bytearray):
            return {kind.__name__: np.frombuffer(bytes(value), np.uint8)}
        if kind is np.random.Generator:
            return {"generator": _generator_state(value)}
        if kind is np.random.RandomState:
            return {"random_state": value.get_state(legacy=False)}
        if kind is random.Random:
            return {"random": list(value.getstate()[1]), "gauss": value.getstate()[2]}
        raise EnvStateError(f"is a {type_name(kind)}, which is not plain data")


class _Loader:
    def __init__(self, owners: Sequence[Any], codecs: Codecs) -> None:
        self.owners, self.codecs = owners, codecs
        self.loaded: list[Any] = []  # in the order in which they were saved

    def attributes(self, holder: Any, saved: Mapping[str, Any], kept: Sequence[str] = ()) -> None:
        new = {name: self.attribute(holder, name, value) for name, value in saved.items()}
        own = vars(holder)
        for name in (own.keys() - new.keys()).difference(kept):
            del own[name]
        own.update(new)

    def attribute(self, holder: Any, name: str, saved: Any) -> Any:
        current = vars(holder).get(name)
        where = f"{type(holder).__name__}.{name}"
        match saved:
            case {"simulator": state}:
                codec = self.codecs.get(type_name(type(current)))
                if codec is None:
                    raise EnvStateError(f"{where} is a {type_name(type(current))}, not the simulator that was saved")
                codec.load(current, state)
                return current
            case {"space": state}:
                _load_space(current, state, where)
                return current
            case {"enum": str() as member}:
                if not isinstance(current, enum.Enum) or member not in type(current).__members__:
                    raise EnvStateError(f"{where} is {current!r}, which has no member {member}")
                return type(current)[member]
            case {"constant": str() as constant, "cells": contents}:
                if _constant_name(current, self.owners) != constant:
                    raise EnvStateError(f"{where} is {current!r}, not the {constant} that was saved")
                for cell, content in zip(_cells(current), contents, strict=True):
                    cell.cell_contents = self.value(content)
                return current
            case {"object": str() as kind, "attributes": dict() as attributes}:
                if type_name(type(current)) != kind:
                    raise EnvStateError(f"{where} is a {type_name(type(current))}, not the {kind} that was saved")
                new: Any = object.__new__(type(current))  # the one here may be that of others too
                vars(new).update(vars(current))
                self.loaded.append(new)
                self.attributes(new, attributes)
                return new
        return self.value(saved)

    def value(self, saved: Any) -> Any:
        match saved:
            case {"owner": int() as number}:
                return self.owners[number]
            case {"shared": int() as number}:
                return self.loaded[number]
            case {"scalar": _}:
                return _array(saved)
            case dict():
                return self.fresh_value(saved)
        return saved

    def fresh_value(self, saved: dict[str, Any]) -> Any:
        """A container takes its index before its items are loaded, as in saving, so that it may contain itself."""
        place = len(self.loaded)
        self.loaded.append(None)
        empty: Any
        match saved:
            case {"list": np.ndarray() as packed}:
                self.loaded[place] = packed.tolist()
            case {"list": items}:
                empty = self.loaded[place] = []
                empty.extend(map(self.value, items))
            case {"deque": items, "maxlen": maxlen}:
                empty = self.loaded[place] = deque(maxlen=maxlen)
                empty.extend(map(self.value, items))
            case {"dict": items}:
                empty = self.loaded[place] = {}
                empty.update((self.value(key), self.value(item)) for key, item in items)
            case {"tuple": items} | {"set": items} | {"frozenset": items}:
                kind = {"tuple": tuple, "set": set, "frozenset": frozenset}[next(iter(saved))]
                self.loaded[place] = kind(in_order := list(map(self.value, items)))
                if list(self.loaded[place]) != in_order:  # of texts, which each process hashes otherwise
                    raise EnvStateError(f"a {kind.__name__} has another order here; use a dict, or set PYTHONHASHSEED")
            case {"bytes": array} | {"bytearray": array}:
                self.loaded[place] = (bytes if "bytes" in saved else bytearray)(array.tobytes())
            case {"generator": state}:
                self.loaded[place] = _generator(state)
            case {"random_state": state}:
                self.loaded[place] = np.random.RandomState()
                self.loaded[place].set_state(state)
            case {"random": words, "gauss": gauss}:
                self.loaded[place] = random.Random()
                self.loaded[place].setstate((3, tuple(words), gauss))
            case {"array": _}:
                self.loaded[place] = _array(saved)
            case _:
                raise EnvStateError(f"was saved as {str(saved)[:60]}, which is not a known format")
        return self.loaded[place]


def _constant_name(value: Any, owners: Sequence[Any]) -> str | None:
    """The name of a function, type or module, or of an owner's method, which have no state; None for other values."""
    if isinstance(value, types.MethodType):
        return value.__qualname__ if any(value.__self__ is owner for owner in owners) else None
    if isinstance(value, types.FunctionType):
        has_state = any(type(cell.cell_contents) not in _SCALARS for cell in _cells(value))
        return None if has_state else f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
        return None  # a method, such as append of a list
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType | type | np.ufunc):
        return value.__name__
    if isinstance(value, EnvSpec):
        return value.id
    return str(value) if isinstance(value, np.dtype) else None


def _is_of_attributes(value: Any) -> bool:
    """Whether an object's attributes are all of its state, by what Python's own copying takes of it."""
    kind: Any = type(value)
    if not hasattr(value, "__dict__") or any(
        getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    ):
        return False
    try:
        _, arguments, _, *items = value.__reduce_ex__(2)
    except (TypeError, ValueError):  # it has more, of a class in C
        return False
    return arguments == (kind,) and not any(item is not None for item in items)


def _cells(value: Any) -> tuple[types.CellType, ...]:
    """What a function has of those around it, which others of them may change; of other values nothing."""
    return value.__closure__ or () if isinstance(value, types.FunctionType) else ()


def _slots(kind: type) -> list[str]:
    """The attributes of a class that are not in `vars`."""
    found = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for each in found for name in ([each] if isinstance(each, str) else each)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _packed(items: list[Any]) -> np.ndarray | None:
    """Many numbers of one type as an array; None of others."""
    kinds = set(map(type, items)) if len(items) > _MAX_INLINE else set[type]()
    if kinds not in ({int}, {float}, {bool}):
        return None
    try:
        return np.array(items, {int: np.int64, float: np.float64, bool: np.bool_}[kinds.pop()])
    except OverflowError:
        return None


def _array_state(value: np.ndarray | np.generic) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biufcSUmM" or (array.dtype.itemsize > 16 and array.dtype.kind in "fc"):
        raise EnvStateError(f"is an array of {array.dtype}, which is not plain data")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise EnvStateError("is an array that is not contiguous")
    order = "C" if array.flags.c_contiguous else "F"
    tag = "scalar" if isinstance(value, np.generic) else "array"
    flat = array.reshape(-1, order=order)  # type: ignore[call-overload]
    facts = {"dtype": array.dtype.str, "shape": list(array.shape), "order": order}
    if array.dtype.kind in "biuf" and array.size <= _MAX_INLINE:
        return {tag: flat.tolist(), **facts}
    return {tag: flat.view(np.uint8) if array.nbytes else np.zeros(0, np.uint8), "raw": True, **facts}


def _array(saved: Mapping[str, Any]) -> Any:
    """The array, or the NumPy scalar."""
    found = saved.get("array", saved.get("scalar"))
    dtype = np.dtype(saved["dtype"])
    if dtype.kind not in "biufcSUmM":
        raise EnvStateError(f"was saved as an array of {dtype}, which is not plain data")
    flat = np.array(found).view(dtype) if saved.get("raw") else np.array(found, dtype)
    array = flat.reshape(saved["shape"], order=saved["order"])
    return array[()] if "scalar" in saved else array


def _generator_state(rng: np.random.Generator) -> dict[str, Any]:
    bits = rng.bit_generator
    if type(bits).__name__ not in _BIT_GENERATORS:
        raise EnvStateError(f"is a generator of {type(bits).__name__}, which is not supported")
    found = bits.seed_seq
    sequence = None  # needed by numpy.random.Generator.spawn
    if isinstance(found, np.random.SeedSequence):
        entropy = list(found.entropy) if isinstance(found.entropy, Sequence) else found.entropy
        sequence = [entropy, list(found.spawn_key), found.pool_size, found.n_children_spawned]
    return {"state": bits.state, "sequence": sequence}


def _generator(saved: Mapping[str, Any]) -> np.random.Generator:
    state, sequence = saved["state"], saved["sequence"]
    kind = _BIT_GENERATORS.get(state["bit_generator"])
    if kind is None:
        raise EnvStateError(f"was saved as a generator of {state['bit_generator']}, which is not supported")
    if sequence is None:
        bits = kind()
    else:
        entropy, spawn_key, pool_size, n_spawned = sequence
        root = np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=n_spawned)
        bits = kind(root)
    bits.state = state
    return np.random.Generator(bits)


def _with_parts(space: spaces.Space) -> list[spaces.Space]:
    """A space and the spaces inside it; each may have a generator."""
    parts: Iterable[spaces.Space] = ()
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
    return [space, *(each for part in parts for each in _with_parts(part))]


def _load_space(space: Any, saved: Sequence[Any], where: str) -> None:
    if not isinstance(space, spaces.Space) or len(_with_parts(space)) != len(saved):
        raise EnvStateError(f"{where} is {space!r}, not the space that was saved")
    for each, state in zip(_with_parts(space), saved, strict=True):
        each._np_random = _generator(state) if state is not None else None  # type: ignore[assignment]
