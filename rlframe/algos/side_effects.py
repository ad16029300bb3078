"""What an update does in Python beside torch's operations, which a record of it would not repeat: draws, counts, and
attributes that get another tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = (bool, int, float, str, type(None))
_REAL = (Tensor, nn.Parameter)  # others stand for tensors while an update is recorded
_OTHERS = frozenset({"rlframe", "torch", "numpy", "builtins"})  # packages of objects that are not the user's own


class SideEffect(RuntimeError):
    """What an update did in Python, and what to do."""


@dataclass(frozen=True)
class _Watched:
    """Something that Python may change: a generator, or an attribute that is a number or text."""

    name: str
    state: Callable[[], Any]
    load: Callable[[Any], None]
    is_generator: bool = True


class Reading(TorchDispatchMode):
    """Notes the tensors that the operations inside are of."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors |= {id(x): x for x in tree_leaves((args, kwargs)) if type(x) in _REAL}
        return func(*args, **(kwargs or {}))


@contextmanager
def without_side_effects(learn: Callable[..., Any], reading: Reading) -> Iterator[None]:
    """Context in which `learn` runs once, to be recorded; what its Python has changed is as before afterwards.

    Watched are NumPy's and Python's global generators and, of the object that `learn` is a method of, of its modules
    and of its parts that are the user's own, the attributes that are numbers, texts, lists or dicts of these, NumPy
    generators, and tensors that were read and have made way for others; but not `training`, which each call sets.

    Args:
        reading: notes, inside `learn`, what it reads.
    Raises:
        SideEffect: it has changed something.
    """
    before = [(each, each.state()) for each in _watched(learn)]
    places = [(owner, named, dict(named)) for owner in _owners(learn) for named in _attributes(owner)]
    changed: list[_Watched] = []
    replaced: list[str] = []
    try:
        yield
    finally:
        for each, state in before:
            if repr(each.state()) != repr(state):
                each.load(state)
                changed.append(each)
        for owner, named, found in places:
            replaced += _put_back(owner, named, found, reading)
    for names, says in (
        ([x.name for x in changed if x.is_generator], "it draws from {} generator; draw with torch, or use {}"),
        ([x.name for x in changed if not x.is_generator], "it changes {} in Python; keep that in a tensor, or use {}"),
        (replaced, "it puts another tensor in the place of {}; change that one, as by copy_, or use {}"),
    ):
        if names:
            raise SideEffect(says.format(" and ".join(dict.fromkeys(names)), "compile=false"))


def _put_back(owner: Any, named: dict[str, Any], before: dict[str, Any], reading: Reading) -> list[str]:
    """Give attributes their tensors back; returns the names of those that were read: a record would read them again."""
    for name in [name for name, x in named.items() if name not in before and isinstance(x, Tensor)]:
        if type(named[name]) not in _REAL:
            del named[name]
    lost = {name: x for name, x in before.items() if isinstance(x, Tensor) and named.get(name) is not x}
    named.update(lost)
    return [f"{type(owner).__name__}.{name}" for name, x in lost.items() if id(x) in reading.tensors]


def _attributes(owner: Any) -> Iterator[dict[str, Any]]:
    """Where an object has its attributes, and a module its buffers."""
    yield from (found for name in ("__dict__", "_buffers") if (found := getattr(owner, name, None)))


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
            elif _is_plain(x) and name != "training":
                yield _Watched(f"{type(owner).__name__}.{name}", *_attribute(owner, name), is_generator=False)


def _is_plain(x: Any) -> bool:
    """Whether it is a number or text, or a list or dict of some."""
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list) else [x]
    return all(isinstance(each, _PLAIN) for each in parts)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """What reads and sets an attribute; a list or dict is copied, and gets its own entries back."""
    attributes, first = vars(owner), vars(owner)[name]

    def state() -> Any:
        now = attributes.get(name)
        return now.copy() if isinstance(now, list | dict) else now

    def load(before: Any) -> None:
        if isinstance(first, list):
            first[:] = before
        elif isinstance(first, dict):
            first.clear()
            first.update(before)
        attributes[name] = first if isinstance(first, list | dict) else before

    return state, load


def _owners(learn: Callable[..., Any]) -> list[Any]:
    """The object that a function is a method of, with the modules and the user's own objects in it; each once."""
    function, owner = learn, None
    while function is not None and owner is None:
        owner = getattr(function, "__self__", None)
        function = function.func if isinstance(function, partial) else getattr(function, "__wrapped__", None)
    if owner is None:
        return []
    parts = list(getattr(owner, "__dict__", {}).values())
    modules = [each for part in parts for each in _modules(part)]
    own = [
        part for part in parts if type(part).__module__.partition(".")[0] not in _OTHERS and hasattr(part, "__dict__")
    ]
    return [*{id(each): each for each in [owner, *modules, *own]}.values()]


def _modules(part: Any) -> Iterable[nn.Module]:
    """Those of an attribute, which may be a list or dict of them."""
    if isinstance(part, nn.Module):
        return part.modules()
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return (each for module in parts if isinstance(module, nn.Module) for each in module.modules())
