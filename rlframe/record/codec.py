"""Training state as JSON plus named arrays, exactly and without pickle; large arrays in chunks.

Used by `record.rank_state` for snapshots, and by `dump` for arrays that are stored beside the log.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

from rlframe.core.errors import StateError
from rlframe.core.files import replace_file, replacing, write_file
from rlframe.core.memory import available_memory

CHUNK_BYTES = 2**22  # approximate chunk size: few files for a new array, little to rewrite after a small change


@dataclass(frozen=True, eq=False)
class ChunkedArray:
    """An array [n, *row] that is read chunk by chunk, so that it need not fit into memory twice.

    Valid until its owner writes to the data. Saving a snapshot computes missing `digests` and stores them here, so that
    an unchanged chunk is not read again.
    """

    dtype: np.dtype
    row: tuple[int, ...]
    counts: list[int]  # rows per chunk
    read: Callable[[int], np.ndarray]  # [counts[i], *row], contiguous
    digests: list[str]  # SHA-256 per chunk, "" if unknown; may be longer than counts

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.counts), *self.row)

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(self.counts) * self.row_bytes

    def to_numpy(self) -> np.ndarray:
        """Read the whole array into memory. Raises MemoryError if there is too little free memory."""
        check_memory(self.nbytes)
        array = np.empty(self.shape, self.dtype)
        for rows, chunk in iter_chunks(self):
            array[rows] = chunk
        return array


def check_memory(n_bytes: int) -> None:
    """Raise MemoryError if fewer than `n_bytes` of memory are free."""
    free = available_memory()
    if n_bytes > free:
        raise MemoryError(f"it needs {n_bytes:,} bytes of memory and {free:,} are free")


class ChunkHashes:
    """Hashes of the chunks of an array [L, ...] that is written by rows; a write invalidates the hash of its chunk."""

    def __init__(self, L: int, row_bytes: int) -> None:
        self.n_rows = max(1, CHUNK_BYTES // max(1, row_bytes))  # per chunk
        self._known = [""] * -(-L // self.n_rows)
        self._counts: list[int] = []

    def invalidate(self, rows: slice) -> None:
        """Forget the hashes of chunks that overlap these rows, at least one."""
        for i in range(rows.start // self.n_rows, (rows.stop - 1) // self.n_rows + 1):
            self._known[i] = ""

    def chunked(
        self, dtype: np.dtype, row: tuple[int, ...], n_used: int, read: Callable[[slice], np.ndarray]
    ) -> ChunkedArray:
        """A ChunkedArray of the first `n_used` rows; `read` returns rows, contiguous, of this dtype and shape."""
        n, counts = self.n_rows, self._counts_of(n_used)
        for i, count in enumerate(counts):
            if i >= len(self._counts) or self._counts[i] != count:
                self._known[i] = ""
        self._counts = counts
        return ChunkedArray(dtype, row, counts, lambda i: read(slice(i * n, i * n + counts[i])), self._known)

    def load(self, saved: np.ndarray | ChunkedArray) -> None:
        """Take over the hashes of `saved`, to which all rows were just set."""
        self._known[:] = [""] * len(self._known)
        if isinstance(saved, ChunkedArray) and saved.counts == self._counts_of(sum(saved.counts)):
            self._counts = saved.counts
            self._known[: len(saved.counts)] = saved.digests[: len(saved.counts)]

    def _counts_of(self, n_used: int) -> list[int]:
        return [min(self.n_rows, n_used - start) for start in range(0, n_used, self.n_rows)]


def split_into_chunks(array: np.ndarray) -> ChunkedArray:
    """A contiguous array, flattened, as chunks of unknown hash."""
    flat = array.reshape(-1)
    return ChunkHashes(len(flat), flat.itemsize).chunked(flat.dtype, (), len(flat), flat.__getitem__)


def iter_chunks(saved: np.ndarray | ChunkedArray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (rows, values) for each chunk of a saved array; a NumPy array is one chunk."""
    start = 0
    for chunk in map(saved.read, range(len(saved.counts))) if isinstance(saved, ChunkedArray) else [saved]:
        yield slice(start, start + len(chunk)), chunk
        start += len(chunk)


Arrays = dict[str, np.ndarray | ChunkedArray]
_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
STORED = frozenset(("bool", *_INTEGERS, "float16", "float32", "float64", "complex64"))
_ARRAYS = frozenset((*STORED, "complex128"))
_TENSORS = {name: getattr(torch, name) for name in (*_ARRAYS, "bfloat16", "float8_e4m3fn", "float8_e5m2")}
_LONG = 1000  # elements from which a list of numbers is stored as an array
_OBJECT_BYTES = 40  # of a number in a list


class DecodeError(Exception):
    """A JSON tree that `encode` cannot have written, or that does not match its arrays."""


def encode(value: Any, arrays: Arrays, path: str = "state") -> Any:
    """Encode `value` as JSON; add its arrays to `arrays` under their path. Raises TypeError for an unsupported type."""
    match value:
        case None | bool() | str():
            return value
        case torch.Tensor():
            return _encode_tensor(value, arrays, path)
        case np.ndarray() | np.generic():
            return _encode_array(value, arrays, path)
        case ChunkedArray():
            return {"chunked": _store(value, arrays, path)}
        case int():
            return int(value) if abs(value) < 2**53 else {"int": str(int(value))}
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case dict():
            return _encode_dict(value, arrays, path)
        case list() if dtype := _number_type(value):
            return {"numbers": _store(np.array(value, dtype), arrays, path), "dtype": dtype, "shape": [len(value)]}
        case list():
            return [encode(item, arrays, f"{path}.{index}") for index, item in enumerate(value)]
        case tuple() if type(value) in (tuple, torch.Size):
            return {"tuple": [encode(item, arrays, f"{path}.{index}") for index, item in enumerate(value)]}
        case _:
            raise StateError(
                f"{path} is a {type(value).__name__}, which a snapshot cannot hold; make it arrays and plain values"
            )


def _number_type(values: list[Any]) -> str:
    """The dtype in which a long list of numbers is stored, or "": such as the prices that an environment replays."""
    if len(values) < _LONG:
        return ""
    types = set(map(type, values))
    if types == {int}:
        return "int64" if min(values) >= -(2**63) and max(values) < 2**63 else ""
    return "float64" if types == {float} else ""


def _encode_dict(value: dict[Any, Any], arrays: Arrays, path: str) -> Any:
    if all(isinstance(key, str) for key in value):
        return {"dict": {str(key): encode(item, arrays, f"{path}.{key}") for key, item in value.items()}}
    for key in value:
        if not isinstance(key, (str, int, float, tuple)):
            raise StateError(f"{path} has the key {key!r}, which a snapshot cannot hold; use strings or numbers")
    return {
        "pairs": [[encode(key, arrays, path), encode(item, arrays, f"{path}.{key}")] for key, item in value.items()]
    }


def _encode_tensor(value: torch.Tensor, arrays: Arrays, path: str) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _TENSORS or value.layout != torch.strided:
        raise StateError(f"{path} is a tensor of {value.dtype}, {value.layout}, which a snapshot cannot hold")
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    stored = dense if dtype in STORED else _bytes(dense)
    name = _store(stored.numpy(), arrays, path)
    return {"tensor": name, "dtype": dtype, "shape": list(value.shape)}


def _bytes(dense: torch.Tensor) -> torch.Tensor:
    flat = dense.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)  # no view if empty


def _encode_array(value: np.ndarray | np.generic, arrays: Arrays, path: str) -> Any:
    array = np.asarray(value)
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
    if array.dtype.name not in _ARRAYS:
        raise StateError(f"{path} is an array of {array.dtype}, which a snapshot cannot hold; use numbers or bools")
    name = _store(array if array.dtype.name in STORED else array.reshape(-1).view(np.uint8), arrays, path)
    tag = "scalar" if isinstance(value, np.generic) else "array"
    return {tag: name, "dtype": array.dtype.name, "shape": list(array.shape)}


def _store(array: np.ndarray | ChunkedArray, arrays: Arrays, path: str) -> str:
    name, n = path, 0
    while name in arrays:  # {1: ..., "1": ...} have the same path
        n += 1
        name = f"{path}~{n}"
    arrays[name] = array
    return name


def largest_part(node: Any, path: str = "state") -> str:
    """The path of what most of an encoded tree is."""
    match node:
        case {"dict": dict() as items}:
            parts = items
        case (list() as items) | {"tuple": list() as items}:
            parts = {str(index): item for index, item in enumerate(items)}
        case _:
            return path
    sizes = {key: len(json.dumps(item)) for key, item in parts.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    if 2 * sizes.get(largest, 0) <= sum(sizes.values()):
        return path
    return largest_part(parts[largest], f"{path}.{largest}")


def decode(node: Any, arrays: Mapping[str, np.ndarray | ChunkedArray]) -> Any:
    """The inverse of `encode`, with tensors on the CPU. A ChunkedArray smaller than LARGE_BYTES comes back as an array.

    Raises DecodeError for an unknown tag or dtype, or an array of another shape; `arrays` does for an unknown name.
    """
    match node:
        case None | bool() | int() | float() | str():
            return node
        case list():
            return [decode(item, arrays) for item in node]
        case {"dict": dict() as items}:
            return {key: decode(item, arrays) for key, item in items.items()}
        case {"pairs": list() as pairs}:
            return _decode_pairs(pairs, arrays)
        case {"tuple": list() as items}:
            return tuple(decode(item, arrays) for item in items)
        case {"int": str() as digits}:
            return _number(int, digits)
        case {"float": str() as text}:
            return _number(float, text)
        case {"tensor": str() as name, "dtype": str() as dtype, "shape": list() as shape}:
            return _decode_tensor(_fetch(arrays, name, shape), dtype, shape)
        case {"array": str() as name, "dtype": str() as dtype, "shape": list() as shape}:
            return _decode_array(_fetch(arrays, name, shape), dtype, shape)
        case {"scalar": str() as name, "dtype": str() as dtype, "shape": []}:
            return _decode_array(_fetch(arrays, name, []), dtype, [])[()]
        case {"numbers": str() as name, "dtype": str() as dtype, "shape": [int()] as shape}:
            array = _decode_array(_fetch(arrays, name, shape), dtype, shape)
            check_memory(_OBJECT_BYTES * array.size)
            return array.tolist()
        case {"chunked": str() as name}:
            return arrays[name]
        case _:
            raise DecodeError(f"unknown entry {str(node)[:80]}")


def _number(kind: type[int] | type[float], text: str) -> int | float:
    try:
        return kind(text)
    except ValueError as error:
        raise DecodeError(str(error)) from None


def _decode_pairs(pairs: list[Any], arrays: Mapping[str, np.ndarray | ChunkedArray]) -> dict[Any, Any]:
    try:
        return {decode(key, arrays): decode(item, arrays) for key, item in pairs}
    except (TypeError, ValueError) as error:
        raise DecodeError(f"pairs are not keys and values: {error}") from None


def _fetch(arrays: Mapping[str, np.ndarray | ChunkedArray], name: str, shape: list[int]) -> np.ndarray:
    found = arrays[name]
    if isinstance(found, np.ndarray):
        return found
    flat = found.to_numpy()
    try:
        return flat.reshape(shape)
    except (ValueError, TypeError):
        return flat  # bytes of a dtype that is stored as uint8


def _decode_tensor(array: np.ndarray, dtype: str, shape: list[int]) -> torch.Tensor:
    if dtype not in _TENSORS:
        raise DecodeError(f"unknown dtype {dtype!r}")
    if dtype in STORED:
        return torch.from_numpy(_checked(array, dtype, shape))
    try:
        empty = torch.empty(0, dtype=_TENSORS[dtype])
        return (torch.from_numpy(array).view(_TENSORS[dtype]) if array.nbytes else empty).reshape(shape)
    except (RuntimeError, TypeError) as error:
        raise DecodeError(f"{dtype} of shape {shape} does not fit {array.nbytes} bytes: {error}") from None


def _decode_array(array: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    if dtype not in _ARRAYS:
        raise DecodeError(f"unknown dtype {dtype!r}")
    if dtype in STORED:
        return _checked(array, dtype, shape)
    try:
        return array.view(dtype).reshape(shape)
    except (ValueError, TypeError) as error:
        raise DecodeError(f"{dtype} of shape {shape} does not fit {array.nbytes} bytes: {error}") from None


def _checked(array: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    if array.dtype.name != dtype or list(array.shape) != shape:
        raise DecodeError(f"an array is {array.dtype.name}{list(array.shape)} instead of {dtype}{shape}")
    return array


def dump(directory: Path, name: str, state: Any, facts: Mapping[str, Any]) -> Path:
    """Write `state` and the JSON-able `facts` as <name>.safetensors and <name>.json; returns the first.

    Raises OSError on a disk error, for which safetensors' own writing of files raises an error of its own.
    """
    arrays: Arrays = {}
    tree = encode(state, arrays, name)
    path = directory / f"{name}.safetensors"
    whole = {name: each.to_numpy() if isinstance(each, ChunkedArray) else each for name, each in arrays.items()}
    with replacing(path) as new:
        write_file(new, save(whole))
    replace_file(path.with_suffix(".json"), json.dumps({**_plain(facts), "tree": tree}, indent=1) + "\n")
    return path


def _plain(value: Any) -> Any:
    """Replace NaN and Inf, which JSON cannot hold, by their text."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
