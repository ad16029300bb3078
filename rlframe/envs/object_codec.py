"""Plain data of Python objects - numbers, arrays, containers, generators - as what a snapshot can hold, and back.

Nothing is pickled: an attribute that is not plain data makes its object `Opaque`, and somebody else must know it.
"""

from __future__ import annotations

import enum
import random
import types
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

_SCALARS = (type(None), bool, int, float, str)  # exactly these: a subclass may hold more
_BIT_GENERATORS = {
    each.__name__: each
    for each in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_IN_TEXT = 64  # elements up to which an array is saved as numbers in text, which spares an entry in the file
# Attributes of Gymnasium's and ALE's objects that say how they were made.
_CONSTANT = frozenset(
    {
        *("spec", "metadata", "_metadata", "_cached_spec"),
        *("_ezpickle_args", "_ezpickle_kwargs", "_saved_kwargs", "_action_set"),
    }
)


class Opaque(Exception):
    """Something whose state cannot be read as plain data, or cannot be put back; says what."""


class Foreign(Protocol):
    """A simulator's object, whose state is beyond Python: how it is read, and put into a fresh one."""

    def take(self, value: Any) -> Any:
        """Its state as scalars, lists, string-keyed dicts and arrays."""

    def put(self, value: Any, saved: Any) -> None:
        """Set a fresh one to it.

        Raises:
            Opaque: it does not fit.
        """


Known = Mapping[str, Foreign]  # by the full name of the type


def full_name(kind: type) -> str:
    """Module and name of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def take(holders: Sequence[Any], owners: Sequence[Any], known: Known) -> list[Any]:
    """The attributes of some objects, which may refer to their owners (mostly themselves) and to shared data.

    Raises:
        Opaque: one of them is not plain data; names it.
    """
    return _Taking(owners, known).all(holders)


def put(holders: Sequence[Any], owners: Sequence[Any], saved: Sequence[Any], known: Known) -> None:
    """Give fresh objects the attributes that `take` found. Some may be changed when it raises.

    Raises:
        Opaque: they do not fit these objects.
    """
    _Putting(owners, known).all(holders, saved)


class _Taking:
    def __init__(self, owners: Sequence[Any], known: Known) -> None:
        self.owners, self.known = owners, known
        self.numbers: dict[int, int] = {}  # of what was seen, by identity: what is shared stays shared
        self.seen: list[Any] = []  # keeps those identities taken
        self.arrays: list[np.ndarray] = []

    def all(self, holders: Sequence[Any]) -> list[Any]:
        found = [self.attributes(holder) for holder in holders]
        places = sorted((array.ctypes.data, array.nbytes) for array in self.arrays if array.nbytes)
        for (start, n_bytes), (following, _) in pairwise(places):
            if following < start + n_bytes:
                raise Opaque("two of its arrays share memory")
        return found

    def attributes(self, holder: Any) -> dict[str, Any]:
        found = {}
        for name, value in vars(holder).items():
            if name in _CONSTANT:
                continue
            try:
                found[name] = self.attribute(value)
            except Opaque as problem:
                raise Opaque(f"{type(holder).__name__}.{name} {problem}") from None
        return found

    def attribute(self, value: Any) -> Any:
        """What may stand as an attribute only, where a fresh object has its counterpart."""
        foreign = self.known.get(full_name(type(value)))
        if foreign is not None:
            return {"foreign": foreign.take(value)}
        if isinstance(value, spaces.Space):
            return {"space": _space_state(value)}
        if isinstance(value, enum.Enum):
            return {"enum": value.name}
        if (name := _constant_name(value, self.owners)) is not None:
            return {"constant": name}
        return self.value(value)

    def value(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        for number, owner in enumerate(self.owners):
            if value is owner:
                return {"owner": number}
        if id(value) in self.numbers:
            return {"again": self.numbers[id(value)]}
        if isinstance(value, np.generic):
            return _array_state(value)
        self.numbers[id(value)] = len(self.seen)
        self.seen.append(value)
        return self.fresh_value(value)

    def fresh_value(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            self.arrays.append(value)
            return _array_state(value)
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
        raise Opaque(f"is a {full_name(kind)}, which is not plain data")


class _Putting:
    def __init__(self, owners: Sequence[Any], known: Known) -> None:
        self.owners, self.known = owners, known
        self.made: list[Any] = []  # in the order in which they were taken

    def all(self, holders: Sequence[Any], saved: Sequence[Any]) -> None:
        if len(saved) != len(holders):
            raise Opaque(f"there are {len(holders)} layers of wrappers, and {len(saved)} were saved")
        for holder, attributes in zip(holders, saved, strict=True):
            new = {name: self.attribute(holder, name, value) for name, value in attributes.items()}
            own = vars(holder)
            for name in own.keys() - new.keys() - _CONSTANT:
                del own[name]
            own.update(new)

    def attribute(self, holder: Any, name: str, saved: Any) -> Any:
        fresh = vars(holder).get(name)
        where = f"{type(holder).__name__}.{name}"
        match saved:
            case {"foreign": state}:
                foreign = self.known.get(full_name(type(fresh)))
                if foreign is None:
                    raise Opaque(f"{where} is a {full_name(type(fresh))}, not the simulator that was saved")
                foreign.put(fresh, state)
                return fresh
            case {"space": state}:
                _load_space(fresh, state, where)
                return fresh
            case {"enum": str() as member}:
                if not isinstance(fresh, enum.Enum) or member not in type(fresh).__members__:
                    raise Opaque(f"{where} is {fresh!r}, which does not say what {member} is")
                return type(fresh)[member]
            case {"constant": str() as known}:
                if _constant_name(fresh, self.owners) != known:
                    raise Opaque(f"{where} is {fresh!r}, not the {known} that was saved")
                return fresh
        return self.value(saved)

    def value(self, saved: Any) -> Any:
        match saved:
            case {"owner": int() as number}:
                return self.owners[number]
            case {"again": int() as number}:
                return self.made[number]
            case {"scalar": _}:
                return _array(saved)
            case dict():
                return self.fresh_value(saved)
        return saved

    def fresh_value(self, saved: dict[str, Any]) -> Any:
        """Numbered before what is in it, as it was when it was taken; so lists may hold themselves."""
        place = len(self.made)
        self.made.append(None)
        empty: Any
        match saved:
            case {"list": items}:
                empty = self.made[place] = []
                empty.extend(map(self.value, items))
            case {"deque": items, "maxlen": maxlen}:
                empty = self.made[place] = deque(maxlen=maxlen)
                empty.extend(map(self.value, items))
            case {"dict": items}:
                empty = self.made[place] = {}
                empty.update((self.value(key), self.value(item)) for key, item in items)
            case {"tuple": items}:
                self.made[place] = tuple(map(self.value, items))
            case {"set": items}:
                self.made[place] = set(map(self.value, items))
            case {"frozenset": items}:
                self.made[place] = frozenset(map(self.value, items))
            case {"bytes": array}:
                self.made[place] = array.tobytes()
            case {"bytearray": array}:
                self.made[place] = bytearray(array.tobytes())
            case {"generator": state}:
                self.made[place] = _generator(state)
            case {"random_state": state}:
                self.made[place] = np.random.RandomState()
                self.made[place].set_state(state)
            case {"random": words, "gauss": gauss}:
                self.made[place] = random.Random()
                self.made[place].setstate((3, tuple(words), gauss))
            case {"array": _}:
                self.made[place] = _array(saved)
            case _:
                raise Opaque(f"was saved as {str(saved)[:60]}, which means nothing here")
        return self.made[place]


def _constant_name(value: Any, owners: Sequence[Any]) -> str | None:
    """What functions, types and modules are called, which have no state; methods of the owners too."""
    if isinstance(value, types.MethodType):
        return value.__qualname__ if any(value.__self__ is owner for owner in owners) else None
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return f"{value.__module__}.{value.__qualname__}" if all(type(x) in _SCALARS for x in cells) else None
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType | type | np.ufunc):
        return value.__name__
    if isinstance(value, EnvSpec):
        return value.id
    return str(value) if isinstance(value, np.dtype) else None


def _array_state(value: np.ndarray | np.generic) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biufcSUmM" or (array.dtype.itemsize > 16 and array.dtype.kind in "fc"):
        raise Opaque(f"is an array of {array.dtype}, which is not plain data")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise Opaque("is an array with gaps, a part of another")
    order = "C" if array.flags.c_contiguous else "F"
    tag = "scalar" if isinstance(value, np.generic) else "array"
    flat = array.reshape(-1, order=order)  # type: ignore[call-overload]  # which takes an order
    facts = {"dtype": array.dtype.str, "shape": list(array.shape), "order": order}
    if array.dtype.kind in "biuf" and array.size <= _IN_TEXT:
        return {tag: flat.tolist(), **facts}
    return {tag: flat.view(np.uint8) if array.nbytes else np.zeros(0, np.uint8), "raw": True, **facts}


def _array(saved: Mapping[str, Any]) -> Any:
    """An array, or a scalar."""
    found = saved.get("array", saved.get("scalar"))
    dtype = np.dtype(saved["dtype"])
    if dtype.kind not in "biufcSUmM":
        raise Opaque(f"was saved as an array of {dtype}, which is not plain data")
    flat = np.array(found).view(dtype) if saved.get("raw") else np.array(found, dtype)
    array = flat.reshape(saved["shape"], order=saved["order"])
    return array[()] if "scalar" in saved else array


def _generator_state(rng: np.random.Generator) -> dict[str, Any]:
    bits = rng.bit_generator
    if type(bits).__name__ not in _BIT_GENERATORS:
        raise Opaque(f"is a generator of {type(bits).__name__}, which is unknown here")
    found = bits.seed_seq
    sequence = None  # as numpy.random.Generator.spawn counts on
    if isinstance(found, np.random.SeedSequence):
        entropy = list(found.entropy) if isinstance(found.entropy, Sequence) else found.entropy
        sequence = [entropy, list(found.spawn_key), found.pool_size, found.n_children_spawned]
    return {"state": bits.state, "sequence": sequence}


def _generator(saved: Mapping[str, Any]) -> np.random.Generator:
    state, sequence = saved["state"], saved["sequence"]
    kind = _BIT_GENERATORS.get(state["bit_generator"])
    if kind is None:
        raise Opaque(f"was saved as a generator of {state['bit_generator']}, which is unknown here")
    if sequence is None:
        bits = kind()
    else:
        entropy, spawn_key, pool_size, n_spawned = sequence
        spread = np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=n_spawned)
        bits = kind(spread)
    bits.state = state
    return np.random.Generator(bits)


def _space_state(space: spaces.Space) -> list[Any]:
    """The generators of a space and of its parts, from which it is sampled; None where it has not been."""
    rng = space._np_random
    return [None if rng is None else _generator_state(rng), *[_space_state(part) for part in _parts(space)]]


def _parts(space: spaces.Space) -> list[spaces.Space]:
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return list(space.spaces) if isinstance(space, spaces.Tuple) else []


def _load_space(space: Any, saved: Sequence[Any], where: str) -> None:
    if not isinstance(space, spaces.Space) or len(_parts(space)) != len(saved) - 1:
        raise Opaque(f"{where} is {space!r}, not the space that was saved")
    space._np_random = _generator(saved[0]) if saved[0] is not None else None  # type: ignore[assignment]  # as fresh
    for part, state in zip(_parts(space), saved[1:], strict=True):
        _load_space(part, state, where)
