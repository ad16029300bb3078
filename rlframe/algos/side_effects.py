"""What an update does in Python beside torch's operations, which a record of it would not repeat: draws and counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn

_PLAIN = (bool, int, float, str)


class SideEffect(RuntimeError):
    """What an update did in Python, and what to do."""


@dataclass(frozen=True)
class _Watched:
    """Something that Python may change: a generator, or an attribute that is a number or text."""

    name: str
    state: Callable[[], Any]
    load: Callable[[Any], None]
    is_generator: bool = True


@contextmanager
def without_side_effects(learn: Callable[..., Any]) -> Iterator[None]:
    """Context in which `learn` runs once, to be recorded; what its Python has changed is as before afterwards.

    Watched are NumPy's and Python's global generators and, of the object that `learn` is a method of and of its
    modules, the attributes that are numbers, texts or NumPy generators, but for `training`, which each call sets.

    Raises:
        SideEffect: it has changed something.
    """
    before = [(each, each.state()) for each in _watched(learn)]
    changed: list[_Watched] = []
    try:
        yield
    finally:
        for each, state in before:
            if repr(each.state()) != repr(state):
                each.load(state)
                changed.append(each)
    for is_generator, says in (
        (True, "it draws from {} generator; draw with torch, or use compile=false"),
        (False, "it changes {} in Python; keep that in a tensor, or use compile=false"),
    ):
        names = dict.fromkeys(each.name for each in changed if each.is_generator is is_generator)
        if names:
            raise SideEffect(says.format(" and ".join(names)))


def _watched(learn: Callable[..., Any]) -> Iterator[_Watched]:
    yield _Watched("NumPy's", np.random.get_state, np.random.set_state)
    yield _Watched("Python's", random.getstate, random.setstate)
    for owner in _owners(learn):
        for name, x in getattr(owner, "__dict__", {}).items():
            if isinstance(x, np.random.Generator):
                bits = x.bit_generator
                yield _Watched(
                    f"{type(owner).__name__}'s", partial(getattr, bits, "state"), partial(setattr, bits, "state")
                )
            elif isinstance(x, _PLAIN) and name != "training":
                yield _Watched(f"{type(owner).__name__}.{name}", *_attribute(owner, name, x), is_generator=False)


def _attribute(owner: Any, name: str, x: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """What reads and sets an attribute that is `x`; one that is a tensor or the like by now reads as unchanged."""
    attributes = vars(owner)

    def state() -> Any:
        now = attributes.get(name, x)
        return now if isinstance(now, _PLAIN) else x

    return state, partial(attributes.__setitem__, name)


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
