"""Trees of arrays: Structs (frozen dataclasses), tuples, dicts, and single NumPy arrays or torch tensors.

Imports without torch: tensors are recognised by their type's module, and only `Struct.torch` imports it.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from operator import setitem
from typing import Any, Self

import numpy as np

Tree = Any  # a Struct, tuple or dict of Trees, or one array


def plain(default: Any = MISSING) -> Any:
    """A field of a Struct that is no array: a plain value, which every copy of the Struct keeps as it is."""
    return field(default=default, metadata={"plain": True})


@cache
def array_fields(cls: type[Any]) -> tuple[str, ...]:
    """The names of a Struct's fields that hold arrays or branches."""
    return tuple(each.name for each in fields(cls) if "plain" not in each.metadata)


@cache
def plain_fields(cls: type[Any]) -> tuple[str, ...]:
    """The names of its other fields; see `plain`."""
    return tuple(each.name for each in fields(cls) if "plain" in each.metadata)


def map_tree(f: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `f` to every leaf of `tree` and the same leaves of `others`; KeyError or ValueError if one is missing."""
    if not isinstance(tree, _BRANCHES):
        return f(tree, *others)
    if isinstance(tree, Struct):
        cls: Any = type(tree)
        found = {
            name: map_tree(f, getattr(tree, name), *[getattr(o, name) for o in others]) for name in array_fields(cls)
        }
        return cls(**found, **{name: getattr(tree, name) for name in plain_fields(cls)})
    if isinstance(tree, tuple):
        return tuple([map_tree(f, *each) for each in zip(tree, *others, strict=True)]) if tree else ()
    return {key: map_tree(f, value, *[o[key] for o in others]) for key, value in tree.items()}


def unbind(tree: Tree, n: int) -> list[Tree]:
    """The n trees along the first dimension [n, ...] of tensors; faster than indexing the tree n times."""
    if isinstance(tree, Struct):
        cls: Any = type(tree)
        columns = [unbind(getattr(tree, name), n) for name in array_fields(cls)]
        kept = {name: getattr(tree, name) for name in plain_fields(cls)}
        return [cls(*parts, **kept) for parts in zip(*columns, strict=True)]
    if isinstance(tree, tuple):
        return list(zip(*[unbind(part, n) for part in tree], strict=True)) if tree else [()] * n
    if isinstance(tree, dict):
        parts = zip(*[unbind(part, n) for part in tree.values()], strict=True)
        return [dict(zip(tree, values, strict=True)) for values in parts]
    return list(tree.unbind(0))


def leaves(tree: Tree) -> list[Any]:
    """The arrays of a tree in the order of its fields."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Tree, found: list[Any]) -> None:
    if not isinstance(tree, _BRANCHES):
        found.append(tree)
    elif isinstance(tree, Struct):
        cls: Any = type(tree)
        for name in array_fields(cls):
            _collect(getattr(tree, name), found)
    else:
        for branch in tree if isinstance(tree, tuple) else tree.values():
            _collect(branch, found)


def zeros_like(example: Tree, lead: tuple[int, ...]) -> Tree:
    """NumPy zeros of shape `lead + leaf.shape` with the example's dtypes."""
    return map_tree(lambda x: np.zeros(lead + tuple(np.shape(x)), np.asarray(x).dtype), example)


def write(target: Tree, source: Tree) -> None:
    """Copy `source` into `target` in place, leaf by leaf, casting to the target's dtype.

    NumPy targets accept tensors on any device, and tensor targets accept arrays.
    """
    writer(target)(source)


def writer(target: Tree) -> Callable[[Tree], None]:
    """A function that writes into this tree like `write`; the tree's structure is inspected only once."""
    if isinstance(target, np.ndarray):

        def write_array(source: Any) -> None:
            target[...] = source if isinstance(source, np.ndarray) else as_numpy(source)

        return write_array
    if isinstance(target, Struct):
        cls: Any = type(target)
        fields_ = [(name, writer(getattr(target, name))) for name in array_fields(cls)]

        def write_fields(source: Any) -> None:
            for name, write_field in fields_:
                write_field(getattr(source, name))

        return write_fields
    if isinstance(target, tuple):
        parts = [writer(part) for part in target]

        def write_parts(source: Any) -> None:
            for write_part, part in zip(parts, source, strict=True):
                write_part(part)

        return write_parts
    if isinstance(target, dict):
        items = [(key, writer(part)) for key, part in target.items()]

        def write_items(source: Any) -> None:
            for key, write_item in items:
                write_item(source[key])

        return write_items

    def write_tensor(source: Any) -> None:
        target[...] = target.new_tensor(source) if isinstance(source, np.ndarray) else source

    return write_tensor


def as_numpy(leaf: Any) -> np.ndarray:
    """A NumPy view of an array or CPU tensor; a copy of a tensor on another device."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if not type(leaf).__module__.startswith("torch"):
        return np.asarray(leaf)
    try:
        return leaf.numpy()  # half the time of the general case; called per leaf and step
    except (RuntimeError, TypeError):  # it requires grad, or is on another device
        return leaf.detach().cpu().numpy()


def fill(tensor: Any, numbers: Any) -> None:
    """Write a number, or a tuple of n numbers, into a tensor [] or [n] without synchronizing with its device."""
    if tensor.device.type == "cpu":  # takes a fifth of torch's time
        tensor.numpy()[...] = numbers
    elif isinstance(numbers, tuple):
        for place, number in zip(tensor, numbers, strict=True):
            place.fill_(number)
    else:
        tensor.fill_(numbers)


@dataclass(frozen=True, eq=False)
class Struct:
    """Base of records of arrays. Subclasses are frozen dataclasses; their leaves share leading dimensions.

    Fields made with `plain` are no leaves, and come last.
    """

    def __getitem__(self, index: Any) -> Self:
        """Index every leaf; views for basic indices."""
        return map_tree(lambda x: x[index], self)

    def __setitem__(self, index: Any, value: Self) -> None:
        map_tree(lambda x, v: setitem(x, index, v), self, value)

    def map(self, f: Callable[..., Any], *others: Self) -> Self:
        return map_tree(f, self, *others)

    def to(self, device: Any) -> Self:
        """Move every tensor to `device`; no copy if it is there already."""
        async_ = not str(device).startswith("cpu")  # a copy to the CPU must be complete before it is read
        return map_tree(lambda x: x.to(device, non_blocking=async_), self)

    def numpy(self) -> Self:
        return map_tree(as_numpy, self)

    def torch(self) -> Self:
        import torch  # imported here: environment workers never load it

        return map_tree(torch.as_tensor, self)


_BRANCHES = (Struct, tuple, dict)
