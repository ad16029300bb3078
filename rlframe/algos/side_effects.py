"""What an update does in Python beside torch's operations, which a record of it would not repeat: draws and counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import nn

_PLAIN = (bool, int, float, str)
_GLOBAL: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {  # returns a state, sets it
    "NumPy's": (np.random.get_state, np.random.set_state),
    "Python's": (random.getstate, random.setstate),
}


class SideEffect(RuntimeError):
    """What an update did in Python, and what to do."""


@contextmanager
def without_side_effects(learn: Callable[..., Any]) -> Iterator[None]:
    """Context in which `learn` runs once, to be recorded; what its Python has changed is as before afterwards.

    Looked at are NumPy's and Python's global generators and, of the object that `learn` is a method of and of its
    modules, the attributes that are numbers, texts or NumPy generators, but for `training`, which each call sets.

    Raises:
        SideEffect: it has changed something.
    """
    owners, states = _owners(learn), {name: state() for name, (state, _) in _GLOBAL.items()}
    attributes = [_attributes(owner) for owner in owners]
    drawn, changed = list[str](), list[str]()
    try:
        yield
    finally:
        for name, (state, load) in _GLOBAL.items():
            if repr(state()) != repr(states[name]):
                load(states[name])
                drawn.append(name)
        for owner, before in zip(owners, attributes, strict=True):
            after, of = _attributes(owner), type(owner).__name__
            for name in [name for name in before if name in after and _differ(before[name], after[name])]:
                if isinstance(generator := vars(owner)[name], np.random.Generator):
                    generator.bit_generator.state = before[name]
                    drawn.append(f"{of}'s")
                else:
                    vars(owner)[name] = before[name]
                    changed.append(f"{of}.{name}")
    if drawn:
        raise SideEffect(f"it draws from {_listed(drawn)} generator; draw with torch, or use compile=false")
    if changed:
        raise SideEffect(f"it changes {_listed(changed)} in Python; keep that in a tensor, or use compile=false")


def _listed(names: list[str]) -> str:
    return " and ".join(dict.fromkeys(names))  # a target network's are those of the network


def _owners(learn: Callable[..., Any]) -> list[Any]:
    """The object that a function is a method of, with the modules among its attributes and in them; each once."""
    function, owner = learn, None
    while function is not None and owner is None:
        owner = getattr(function, "__self__", None)
        function = function.func if isinstance(function, partial) else getattr(function, "__wrapped__", None)
    if owner is None:
        return []
    modules = [each for part in getattr(owner, "__dict__", {}).values() for each in _modules(part)]
    return [*{id(each): each for each in [owner, *modules]}.values()]


def _modules(part: Any) -> Iterable[nn.Module]:
    """Those of an attribute, which may be a list or dict of them."""
    if isinstance(part, nn.Module):
        return part.modules()
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return (each for module in parts if isinstance(module, nn.Module) for each in module.modules())


def _attributes(owner: Any) -> dict[str, Any]:
    """The values of those that are looked at; of generators, their states."""
    found = {name: x for name, x in getattr(owner, "__dict__", {}).items() if name != "training"}
    plain = {name: x for name, x in found.items() if isinstance(x, _PLAIN) and x == x}
    generators = {name: x for name, x in found.items() if isinstance(x, np.random.Generator)}
    return plain | {name: x.bit_generator.state for name, x in generators.items()}


def _differ(one: Any, other: Any) -> bool:
    return repr(one) != repr(other) if isinstance(one, dict) else bool(one != other)  # a state may have arrays
