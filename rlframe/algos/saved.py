"""State that an algorithm names in `saved`: read for a snapshot, set again in a resumed run, and what it leaves out."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, qualified_name
from rlframe.core.objects import is_own
from rlframe.core.struct import Struct, leaves
from rlframe.updates.optimizer_step import OptimizerStep

_GENERATORS = np.random.Generator | torch.Generator
_LOOKED_AT, _DEEPEST = 1_000, 10  # numbers, texts and lists of a value in which changes are noticed; lists in lists
_CLASS = "(class)"  # the key of a Struct's class in its state, beside its fields

_logger = logging.getLogger("rlframe")


def check_saved(cls: type) -> None:
    """Raise TypeError unless the `saved` of a class is a tuple or list, with all names of the classes above."""
    own = vars(cls).get("saved", ())
    if not isinstance(own, tuple | list):
        raise TypeError(f"{cls.__name__}.saved={own!r} must be a tuple of names")
    names = getattr(cls, "saved", ())
    for above in cls.__mro__[1:]:
        if lost := [name for name in vars(above).get("saved", ()) if name not in names]:
            raise TypeError(
                f"{cls.__name__}.saved leaves out {', '.join(lost)} of {above.__name__}; "
                f"write saved = (*{above.__name__}.saved, ...)"
            )


def check_attributes(owner: Any) -> None:
    """Raise ConfigError if an attribute hides a method of the same name, or what `saved` names cannot be saved.

    A function may stand in a method's place, but not an update that rlframe made of another method, such as `learn`.
    """
    for name, x in vars(owner).items():
        method = getattr(type(owner), name, None)
        if inspect.isfunction(method) and _hides(x, method):
            raise ConfigError(
                f"{type(owner).__name__}.{name} is both a method, of {method.__qualname__.rpartition('.')[0]}, and an "
                f"attribute, a {type(x).__name__}, which hides it; give yours another name"
            )
    for name in getattr(owner, "saved", ()):
        _check_part(_part(owner, name), f"{type(owner).__name__}.{name}, which `saved` names,")


def _hides(x: Any, method: Any) -> bool:
    if not callable(x) or isinstance(x, nn.Module):
        return True
    return not is_own(type(x)) and getattr(inspect.unwrap(x), "__func__", method) is not method


def _check_part(part: Any, named: str) -> None:
    if not hasattr(part, "state_dict"):
        if not isinstance(part, _GENERATORS):
            _check_plain(part, named)
    elif not hasattr(part, "load_state_dict"):
        raise ConfigError(f"{named} is a {type(part).__name__} with a state_dict, but no load_state_dict; add one")


def _check_plain(part: Any, name: str, verb: str = "is") -> None:
    inside = [getattr(part, x.name) for x in fields(part)] if isinstance(part, Struct) else part
    inside = list(inside.values()) if type(inside) is dict else inside
    if type(inside) in (list, tuple):
        for x in inside:
            _check_plain(x, name, "holds")
    elif isinstance(part, np.ndarray | np.generic):
        if part.dtype.kind not in "biufc":
            raise ConfigError(f"{name} {verb} an array of {part.dtype}; use numbers or bools")
    elif not (isinstance(part, Tensor | None) or type(part) in (bool, int, float, str)):  # no Enum: it would be an int
        raise ConfigError(
            f"{name} {verb} a {type(part).__name__}; it may be a tensor, an array, a number, a Struct, a list or dict "
            f"of these, or itself a generator or have a state_dict"
        )


def states_of(owner: Any, names: Sequence[str]) -> dict[str, Any]:
    """The states of attributes: arrays and plain values.

    Raises:
        ConfigError: one is not there, or has no state.
    """
    return {name: _state_of(_part(owner, name), f"{type(owner).__name__}.{name}") for name in names}


def load_states(owner: Any, names: Sequence[str], states: Mapping[str, Any], device: torch.device) -> list[str]:
    """Set attributes to their saved states; tensors that are made for it are on `device`.

    Returns the names of those that a user's algorithm did not save yet, which stay as they are.

    Raises:
        ConfigError: one is not there.
        ValueError: a tensor or array had another shape or dtype, or the class of a Struct is not there.
    """
    missing = []
    for name in names:
        if name not in states and is_own(owner):
            missing.append(f"{type(owner).__name__}.{name}")
            continue
        part, state = _part(owner, name), states[name]
        if not _load(part, state, f"{type(owner).__name__}.{name}"):
            setattr(owner, name, _unpacked(state, device, f"{type(owner).__name__}.{name}"))
    return missing


def _part(owner: Any, name: str) -> Any:
    if name not in vars(owner):
        own = type(owner).__name__
        lacks = f"{own} does not have{nearest(name, vars(owner))}"
        if hasattr(type(owner), name):
            lacks = f"its class has, and not it itself; set self.{name} in __init__"
        raise ConfigError(f"{own}.saved names {name!r}, which {lacks}")
    return vars(owner)[name]


def _state_of(part: Any, name: str) -> Any:
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, torch.Generator):
        return part.get_state()
    _check_plain(part, f"{name}, which `saved` names,")
    return _packed(part)


def _packed(part: Any) -> Any:
    """The same lists, tuples and dicts, where a dict with the name of its class stands for each Struct."""
    if isinstance(part, Struct):
        return {_CLASS: qualified_name(type(part)), **{x.name: _packed(getattr(part, x.name)) for x in fields(part)}}
    return _branches(_packed, part)


def _unpacked(state: Any, device: torch.device, name: str) -> Any:
    """The inverse of `_packed`, with tensors on `device`. Raises ValueError if the class of a Struct is not there."""
    if isinstance(state, dict) and _CLASS in state:
        known = {qualified_name(cls): cls for cls in _below(Struct)}
        if (cls := state[_CLASS]) not in known:
            raise ValueError(f"{name} holds a Struct of the class {cls}, which is not there{nearest(cls, known)}")
        return known[cls](**{key: _unpacked(x, device, name) for key, x in state.items() if key != _CLASS})
    return state.to(device) if isinstance(state, Tensor) else _branches(lambda x: _unpacked(x, device, name), state)


def _branches(f: Callable[[Any], Any], part: Any) -> Any:
    """A list, tuple or dict with `f` applied to what it holds; all else as it is."""
    if isinstance(part, dict):
        return {key: f(x) for key, x in part.items()}
    return type(part)(map(f, part)) if type(part) in (list, tuple) else part


def _below(cls: type) -> list[type]:
    """All classes that inherit from it."""
    return [x for each in cls.__subclasses__() for x in (each, *_below(each))]


def _load(part: Any, state: Any, name: str) -> bool:
    """Set a part in place to a saved state; False if the state itself takes its place."""
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, torch.Generator):
        _load_generator(part, state)
    elif isinstance(part, Tensor | np.ndarray) and state is not None:
        saved: Any = torch.as_tensor(state) if isinstance(part, Tensor) else np.asarray(state)
        if part.shape != saved.shape or part.dtype != saved.dtype:
            before, now = (f"{tuple(x.shape)} of {x.dtype}" for x in (saved, part))
            raise ValueError(f"{name} was saved as {before}, and is {now}")
        into: Any = part.data if isinstance(part, Tensor) else part
        into[...] = saved
    else:
        return False
    return True


def _load_generator(part: torch.Generator, state: Tensor) -> None:
    """Set it to a saved state, or to what follows from that of another kind of device."""
    if state.numel() == part.get_state().numel():
        part.set_state(state.cpu())
    else:
        digest = hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=8).digest()
        part.manual_seed(int.from_bytes(digest, "little") >> 1)


def _unsaved_parts(owner: Any, saved: Sequence[str]) -> list[str]:
    """Generators, optimizers and the networks that these learn, among attributes that are neither saved nor the agent.

    An object of two names is saved if one of them is.
    """
    kept = [getattr(owner, name, None) for name in ("agent", *saved)]
    others = {name: x for name, x in vars(owner).items() if not any(x is each for each in kept)}
    optimizers = [x for x in vars(owner).values() if isinstance(x, OptimizerStep | torch.optim.Optimizer)]
    learned = {id(p) for each in optimizers for p in _parameters(each)}
    learned -= {id(p) for each in kept if isinstance(each, nn.Module) for p in each.parameters()}
    return [
        name
        for name, x in others.items()
        if isinstance(x, OptimizerStep | torch.optim.Optimizer | _GENERATORS)
        or (isinstance(x, nn.Module) and any(id(p) in learned for p in x.parameters()))
    ]


def _parameters(optimizer: OptimizerStep | torch.optim.Optimizer) -> list[Tensor]:
    if isinstance(optimizer, OptimizerStep):
        return list(optimizer.parameters)
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(part: Any) -> list[Tensor]:
    """Those in which changes can be counted, of a tensor, a network, a Struct, or lists, tuples and dicts of these."""
    part = leaves(part) if isinstance(part, Struct) else part
    if isinstance(part, list | tuple | deque | dict):
        return [x for each in (part.values() if isinstance(part, dict) else part) for x in _tensors(each)]
    found = [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else [part]
    return [x for x in found if isinstance(x, Tensor) and not x.is_inference()]  # such a one has no count


def content(value: Any) -> Any:
    """What training may change in a value, as far as it is plain: the first of its numbers and texts, and lengths."""
    left = _LOOKED_AT

    def of(x: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
            x = x.tolist() if x.size <= left else x.shape
        if isinstance(x, list | tuple | deque | dict | set) and depth:
            try:
                n, first = len(x), list(islice(x.items() if isinstance(x, dict) else x, max(0, left)))
            except Exception:  # a thread of its own changes it, for example
                return None
            pairs = [part for item in first for part in item] if isinstance(x, dict) else first
            inside = [of(part, depth - 1) for part in pairs if left > 0]
            return n, frozenset(inside) if isinstance(x, set) else tuple(inside)
        if isinstance(x, Number):
            return x if x == x else "nan"
        return hash(x) if isinstance(x, str) else None

    return of(value, _DEEPEST)


def _kept_places(owner: Any, saved: Sequence[str]) -> set[int]:
    """Where the tensors of the agent and of all that is saved lie, also those of a saved object's attributes."""
    parts = [getattr(owner, name, None) for name in ("agent", *saved)]
    parts += [x for part in parts for x in getattr(part, "__dict__", {}).values() if isinstance(x, nn.Module | Tensor)]
    return {x.data_ptr() for part in parts for x in _tensors(part)}


def _is_one_of(x: Any, kept: Sequence[Any]) -> bool:
    """Whether it is one of these objects, or an array in the memory of one."""
    arrays = [each for each in kept if isinstance(each, np.ndarray)] if isinstance(x, np.ndarray) else []
    return any(x is each for each in kept) or any(np.may_share_memory(x, each) for each in arrays)


class UnsavedState:
    """Notices state that `saved` does not name.

    Generators, optimizers and learned networks are state whatever happens; numbers are if they change, and tensors,
    alone, in lists or in networks such as targets, if they change in place, and lists, dicts and small arrays if what
    they hold does.
    """

    def __init__(self) -> None:
        # By name what may change, beside what must be the same for that: the hash of contents, a tensor's changes.
        self._before: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        self.names: list[str] = []  # of what was found so far
        self.lost: list[str] = []  # of what a loaded snapshot lacks
        self._told = 0  # of `names`

    def look(self, owner: Any, saved: Sequence[str]) -> None:
        """Find what has changed since the last look, and what is state in any case."""
        now: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        kept, objects = _kept_places(owner, saved), [getattr(owner, name, None) for name in saved]
        for name in sorted(vars(owner).keys() - {"agent", *saved}):
            x = vars(owner)[name]
            own = [each for each in _tensors(x) if each.data_ptr() not in kept]
            now[name] = [(tuple(map(id, own)), sum(each._version for each in own))]
            is_collection = isinstance(x, list | dict | deque | np.ndarray) and not _is_one_of(x, objects)
            if type(x) in (int, float) or is_collection:
                now[name].append(((), hash(content(x))))
        both = [(name, zip(self._before.get(name, []), found, strict=False)) for name, found in now.items()]
        changed = [name for name, pairs in both if any(a[0] == b[0] and a[1] != b[1] for a, b in pairs)]
        self._before = now
        found = [f"{type(owner).__name__}.{name}" for name in dict.fromkeys([*changed, *_unsaved_parts(owner, saved)])]
        self.names += [name for name in found if name not in self.names]

    def tell(self) -> None:
        """Warn of what was found, once of each name."""
        if new := self.names[self._told :]:
            self._told = len(self.names)
            _logger.warning(
                f"`saved` does not name {', '.join(new)}: a resumed run begins with what __init__ makes of it"
            )

    def present(self, owner: Any, saved: Sequence[str]) -> list[str]:
        """Names of what was found or lost, without what is saved now or is not there any more."""
        there = vars(owner).keys() - {*saved}
        return sorted(name for name in {*self.names, *self.lost} if name.partition(".")[2] in there)
