"""The state of one rank within a snapshot: small arrays in one safetensors file, large ones in chunks named by hash.

Used by `record.snapshot`. A chunk that is unchanged since the previous snapshot is hard-linked, not written again.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from rlframe.core.errors import SnapshotError
from rlframe.core.files import check_file, check_free_space, disk_error, sync, write_file
from rlframe.record.codec import STORED, ChunkedArray, DecodeError, check_memory, decode, encode, split_into_chunks

_STEP_NAME = re.compile(r"step_(\d{12,})(?:\.(\d+))?")
MANIFEST = "manifest.json"
LARGE_BYTES = 2**20  # arrays of at least this size are stored in chunks
_MAX_CHUNK_BYTES = 2**30  # a single row may be large
_MAX_REPEATED = 2**28  # bytes of arrays beyond 8 times the different bytes
_MAX_DIMENSIONS = 32
_WRITERS = 4  # threads: hash one chunk while another is flushed
_DIGEST = re.compile(r"[0-9a-f]{64}")

RankEntry = dict[str, Any]  # see write_rank_state


def list_snapshots(directory: Path) -> list[Path]:
    """The snapshots in a `snapshot` directory, oldest first. A directory with such a name is always complete."""
    if not directory.is_dir():
        return []
    found = [
        (match, entry)
        for entry in directory.iterdir()
        if (match := _STEP_NAME.fullmatch(entry.name)) and entry.is_dir() and not entry.is_symlink()
    ]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)))
    return [entry for _, entry in found]


def env_steps_of(snapshot: Path) -> int:
    match = _STEP_NAME.fullmatch(snapshot.name)
    if match is None:
        raise SnapshotError(f"{snapshot} is not named step_<env_steps>")
    return int(match[1])


def unused_path(path: Path, separator: str) -> Path:
    """`path`, or if it exists, the first unused one with a number after `separator`."""
    found, n = path, 0
    while found.exists():
        n += 1
        found = path.with_name(f"{path.name}{separator}{n}")
    return found


def file_of(rank: int) -> str:
    return f"rank_{rank}.safetensors" if rank else "arrays.safetensors"


def _folder_of(rank: int) -> str:
    return f"rank_{rank}" if rank else "chunks"


def write_rank_state(folder: Path, rank: int, state: Any) -> RankEntry:
    """Write a rank's state into `folder`, which is to become a snapshot, and flush it to disk.

    Returns:
        The rank's entry in the manifest: bytes and sha256 of its file, large arrays, and the tree of the state.
    Raises:
        TypeError: the state holds an unsupported type.    RecordError: a disk error, or too little free space.
    """
    arrays: dict[str, np.ndarray | ChunkedArray] = {}
    tree = encode(state, arrays)
    small, large = _by_size(arrays)
    data = save(small)
    what, n_bytes = f"the state of rank {rank}", len(data)
    try:
        chunks = _ChunkWriter(folder, rank)
        if large:
            chunks.folder.mkdir()
        new = [(array, i) for array in large.values() for i in range(len(array.counts)) if not chunks.link(array, i)]
        n_bytes += sum(_bytes_of(array, i) for array, i in new)
        check_free_space(what, folder.parent, n_bytes)
        write_file(folder / file_of(rank), data)
        chunks.write(new)
        if large:
            sync(chunks.folder)
    except OSError as error:
        raise disk_error(what, folder.parent, error, n_bytes) from error
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {**entry, "large": {name: _described(array) for name, array in large.items()}, "tree": tree}


def _by_size(arrays: Mapping[str, np.ndarray | ChunkedArray]) -> tuple[dict[str, np.ndarray], dict[str, ChunkedArray]]:
    small: dict[str, np.ndarray] = {}
    large: dict[str, ChunkedArray] = {}
    for name, array in arrays.items():
        if array.nbytes < LARGE_BYTES:
            small[name] = array.to_numpy() if isinstance(array, ChunkedArray) else array
        else:
            large[name] = array if isinstance(array, ChunkedArray) else split_into_chunks(array)
    return small, large


def _bytes_of(array: ChunkedArray, i: int) -> int:
    return array.counts[i] * array.row_bytes


def _described(array: ChunkedArray) -> RankEntry:
    chunks = [[array.digests[i], _bytes_of(array, i)] for i in range(len(array.counts))]
    return {"dtype": array.dtype.name, "shape": list(array.shape), "chunks": chunks}


class _ChunkWriter:
    """Writes or links the chunks of a rank's large arrays."""

    def __init__(self, snapshot: Path, rank: int) -> None:
        before = list_snapshots(snapshot.parent)
        self.folder = snapshot / _folder_of(rank)
        self._before = before[-1] / _folder_of(rank) if before else None

    def link(self, array: ChunkedArray, i: int) -> bool:
        """Link a chunk of the previous snapshot by its known hash; False if it must be written."""
        digest = array.digests[i]
        if not digest or self._before is None:
            return False
        try:
            if os.lstat(self._before / digest).st_size != _bytes_of(array, i):
                return False
            os.link(self._before / digest, self.folder / digest)
        except FileExistsError:  # two chunks have the same content
            return True
        except OSError:  # missing, or a file system without hard links
            return False
        return True

    def write(self, chunks: list[tuple[ChunkedArray, int]]) -> None:
        with ThreadPoolExecutor(_WRITERS) as pool:
            futures = [pool.submit(self._write, array, i) for array, i in chunks]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _write(self, array: ChunkedArray, i: int) -> None:
        data = array.read(i).reshape(-1).view(np.uint8).data
        digest = array.digests[i]
        array.digests[i] = hashlib.sha256(data).hexdigest()
        if array.digests[i] != digest and self.link(array, i):
            return
        with suppress(FileExistsError):  # two chunks have the same content
            write_file(self.folder / array.digests[i], data)


def read_rank_state(folder: Path, rank: int, entry: RankEntry, key: str = "", without: str = "") -> Any:
    """Read and check a rank's state, or only its entry `key`, `without` one in that. Large arrays stay in their files.

    Where the state has key/x and key/y, as of several policies, the entry is {x, y}.

    Raises SnapshotError if a file differs from its manifest entry, or the entry is invalid.
    """
    try:
        arrays, tree = _StoredArrays(folder, rank, entry), entry["tree"]
        entries = tree["dict"] if key else {}
        several = {name.removeprefix(f"{key}/"): node for name, node in entries.items() if name.startswith(f"{key}/")}
        node = {"dict": several} if several else entries[key] if key else tree
        if without and isinstance(node, dict) and isinstance(node.get("dict"), dict):
            node = {**node, "dict": {name: each for name, each in node["dict"].items() if name != without}}
        return decode(node, arrays)
    except (DecodeError, RecursionError, MemoryError) as error:
        raise SnapshotError(f"{folder / MANIFEST} does not describe a state: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise SnapshotError(f"{folder / MANIFEST} does not describe a state" + f" with {key!r}" * bool(key)) from None


class _StoredArrays(dict[str, np.ndarray | ChunkedArray]):
    """The arrays of a rank: small ones are loaded at once, large ones opened and checked when they are taken.

    A state has each array once, so each can be taken once: a tree that repeats one would multiply its memory.
    """

    def __init__(self, folder: Path, rank: int, entry: RankEntry) -> None:
        self._folder, self._large = folder / _folder_of(rank), entry["large"]
        chunks = [chunk for each in self._large.values() for chunk in filter(_is_chunk, each["chunks"])]
        self._stored = sum(dict(map(tuple, chunks)).values())  # bytes of different chunks
        self._listed = 0  # bytes of the arrays that were read whole
        file = folder / file_of(rank)
        check_file(file, entry["bytes"], entry["sha256"])
        check_memory(entry["bytes"])
        try:
            super().__init__(load_file(file))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise SnapshotError(f"{file} is not a file of arrays: {error}", damaged=True) from None

    def __getitem__(self, name: str) -> np.ndarray | ChunkedArray:
        if name in self:
            return self.pop(name)
        if name not in self._large:
            raise DecodeError(f"array {name!r} is missing, or named twice")
        return self._open(name, self._large.pop(name))

    def _open(self, name: str, entry: Any) -> ChunkedArray:
        """A large array. Its chunks are checked but not kept in memory."""
        dtype, row, chunks = _checked(name, entry, self._folder)
        if self._folder.is_symlink():
            raise SnapshotError(f"{self._folder} is not a regular folder")
        for digest, n_bytes in dict.fromkeys(chunks):
            check_file(self._folder / digest, n_bytes, digest)
        row_bytes = math.prod(row) * dtype.itemsize

        def read(i: int) -> np.ndarray:
            digest, n_bytes = chunks[i]
            try:
                found = np.fromfile(self._folder / digest, np.uint8, n_bytes)
            except OSError as error:
                raise SnapshotError(f"{self._folder / digest} cannot be read: {error.strerror}", damaged=True) from None
            if len(found) != n_bytes:
                raise SnapshotError(f"{self._folder / digest} was truncated after it was checked", damaged=True)
            return found.view(dtype).reshape(-1, *row)

        counts = [n_bytes // row_bytes for _, n_bytes in chunks]
        return _StoredArray(dtype, row, counts, read, [digest for digest, _ in chunks], self._check_repetition)

    def _check_repetition(self, n_bytes: int) -> None:
        """Raise SnapshotError if chunks are repeated far more often than those of an optimizer's zeros and targets."""
        self._listed += n_bytes
        if self._listed > 8 * self._stored + _MAX_REPEATED:
            raise SnapshotError(
                f"{self._folder.parent / MANIFEST} lists {self._listed:,} bytes of arrays, but its snapshot has "
                f"{self._stored:,} different ones"
            )


@dataclass(frozen=True, eq=False)
class _StoredArray(ChunkedArray):
    """An array of a snapshot. As a whole it must be checked first; its chunks may be those of a map in every row."""

    check: Callable[[int], None]  # of its bytes

    def to_numpy(self) -> np.ndarray:
        self.check(self.nbytes)
        return super().to_numpy()


def _checked(name: str, entry: Any, folder: Path) -> tuple[np.dtype, tuple[int, ...], list[tuple[str, int]]]:
    """dtype, row shape and chunks (digest, bytes) of a large array's manifest entry, or SnapshotError if invalid."""
    match entry:
        case {"dtype": str() as dtype, "shape": [int() as n, *row], "chunks": list() as chunks} if dtype in STORED:
            row_bytes = np.dtype(dtype).itemsize * math.prod(row) if _is_row(row) else 0
            found = [(digest, n_bytes) for digest, n_bytes in filter(_is_chunk, chunks) if row_bytes > 0]
            whole = 0 < row_bytes <= _MAX_CHUNK_BYTES and all(n_bytes % row_bytes == 0 for _, n_bytes in found)
            if len(found) == len(chunks) and whole and sum(n_bytes for _, n_bytes in found) == n * row_bytes:
                return np.dtype(dtype), tuple(row), found
    raise SnapshotError(f"{folder.parent / MANIFEST} has an invalid entry for the large array {name!r}")


def _is_row(row: list[Any]) -> bool:
    return len(row) < _MAX_DIMENSIONS and all(isinstance(x, int) and 0 < x <= _MAX_CHUNK_BYTES for x in row)


def _is_chunk(chunk: Any) -> bool:
    match chunk:
        case [str() as digest, int() as n_bytes]:
            return _DIGEST.fullmatch(digest) is not None and 0 <= n_bytes <= _MAX_CHUNK_BYTES
        case _:
            return False
