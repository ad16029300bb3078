"""Side effects of an update in Python, beside torch's operations, which a record of these would not repeat."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframe.core.struct import Struct, Tree, array_fields, plain_fields

_PLAIN = (bool, int, float, str, set, type(None))
_REAL = (Tensor, nn.Parameter)  # others stand for tensors while an update is recorded
_OTHERS = {"rlframe", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}  # of objects not the user's own
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module
_MOST = 10_000  # entries of a list or dict that is watched
_MOST_SHOWN = 1_000  # numbers of an array, of which repr shows all


class SideEffect(RuntimeError):
    """What an update did in Python, and what to do."""


class Reading(TorchDispatchMode):
    """The ids of the tensors that operations inside read; keeps none alive, so whoever asks must hold the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids |= {id(x) for x in tree_leaves((args, kwargs)) if type(x) in _REAL}
        return func(*args, **(kwargs or {}))


class _Unread:
    """Stands for a number of a batch beside its tensors, such as n_env_steps: a record has one for all batches."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise SideEffect(
            f"it reads {self._name} of the batch, a number that the next one may have otherwise; use one of its "
            f"tensors, such as valid.sum(), or compile=false"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))._refuse()

    __bool__ = __int__ = __float__ = __index__ = __neg__ = __abs__ = __round__ = __hash__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse


def without_numbers(tree: Tree) -> Tree:
    """Inputs whose plain fields (see Struct) raise SideEffect where they are read; they may be passed on."""
    if isinstance(tree, Struct):
        cls: Any = type(tree)
        found = {name: without_numbers(getattr(tree, name)) for name in array_fields(cls)}
        return cls(**found, **{name: _Unread(name) for name in plain_fields(cls)})
    if isinstance(tree, tuple):
        return tuple(map(without_numbers, tree))
    return {key: without_numbers(each) for key, each in tree.items()} if isinstance(tree, dict) else tree


@contextmanager
def without_side_effects(learn: Callable[..., Any], reading: Reading) -> Iterator[None]:
    """Context in which `learn` runs once, to be recorded; what its Python has changed is as before afterwards.

    Watched are NumPy's and Python's global generators and, of the object that `learn` is a method of, of its modules
    and of the user's own objects in these, the attributes that are numbers, texts, NumPy generators, and tensors that
    have made way for others, but not `training`, which each call sets; and what is in lists and dicts. Tensors in
    attributes of modules count only if they were read: the others are for the update alone.

    Args:
        reading: notes, inside `learn`, what it reads.
    Raises:
        SideEffect: it has changed something.
    """
    owners = _owners(learn)
    generators = [(*each, each[1]()) for each in _generators(owners)]
    places = [(owner, named, _kept(named)) for owner in owners for named in _attributes(owner)]
    contents = [(name, x, x.copy()) for owner in owners for name, x in _containers(owner)]
    draws: list[str] = []
    counted: list[str] = []
    replaced: list[str] = []
    try:
        yield
    finally:
        for name, state, load, before in generators:
            if repr(state()) != repr(before):
                load(before)
                draws.append(name)
        for owner, named, found in places:
            numbers, tensors = _take_away(owner, named, found)
            counted, replaced = [*counted, *numbers], [*replaced, *tensors, *_put_back(owner, named, found, reading)]
        counted += [name for name, x, found in contents if _refill(x, found)]
    for names, says in (
        (draws, "it draws from {} generator; draw with torch, or use compile=false"),
        (counted, "it changes {} in Python; keep that in a tensor, or use compile=false"),
        (replaced, "it puts another tensor in the place of {}; change that one, as by copy_, or use compile=false"),
    ):
        if names:
            raise SideEffect(says.format(" and ".join(dict.fromkeys(names))))


def _kept(named: dict[str, Any]) -> dict[str, Any]:
    """Attributes as they are now; sets and small arrays, which may change in place, as copies."""
    return {name: x.copy() if isinstance(x, set | np.ndarray) and _is_plain(x) else x for name, x in named.items()}


def _take_away(owner: Any, named: dict[str, Any], before: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Undo changes of numbers, and delete new attributes that are numbers, or tensors that stand for others.

    Returns the names of the numbers, and of the tensors outside of modules, which others may read.
    """
    new = {name: x for name, x in named.items() if name not in before}
    plain = [name for name, x in new.items() if _is_plain(x)]
    tensors = [name for name, x in new.items() if isinstance(x, Tensor) and type(x) not in _REAL]
    for name in (*plain, *tensors):
        del named[name]
    known = before if named is getattr(owner, "__dict__", None) else {}  # buffers that are None are no numbers
    known, now = {name: x for name, x in known.items() if _is_plain(x) and name != "training"}, _kept(named)
    changed = {name: x for name, x in known.items() if repr(now.get(name, "missing")) != repr(x)}
    named.update(changed)
    seen = [] if isinstance(owner, nn.Module) else tensors
    numbers, others = ([f"{type(owner).__name__}.{name}" for name in each] for each in ((*changed, *plain), seen))
    return numbers, others


def _put_back(owner: Any, named: dict[str, Any], before: dict[str, Any], reading: Reading) -> list[str]:
    """Give attributes their tensors back; the names of those that were read: a record would read them again.

    Outside of modules, whose features are for the update alone, also of those that others may read afterwards.
    """
    lost = {name: x for name, x in before.items() if _tensors(x) and named.get(name) is not x}
    named.update(lost)
    of_module = isinstance(owner, nn.Module)
    read = (name for name, x in lost.items() if not of_module or any(id(each) in reading.ids for each in _tensors(x)))
    return [f"{type(owner).__name__}.{name}" for name in read]


def _tensors(x: Any) -> list[Tensor]:
    """A tensor, or those in a tuple, list or dict."""
    if isinstance(x, Tensor):
        return [x]
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)] if isinstance(x, tuple | list | dict) else []


def _attributes(owner: Any) -> Iterator[dict[str, Any]]:
    """Where an object has its attributes, and a module its buffers and parameters."""
    yield from (x for name in ("__dict__", "_buffers", "_parameters") if (x := getattr(owner, name, None)))


def _containers(owner: Any) -> Iterator[tuple[str, Any]]:
    """The lists and dicts among the attributes of an object, and in each other, but those of torch in a module."""
    attributes = getattr(owner, "__dict__", {})
    waiting = [(f"{type(owner).__name__}.{name}", x) for name, x in attributes.items() if name not in _OF_MODULES]
    seen: set[int] = set()
    while waiting:
        name, x = waiting.pop()
        if isinstance(x, list | dict) and id(x) not in seen and len(x) <= _MOST:
            seen.add(id(x))
            yield name, x
            waiting += [(name, each) for each in (x.values() if isinstance(x, dict) else x)]


def _refill(x: Any, before: Any) -> bool:
    """Give a list or dict the entries back that it had; whether it has others."""
    now, old = (list(each.items() if isinstance(each, dict) else enumerate(each)) for each in (x, before))
    same = (a is b or (_is_plain(a) and repr(a) == repr(b)) for (_, a), (_, b) in zip(now, old, strict=False))
    if [key for key, _ in now] == [key for key, _ in old] and all(same):
        return False
    x.clear()
    x.extend(before) if isinstance(x, list) else x.update(before)
    return True


def _generators(owners: Sequence[Any]) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Whose each generator is, what reads its state, and what sets it."""
    yield "NumPy's", np.random.get_state, np.random.set_state
    yield "Python's", random.getstate, random.setstate
    for owner in owners:
        for x in getattr(owner, "__dict__", {}).values():
            if isinstance(x, np.random.Generator):
                bits = x.bit_generator
                yield f"{type(owner).__name__}'s", partial(getattr, bits, "state"), partial(setattr, bits, "state")


def _is_plain(x: Any) -> bool:
    """Whether it is a number or text, a set, or a tuple or small array of numbers."""
    if isinstance(x, np.ndarray):
        return x.size <= _MOST_SHOWN
    return all(isinstance(each, _PLAIN) for each in (x if isinstance(x, tuple) else [x]))


def _owners(learn: Callable[..., Any]) -> list[Any]:
    """The object that a function is a method of, with the modules and the user's own objects in it; each once."""
    function, owner = learn, None
    while function is not None and owner is None:
        owner = getattr(function, "__self__", None)
        function = function.func if isinstance(function, partial) else getattr(function, "__wrapped__", None)
    found: dict[int, Any] = {}
    waiting = [] if owner is None else [owner]
    while waiting:
        x = waiting.pop()
        is_list = isinstance(x, list | tuple | dict)
        if id(x) in found or (is_list and len(x) > _MOST):
            continue
        if is_list:
            waiting += x.values() if isinstance(x, dict) else x
        elif x is owner or isinstance(x, nn.Module) or _is_own(x):
            waiting += getattr(x, "__dict__", {}).values()
        else:
            continue
        found[id(x)] = x
    return [x for x in found.values() if not isinstance(x, list | tuple | dict)]


def _is_own(x: Any) -> bool:
    """Whether it is an object of a class of the user's."""
    return type(x).__module__.partition(".")[0] not in _OTHERS and hasattr(x, "__dict__") and not isinstance(x, type)
