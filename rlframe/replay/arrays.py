"""The memory of replay: arrays that are rings of L time steps of B environments, in RAM, on disk or on a device."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.core.memory import available_memory
from rlframe.core.struct import Tree, as_numpy
from rlframe.core.types import Array
from rlframe.kernels.transfer import Gathered, to_device
from rlframe.record.codec import ChunkedArray, ChunkHashes, iter_chunks


class Ring:
    """Addresses. Row (time, b) has the unique index time * B + b and the slot index % (L * B).

    Rows before time `t` are complete. Row `t`, where the next batch starts, is stored too, except for its action.
    """

    def __init__(self, L: int, B: int) -> None:
        self.L, self.B, self.n_slots = L, B, L * B
        self.t = 0

    @property
    def oldest(self) -> int:
        """The time of the oldest row that is not overwritten."""
        return max(0, self.t + 1 - self.L)

    @property
    def n_used(self) -> int:
        """Number of time steps of the ring that have been written."""
        return min(self.t + 1, self.L)


def spans(time: int, n: int, L: int) -> list[tuple[slice, slice]]:
    """Where to write n time steps starting at `time`: one or two pairs of (slice of the ring, slice of the n)."""
    start = time % L
    fits = min(n, L - start)
    first = (slice(start, start + fits), slice(0, fits))
    return [first] if fits == n else [first, (slice(0, n - fits), slice(fits, n))]


def write_rows(grid: Array, time: int, values: Any) -> None:
    """Write values [n, ...] into a ring of len(grid) time steps, starting at `time`."""
    for places, part in spans(time, len(values), len(grid)):
        grid[places] = values[part]


def read_rows(grid: Array, time: int, n: int) -> Array:
    """n time steps [n, ...] starting at `time`; a view unless they wrap around the end of the ring."""
    parts = [grid[places] for places, _ in spans(time, n, len(grid))]
    return parts[0] if len(parts) == 1 else concatenate(*parts)


def concatenate(*arrays: Array, axis: int = 0) -> Array:
    """One array or tensor of several."""
    return torch.cat(arrays, axis) if isinstance(arrays[0], Tensor) else np.concatenate(arrays, axis)


class RowArray:
    """A ring of L time steps of B rows of one shape. The slot is time % L * B + b, or by_env: b * L + time % L.

    With by_env, consecutive rows are neighbours in memory, and stacks of frames are gathered faster.
    """

    def __init__(self, slots: Any, L: int, B: int, by_env: bool, memory: StorageMemory) -> None:
        """`slots`: array or tensor [L * B + extra, ...] of this memory."""
        self._slots, self._memory = slots, memory
        lead = (B, L) if by_env else (L, B)
        grid = slots[: L * B].reshape(*lead, *slots.shape[1:])  # a view
        self._grid = grid.swapaxes(0, 1) if by_env else grid
        self._digests = ChunkHashes(L, self._grid[:1].nbytes)

    def write(self, time: int, values: Array) -> None:
        """Write [n, B, ...], an array or a tensor of any device, starting at `time`."""
        values = self._memory.own(values)
        for places, part in spans(time, len(values), len(self._grid)):
            self._grid[places] = values[part]
            self._digests.invalidate(places)

    def take(self, at: Array) -> Tensor:
        """A copy [*slots, ...] of the slots `at`, an array of the memory's own, for a batch to be `delivered`."""
        return self._memory.rows(self._slots, at)

    def _read(self, rows: slice) -> np.ndarray:
        """Time steps as a contiguous array."""
        return np.ascontiguousarray(as_numpy(self._grid[rows]))

    def saved(self, n_used: int) -> ChunkedArray:
        """The first n_used time steps [n_used, B, ...] for a snapshot, valid until the next `write`."""
        example = self._read(slice(0))
        return self._digests.chunked(example.dtype, example.shape[1:], n_used, self._read)

    def load(self, saved: np.ndarray | ChunkedArray) -> None:
        """Restore what `saved` returned; small arrays come back from a snapshot as NumPy arrays."""
        for rows, values in iter_chunks(saved):
            self.write(rows.start, values)
        self._digests.load(saved)


class StorageMemory(ABC):
    """Allocates arrays, and moves what is read from them to the learner's device.

    Small ones (rewards, flags, returns) are plain arrays of its own kind: NumPy, or tensors on a device.
    """

    xp: Any = np  # the module with the functions of its own arrays
    on_device = False  # its own arrays are tensors, whose values nobody looks at

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gathered = None if device.type == "cpu" else Gathered(device)

    @abstractmethod
    def available(self) -> int:
        """Bytes available for arrays."""

    def array(self, L: int, B: int, shape: Sequence[int], dtype: Any, by_env: bool = False, extra: int = 0) -> RowArray:
        """A ring of zeros, with `extra` slots after it."""
        return RowArray(self._slots((L * B + extra, *shape), dtype), L, B, by_env, self)

    def _slots(self, shape: Sequence[int], dtype: Any) -> Array:
        """Zeros for a ring."""
        return self.zeros(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """A small array of its own."""
        return np.zeros(shape, dtype)

    def own(self, x: Array) -> Array:
        """An array or a tensor of any device as one of its own; a view if it is one."""
        return as_numpy(x)

    def rows(self, array: Array, at: Array) -> Tensor:
        """A copy [*at, ...] of the rows `at` of an array of its own, for a batch to be `delivered`."""
        gathered = self._gathered  # NumPy's take, which is faster than torch.index_select
        return torch.from_numpy(array.take(at, axis=0)) if gathered is None else gathered.take(array, at)

    def delivered(self, batch: Tree) -> Tree:
        """The batch on the learner's device, in one asynchronous copy of all that was taken since the last one."""
        return batch if self._gathered is None else self._gathered.delivered(batch)

    def send(self, array: np.ndarray) -> Tensor:
        """A new array as a tensor on the learner's device, copied asynchronously."""
        return to_device(torch.from_numpy(array), self.device)


class HostMemory(StorageMemory):
    """RAM; the operating system allocates it as it is written."""

    def available(self) -> int:
        return available_memory()


class DiskMemory(StorageMemory):
    """Unnamed files in `folder`, which disappear with the process however it ends."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        super().__init__(device)
        self.folder = folder

    def _slots(self, shape: Sequence[int], dtype: Any) -> Array:
        dtype, n = np.dtype(dtype), math.prod(shape)
        n_bytes = max(1, n * dtype.itemsize)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, n_bytes)  # a full disk raises here, not as SIGBUS on a write
            else:
                file.truncate(n_bytes)
            mapped = mmap.mmap(file.fileno(), n_bytes)
        return np.frombuffer(mapped, dtype, count=n).reshape(shape)

    def available(self) -> int:
        return shutil.disk_usage(self.folder).free


class DeviceMemory(StorageMemory):
    """The learner's device, usually a GPU; the CPU in tests. Only the indices of sampled rows are copied to it."""

    xp: Any = torch
    on_device = True

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        like = torch.from_numpy(np.zeros(0, dtype))
        return torch.zeros(tuple(shape), dtype=like.dtype, device=self.device)

    def own(self, x: Array) -> Array:
        return to_device(torch.as_tensor(x), self.device)

    def rows(self, array: Array, at: Array) -> Tensor:
        return array.index_select(0, at.reshape(-1)).view(*at.shape, *array.shape[1:])

    def available(self) -> int:
        if self.device.type != "cuda":
            return available_memory()
        return int(torch.cuda.mem_get_info(self.device)[0])
