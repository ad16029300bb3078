"""The state of one rank in a snapshot: a file of small arrays, and large ones in chunks named by their hash."""

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rlframe.core.files import SnapshotError, as_bytes, check_file, check_room, refused, sync, write_file
from rlframe.record.codec import STORED, Chunked, TreeError, check_memory, decode, encode, in_pieces

_STEP_NAME = re.compile(r"step_(\d{12,})(?:\.(\d+))?")


def list_snapshots(directory: Path) -> list[Path]:
    """The snapshots in a `snapshot` directory, oldest first. All are complete: nothing else is named so."""
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
    """The env_steps in the name of a snapshot directory."""
    match = _STEP_NAME.fullmatch(snapshot.name)
    if match is None:
        raise SnapshotError(f"{snapshot} is not named step_<env_steps>")
    return int(match[1])


def free_name(directory: Path, env_steps: int) -> Path:
    """A name for a snapshot; a second one of a step stands beside the first until somebody removes that."""
    name, n = f"step_{env_steps:012d}", 0
    while (directory / name).exists():
        n += 1
        name = f"step_{env_steps:012d}.{n}"
    return directory / name


MANIFEST = "manifest.json"
LARGE_BYTES = 2**20  # arrays of at least so many lie in pieces
_MAX_PIECE_BYTES = 2**30  # of one read: a single row may be large
_MAX_DIMENSIONS = 32
_WRITERS = 4  # threads: the disk flushes one piece while another is hashed
_DIGEST = re.compile(r"[0-9a-f]{64}")

Facts = dict[str, Any]  # what a manifest tells of a rank: bytes and sha256 of its file, its large arrays, its tree


def file_of(rank: int) -> str:
    """The name of a rank's file of arrays."""
    return f"rank_{rank}.safetensors" if rank else "arrays.safetensors"


def _folder_of(rank: int) -> str:
    return f"rank_{rank}" if rank else "chunks"


@dataclass(frozen=True)
class Part:
    """The state of one rank, as it was written."""

    facts: Facts


def write_part(folder: Path, rank: int, state: Any) -> Part:
    """Write a rank's state in `folder`, which is to become a snapshot, flushed to the disk.

    Raises:
        TypeError: the state holds what a snapshot cannot.    NotRecorded: the disk refuses, or has not enough room.
    """
    arrays: dict[str, np.ndarray | Chunked] = {}
    tree = encode(state, arrays)
    small, large = _by_size(arrays)
    data = save(small)
    what, n_bytes = f"the state of rank {rank}", len(data)
    try:
        pieces = _Pieces(folder, rank)
        if large:
            pieces.folder.mkdir()
        new = [(array, i) for array in large.values() for i in range(len(array.counts)) if not pieces.link(array, i)]
        n_bytes += sum(_bytes_of(array, i) for array, i in new)
        check_room(what, folder.parent, n_bytes)
        write_file(folder / file_of(rank), data)
        pieces.write(new)
        if large:
            sync(pieces.folder)
    except OSError as error:
        raise refused(what, folder.parent, error, n_bytes) from error
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return Part({**facts, "large": {name: _described(array) for name, array in large.items()}, "tree": tree})


def _by_size(arrays: Mapping[str, np.ndarray | Chunked]) -> tuple[dict[str, np.ndarray], dict[str, Chunked]]:
    small: dict[str, np.ndarray] = {}
    large: dict[str, Chunked] = {}
    for name, array in arrays.items():
        if array.nbytes < LARGE_BYTES:
            small[name] = array.whole() if isinstance(array, Chunked) else array
        else:
            large[name] = array if isinstance(array, Chunked) else in_pieces(array)
    return small, large


def _bytes_of(array: Chunked, i: int) -> int:
    return array.counts[i] * array.row_bytes


def _described(array: Chunked) -> Facts:
    pieces = [[array.digests[i], _bytes_of(array, i)] for i in range(len(array.counts))]
    return {"dtype": array.dtype.name, "shape": list(array.shape), "pieces": pieces}


class _Pieces:
    """A rank's pieces in the making, beside those of the snapshot before."""

    def __init__(self, snapshot: Path, rank: int) -> None:
        before = list_snapshots(snapshot.parent)
        self.folder = snapshot / _folder_of(rank)
        self._before = before[-1] / _folder_of(rank) if before else None

    def link(self, array: Chunked, i: int) -> bool:
        """Whether the piece stands here now, without having been read."""
        digest = array.digests[i]
        if not digest or self._before is None:
            return False
        try:
            if os.lstat(self._before / digest).st_size != _bytes_of(array, i):
                return False
            os.link(self._before / digest, self.folder / digest)
        except FileExistsError:  # two pieces hold the same
            return True
        except OSError:  # not there, or a file system without links: it is written, and tells if it cannot be
            return False
        return True

    def write(self, pieces: list[tuple[Chunked, int]]) -> None:
        """Hash, and link or write, several at once."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            futures = [pool.submit(self._write, array, i) for array, i in pieces]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _write(self, array: Chunked, i: int) -> None:
        data = as_bytes(array.read(i))
        digest = array.digests[i]
        array.digests[i] = hashlib.sha256(data).hexdigest()
        if array.digests[i] != digest and self.link(array, i):
            return
        try:
            write_file(self.folder / array.digests[i], data)
        except FileExistsError:  # two pieces hold the same
            return


def read_part(folder: Path, rank: int, facts: Facts, of: str = "") -> Any:
    """A rank's state, every file of it checked; large arrays that were Chunked stay in their files.

    Args:
        of: read what the state holds under this name alone.
    Raises:
        SnapshotError: a file is not what `facts` say, or they make no sense; names the file.
    """
    arrays = _StoredArrays(folder, rank, facts)
    try:
        tree = facts["tree"]
        return decode(tree["dict"][of] if of else tree, arrays)
    except (TreeError, RecursionError, MemoryError) as error:
        raise SnapshotError(f"{folder / MANIFEST} does not describe a state: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise SnapshotError(f"{folder / MANIFEST} does not describe a state" + f" with {of!r}" * bool(of)) from None


class _StoredArrays(Mapping[str, np.ndarray | Chunked]):
    """The arrays of a rank, read when asked for, checked before."""

    def __init__(self, folder: Path, rank: int, facts: Facts) -> None:
        self._pieces, self._large = folder / _folder_of(rank), facts["large"]
        file = folder / file_of(rank)
        check_file(file, facts["bytes"], facts["sha256"])
        self._name = file
        try:
            self._file = safe_open(file, framework="np")
            self._small = frozenset(self._file.keys())
        except (SafetensorError, ValueError, OSError) as error:
            raise SnapshotError(f"{file} is not a file of arrays: {error}", damaged=True) from None
        self._found: dict[str, np.ndarray | Chunked] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._small, *self._large])

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    def __contains__(self, name: object) -> bool:
        return name in self._large or name in self._small

    def __getitem__(self, name: str) -> np.ndarray | Chunked:
        if name not in self._found:
            self._found[name] = self._open(name) if name in self._large else self._get(name)
        return self._found[name]

    def _get(self, name: str) -> np.ndarray:
        try:
            check_memory(self._name.stat().st_size)  # of a file that is small, unless an old rlframe wrote it
            array: np.ndarray = self._file.get_tensor(name)
        except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise SnapshotError(f"{self._name} has an array that cannot be read: {error}") from None
        return array

    def _open(self, name: str) -> Chunked:
        """A large array, its pieces checked but not kept."""
        dtype, row, pieces = _checked(name, self._large[name], self._pieces)
        if self._pieces.is_symlink():
            raise SnapshotError(f"{self._pieces} is not a plain folder")
        for digest, n_bytes in dict.fromkeys(pieces):
            check_file(self._pieces / digest, n_bytes, digest)
        row_bytes = math.prod(row) * dtype.itemsize

        def read(i: int) -> np.ndarray:
            digest, n_bytes = pieces[i]
            try:
                found = np.fromfile(self._pieces / digest, np.uint8, n_bytes)
            except OSError as error:
                raise SnapshotError(
                    f"{self._pieces / digest} cannot be read any more: {error.strerror}", damaged=True
                ) from None
            if len(found) != n_bytes:
                raise SnapshotError(f"{self._pieces / digest} was cut off after it was checked", damaged=True)
            return found.view(dtype).reshape(-1, *row)

        counts = [n_bytes // row_bytes for _, n_bytes in pieces]
        return Chunked(dtype, row, counts, read, [digest for digest, _ in pieces])


def _checked(name: str, facts: Any, folder: Path) -> tuple[np.dtype, tuple[int, ...], list[tuple[str, int]]]:
    """What a manifest says of a large array: its type, the shape of a row, digest and bytes of each piece.

    Raises:
        SnapshotError: it makes no sense.
    """
    match facts:
        case {"dtype": str() as dtype, "shape": [int() as n, *row], "pieces": list() as pieces} if dtype in STORED:
            row_bytes = np.dtype(dtype).itemsize * math.prod(row) if _is_row(row) else 0
            found = [(digest, n_bytes) for digest, n_bytes in filter(_is_piece, pieces) if row_bytes > 0]
            whole = 0 < row_bytes <= _MAX_PIECE_BYTES and all(n_bytes % row_bytes == 0 for _, n_bytes in found)
            if len(found) == len(pieces) and whole and sum(n_bytes for _, n_bytes in found) == n * row_bytes:
                return np.dtype(dtype), tuple(row), found
    raise SnapshotError(f"{folder.parent / MANIFEST} does not say how the array {name!r} lies in {folder.name}")


def _is_row(row: list[Any]) -> bool:
    """Whether an array can have rows of this shape."""
    return len(row) < _MAX_DIMENSIONS and all(isinstance(x, int) and 0 < x <= _MAX_PIECE_BYTES for x in row)


def _is_piece(piece: Any) -> bool:
    match piece:
        case [str() as digest, int() as n_bytes]:
            return _DIGEST.fullmatch(digest) is not None and 0 <= n_bytes <= _MAX_PIECE_BYTES
        case _:
            return False
