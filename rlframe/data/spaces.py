"""Spaces as the JSON text that datasets hold, and the differences between two spaces."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.errors import ConfigError, one_line
from rlframe.core.spaces import ordered_dict

_MOST_VALUES = 1 << 24  # of a space, so that its zeros fit into memory
_DEPTH = 8  # of Dicts and Tuples in each other


def space_json(space: Space) -> str:
    """The JSON text of a Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them, as Minari writes it."""
    return json.dumps(_plain(space))


def _plain(space: Space) -> dict[str, Any]:
    match space:
        case spaces.Dict():
            return {"type": "Dict", "subspaces": {key: _plain(sub) for key, sub in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "subspaces": [_plain(sub) for sub in space.spaces]}
        case spaces.Box():
            dtype = "float32" if space.dtype == np.float64 else str(space.dtype)  # of what agents see
            with np.errstate(over="ignore"):  # of float64's largest numbers, which mean none
                bounds = {"low": space.low.astype(dtype).tolist(), "high": space.high.astype(dtype).tolist()}
            return {"type": "Box", "dtype": dtype, "shape": list(space.shape), **bounds}
        case spaces.Discrete():
            return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
        case spaces.MultiDiscrete():
            sizes = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": "MultiDiscrete", "dtype": "int64", **sizes}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    raise ConfigError(f"a dataset cannot hold {space}; use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple")


def read_space(text: Any, name: str) -> Space:
    """The space of a JSON text.

    Raises:
        ConfigError: it is none, or too large; the message begins with `name`.
    """
    try:
        found = _space(json.loads(text), 0)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 100)}"
        raise ConfigError(f"{name} is not a space that rlframe reads ({reason})") from None
    return found


def _space(plain: Any, depth: int) -> Space:
    if depth > _DEPTH:
        raise ValueError("Dicts and Tuples are nested too deeply")
    kind = plain["type"]
    match kind:
        case "Dict":
            return ordered_dict({str(key): _space(sub, depth + 1) for key, sub in plain["subspaces"].items()})
        case "Tuple":
            return spaces.Tuple([_space(sub, depth + 1) for sub in plain["subspaces"]])
        case "Box":
            dtype, shape = np.dtype(plain["dtype"]), _shape(plain["shape"])
            if dtype.kind not in "fiub":
                raise ValueError(f"a Box of {dtype}")
            low, high = (np.array(plain[bound], dtype) for bound in ("low", "high"))
            return spaces.Box(np.broadcast_to(low, shape), np.broadcast_to(high, shape), shape, dtype.type)
        case "Discrete":
            return spaces.Discrete(int(plain["n"]), start=int(plain.get("start", 0)))
        case "MultiDiscrete":
            nvec = np.array(plain["nvec"], np.int64)
            _shape(nvec.shape)
            return spaces.MultiDiscrete(nvec, start=np.array(plain.get("start", np.zeros_like(nvec)), np.int64))
        case "MultiBinary":
            n = plain["n"]
            return spaces.MultiBinary(_shape(n) if isinstance(n, list) else _shape([n])[0])
    raise ValueError(f"a space of type {str(kind)[:60]}")


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = tuple(int(n) for n in shape)
    size = 1
    for n in sizes:
        size *= n
        if n < 0 or size > _MOST_VALUES:
            raise ValueError(f"its shape {list(sizes)[:8]} has more than {_MOST_VALUES:,} values")
    return sizes


def difference(one: Space, other: Space, name: str) -> str:
    """What differs between two spaces as agents see them, such as `observation['x']: Box... and Discrete(2)`, or ''."""
    match one, other:
        case (spaces.Dict(), spaces.Dict()) if one.spaces.keys() == other.spaces.keys():
            parts = [difference(one[key], other[key], f"{name}[{key!r}]") for key in one.spaces]
            return next(filter(None, parts), "")
        case (spaces.Tuple(), spaces.Tuple()) if len(one) == len(other):
            pairs = enumerate(zip(one.spaces, other.spaces, strict=True))
            return next(filter(None, (difference(a, b, f"{name}[{i}]") for i, (a, b) in pairs)), "")
        case (spaces.Box(), spaces.Box()):
            same = one.shape == other.shape and _seen(one) == _seen(other) and _same_bounds(one, other, name)
        case _:
            same = _seen_as(one) == _seen_as(other)
    return "" if same else f"{name}: {one_line(one, 120)} and {one_line(other, 120)}"


def _seen(box: spaces.Box) -> np.dtype[Any]:
    return np.dtype(np.float32) if box.dtype == np.float64 else np.dtype(box.dtype)


def _same_bounds(one: spaces.Box, other: spaces.Box, name: str) -> bool:
    """Actions are rescaled by their bounds; those of observations mean nothing to a network."""
    return not name.startswith("action") or (
        np.array_equal(one.low.astype(np.float32), other.low.astype(np.float32))
        and np.array_equal(one.high.astype(np.float32), other.high.astype(np.float32))
    )


def _seen_as(space: Space) -> Any:
    try:
        return _plain(space)
    except ConfigError:
        return str(space)
