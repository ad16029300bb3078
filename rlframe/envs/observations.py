"""How observations get from environments into canonical rows, and what is wrong with those that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space

from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, leaves

Write = Callable[[Tree, int, Any], None]
WriteBatch = Callable[[Tree, Any], None]


class Misfit(Exception):
    """An observation, reward or flag that the environment's spaces forbid, in words; `index` if the batch knows it."""

    def __init__(self, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.index = index


def foreign(error: Exception) -> Exception | None:
    """`error` as a cause to show: none if it is our own finding, which says all in words."""
    return None if isinstance(error, Misfit) else error


def row_writer(space: Space, name: str = "the observation") -> Write:
    """A function (rows, index, observation) that checks one environment's observation and writes it into its row.

    Values that are not finite or out of range are found by `batch_checker`, for the whole batch at once.
    """
    match space:
        case spaces.Dict():
            return _dict_writer({key: row_writer(sub, f"{name}[{key!r}]") for key, sub in space.spaces.items()}, name)
        case spaces.Tuple():
            return _tuple_writer([row_writer(sub, f"{name}[{i}]") for i, sub in enumerate(space.spaces)], name)
        case spaces.Box():
            return _box_writer(space, name)
        case spaces.Discrete():
            return _discrete_writer(space, name)
        case _:
            return _integers_writer(space, name)


def _dict_writer(parts: dict[str, Write], name: str) -> Write:
    keys = set(parts)

    def write(rows: Tree, index: int, observation: Any) -> None:
        if not isinstance(observation, dict) or set(observation) != keys:
            found = sorted(observation) if isinstance(observation, dict) else type(observation).__name__
            raise Misfit(f"{name} is not a dict of {sorted(keys)} but {found}")
        for key, part in parts.items():
            part(rows[key], index, observation[key])

    return write


def _tuple_writer(parts: list[Write], name: str) -> Write:
    def write(rows: Tree, index: int, observation: Any) -> None:
        if not isinstance(observation, tuple | list) or len(observation) != len(parts):
            raise Misfit(f"{name} is not a tuple of {len(parts)} but {_kind(observation)}")
        for part, row, value in zip(parts, rows, observation, strict=True):
            part(row, index, value)

    return write


def _box_writer(space: spaces.Box, name: str) -> Write:
    shape, dtype = space.shape, space.dtype
    arrays = (np.ndarray, np.generic)  # a NumPy scalar is an array of shape ()

    def write(rows: Tree, index: int, observation: Any) -> None:
        if isinstance(observation, arrays) and observation.shape == shape and observation.dtype == dtype:
            rows[index] = observation
        else:
            raise Misfit(f"{name} is not an array of shape {shape} and dtype {dtype} but {_kind(observation)}")

    return write


def _discrete_writer(space: spaces.Discrete, name: str) -> Write:
    start, n = int(space.start), int(space.n)

    def write(rows: Tree, index: int, observation: Any) -> None:
        try:
            number = observation.__index__() - start  # ints, NumPy ints and integer arrays of shape ()
        except (AttributeError, TypeError):
            raise Misfit(f"{name} is not an integer but {_kind(observation)}") from None
        if not 0 <= number < n:
            raise Misfit(f"{name} is {observation}, outside {space}")
        rows[index] = number

    return write


def _integers_writer(space: Space, name: str) -> Write:
    """MultiDiscrete and MultiBinary."""
    shape = space.shape
    start = space.start if isinstance(space, spaces.MultiDiscrete) and np.any(space.start) else 0

    def write(rows: Tree, index: int, observation: Any) -> None:
        if not isinstance(observation, np.ndarray) or observation.shape != shape or observation.dtype.kind not in "biu":
            raise Misfit(f"{name} is not an integer array of shape {shape} but {_kind(observation)}")
        np.subtract(observation, start, out=rows[index, ...], casting="unsafe")

    return write


def batch_writer(space: Space, n: int, name: str = "the observation") -> WriteBatch:
    """A function (rows, observation) that checks a vector environment's observations and copies them once."""
    match space:
        case spaces.Dict():
            by_key = {key: batch_writer(sub, n, f"{name}[{key!r}]") for key, sub in space.spaces.items()}

            def write_dict(rows: Tree, observation: Any) -> None:
                for key, part in by_key.items():
                    part(rows[key], observation[key])

            return write_dict
        case spaces.Tuple():
            each = [batch_writer(sub, n, f"{name}[{i}]") for i, sub in enumerate(space.spaces)]

            def write_tuple(rows: Tree, observation: Any) -> None:
                for part, row, value in zip(each, rows, observation, strict=True):
                    part(row, value)

            return write_tuple
        case _:
            return _batch_leaf_writer(space, n, name)


def _batch_leaf_writer(space: Space, n: int, name: str) -> WriteBatch:
    shape, dtype = (n, *(space.shape or ())), space.dtype
    integers = not isinstance(space, spaces.Box)  # whose width may differ: EnvPool sends int32 for int64
    start = np.asarray(space.start) if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else np.asarray(0)
    shifted = bool(start.any())
    choices = int(space.n) if isinstance(space, spaces.Discrete) else 0

    def write(rows: Tree, observation: Any) -> None:
        fits = isinstance(observation, np.ndarray) and observation.shape == shape
        if not fits or not (observation.dtype == dtype or (integers and observation.dtype.kind in "biu")):
            raise Misfit(f"{name} is not an array of shape {shape} and dtype {dtype} but {_kind(observation)}")
        if shifted:
            np.subtract(observation, start, out=rows, casting="unsafe")
        else:
            rows[...] = observation
        if choices and not 0 <= rows.min() <= rows.max() < choices:
            index = _first_bad((rows >= 0) & (rows < choices))
            raise Misfit(f"{name} is {observation[index]}, outside {space}", index)

    return write


def batch_checker(space: Space) -> Callable[[Tree], None]:
    """A function that looks over the rows just written, all environments at once, for NaN, Inf and values out of range.

    Float boxes must be finite, integers of MultiDiscrete and MultiBinary in range; a Box's bounds are not enforced.
    """
    checks = [_leaf_check(sub, name) for name, sub in action_parts(space, "the observation")]
    if not any(checks):
        return lambda rows: None
    if len(checks) == 1 and checks[0] and not isinstance(space, spaces.Dict | spaces.Tuple):
        return checks[0]  # the common case, spared the walk through a tree

    def check(rows: Tree) -> None:
        for leaf, check_leaf in zip(leaves(rows), checks, strict=True):
            if check_leaf:
                check_leaf(leaf)

    return check


def _leaf_check(space: Space, name: str) -> Callable[[np.ndarray], None] | None:
    match space:
        case spaces.Box() if space.dtype is not None and space.dtype.kind == "f":

            def check_finite(rows: np.ndarray) -> None:
                finite = np.isfinite(rows)
                if np.count_nonzero(finite) != finite.size:  # a fifth of the time of all()
                    index = _first_bad(finite)
                    raise Misfit(f"{name} is not finite: {rows[index]}", index)

            return check_finite
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            size = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.asarray(2)

            def check_range(rows: np.ndarray) -> None:
                inside = (rows >= 0) & (rows < size)
                if not inside.all():
                    index = _first_bad(inside)
                    raise Misfit(f"{name} is outside {space} (counted from its start: {rows[index]})", index)

            return check_range
        case _:  # Discrete is checked as it is written
            return None


def _first_bad(good: np.ndarray) -> int:
    return int(np.flatnonzero(~good.reshape(len(good), -1).all(axis=1))[0])


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"one of shape {value.shape} and dtype {value.dtype}"
    return f"a {type(value).__name__}: {str(value)[:60]}"
