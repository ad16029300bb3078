"""What an update does in Python beside torch's operations, which a record of it would not repeat: draws and counts."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import numpy as np
from torch import nn

_PLAIN = (bool, int, float, str, tuple, np.random.Generator)
_GLOBAL: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {  # returns a state, sets it
    "NumPy's": (np.random.get_state, np.random.set_state),
    "Python's": (random.getstate, random.setstate),
}


class SideEffect(RuntimeError):
    """What an update did in Python, and what to do."""


@contextmanager
def without_side_effects(learn: Callable[..., Any]) -> Iterator[None]:
    """Context in which `learn` runs once, to be recorded; what its Python has changed is as before afterwards.

    That are NumPy's and Python's global generators and, of the object that `learn` is a method of and of its modules,
    the attributes that are numbers, texts or NumPy generators, but for `training`, which each call sets.

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
            after = _attributes(owner)
            for name in [name for name in before.keys() & after if _value(before[name]) != _value(after[name])]:
                vars(owner)[name], of = before[name], type(owner).__name__
                if isinstance(before[name], np.random.Generator):
                    drawn.append(f"{of}'s")
                else:
                    changed.append(f"{of}.{name}")
    if drawn:
        raise SideEffect(f"it draws from {_listed(drawn)} generator; draw with torch, or use compile=false")
    if changed:
        raise SideEffect(f"it changes {_listed(changed)} in Python; keep that in a tensor, or use compile=false")


def _listed(names: list[str]) -> str:
    return " and ".join(dict.fromkeys(names))  # a target network's are those of the network


def _owners(learn: Callable[..., Any]) -> list[Any]:
    """The object that a function is a method of, with the modules among its attributes and in them; each once."""
    owner = getattr(inspect.unwrap(learn), "__self__", None)
    if owner is None:
        return []
    modules = chain(*(each.modules() for each in vars(owner).values() if isinstance(each, nn.Module)))
    return [*{id(each): each for each in [owner, *modules]}.values()]


def _attributes(owner: Any) -> dict[str, Any]:
    """Those that are looked at; generators as copies."""
    found = {name: x for name, x in vars(owner).items() if isinstance(x, _PLAIN) and name != "training"}
    return {name: deepcopy(x) if isinstance(x, np.random.Generator) else x for name, x in found.items()}


def _value(attribute: Any) -> str:
    return repr(attribute.bit_generator.state if isinstance(attribute, np.random.Generator) else attribute)
