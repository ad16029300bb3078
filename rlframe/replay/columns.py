"""Columns of a ring of L time steps of B environments: arrays in memory, on disk or on a device, and where rows lie."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from rlframe.kernels.transfer import sent
from rlframe.record.codec import Chunked, Digests, by_rows


class Ring:
    """Row (time, b) has the number time * B + b, for ever, and the slot number % (L * B), until it is overwritten.

    Rows before `t` are complete; row `t`, where the next batch starts, is written already, all but its action.
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
        """Time steps of the ring that hold something, from its beginning."""
        return min(self.t + 1, self.L)


def spans(time: int, n: int, L: int) -> list[tuple[slice, slice]]:
    """Where to write n time steps from `time` on: one or two pairs of (places in the ring, part of the n)."""
    start = time % L
    fits = min(n, L - start)
    first = (slice(start, start + fits), slice(0, fits))
    return [first] if fits == n else [first, (slice(0, n - fits), slice(fits, n))]


def write_rows(grid: np.ndarray, time: int, values: Any) -> None:
    """Write values [n, ...] from `time` on into a ring of len(grid) time steps."""
    for places, part in spans(time, len(values), len(grid)):
        grid[places] = values[part]


def read_rows(grid: np.ndarray, time: int, n: int) -> np.ndarray:
    """n time steps [n, ...] from `time` on; a view, unless they go round the end of the ring."""
    parts = [grid[places] for places, _ in spans(time, n, len(grid))]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Choices:
    """What a selector draws from: the numbers lo..hi-1 but those that are not eligible. Moves forward only."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.lo = self.hi = 0
        self.eligible = np.zeros(n_slots, np.bool_)  # by number % n_slots; False outside of lo..hi-1
        self.n = 0  # eligible ones
        self.newest = np.zeros(0, np.int64)  # numbers that became eligible with the last move

    def move(self, lo: int, hi: int, eligible: np.ndarray) -> np.ndarray:
        """Go on to lo..hi-1, which may be none; returns the slots that are no longer to be drawn.

        Args:
            eligible: [hi - max(lo, hi before)] bool, of the new numbers.
        """
        first, last = self.lo, min(lo, self.hi)
        for places, _ in spans(first, max(0, last - first), self.n_slots):
            self.n -= int(np.count_nonzero(self.eligible[places]))
            self.eligible[places] = False
        new = max(lo, self.hi)
        write_rows(self.eligible, new, eligible)
        self.newest = np.flatnonzero(eligible) + new
        self.n += len(self.newest)
        self.lo, self.hi = lo, hi
        return np.arange(first, last) % self.n_slots

    def among(self, numbers: np.ndarray) -> np.ndarray:
        """Which of `numbers` may be drawn: [n] bool."""
        return (numbers >= self.lo) & (numbers < self.hi) & self.eligible[numbers % self.n_slots]

    def state_dict(self) -> dict[str, Any]:
        """All of it; arrays are views."""
        return {"lo": self.lo, "hi": self.hi, "eligible": self.eligible, "newest": self.newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same size."""
        self.lo, self.hi, self.newest = state["lo"], state["hi"], np.array(state["newest"])
        self.eligible[...] = state["eligible"]
        self.n = int(np.count_nonzero(self.eligible))


class Column(ABC):
    """A ring of L time steps of B rows of one shape. Slot time % L * B + b, or by_env: b * L + time % L.

    By environment, rows that follow each other are neighbours: stacks of 84x84 are then gathered in a fifth less time.
    """

    @abstractmethod
    def write(self, time: int, values: np.ndarray) -> None:
        """Write [n, B, ...] from `time` on."""

    @abstractmethod
    def take(self, at: Any) -> Tensor:
        """A copy [*slots, ...] of the slots that `Memory.locate` located, on the learner's device."""

    @abstractmethod
    def held(self, n_used: int) -> Chunked:
        """The first n_used time steps [n_used, B, ...], valid until the next `write`."""

    @abstractmethod
    def load(self, saved: np.ndarray | Chunked) -> None:
        """Set the first time steps to what `held` gave; an array is from before there were pieces, or a small one."""


class Memory(ABC):
    """Where columns lie, and the device that what is taken from them comes to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def column(self, L: int, B: int, shape: Sequence[int], dtype: Any, by_env: bool = False, more: int = 0) -> Column:
        """Zeros, with `more` slots behind the ring."""

    @abstractmethod
    def locate(self, slots: np.ndarray) -> Any:
        """Slots in the form that columns take them in, for several columns at once."""

    @abstractmethod
    def available(self) -> int:
        """Bytes that columns may take."""

    def send(self, array: np.ndarray) -> Tensor:
        """A fresh array as a tensor on the learner's device, for which nobody waits."""
        return sent(torch.from_numpy(array), self.device)


class ArrayColumn(Column):
    """NumPy, in memory or mapped.

    256 rows of 17 float32 out of a million take 7 us by np.take and 16 us by torch.index_select; 160 frames of 84x84
    take 86 us and 105 us.
    """

    def __init__(self, slots: np.ndarray, L: int, B: int, by_env: bool, memory: Memory) -> None:
        """`slots` [L * B + more, ...]."""
        self._slots, self._memory = slots, memory
        lead = (B, L) if by_env else (L, B)
        grid = slots[: L * B].reshape(*lead, *slots.shape[1:])
        self._grid = grid.swapaxes(0, 1) if by_env else grid
        self._digests = Digests(L, self._grid[:1].nbytes)

    def write(self, time: int, values: np.ndarray) -> None:
        for places, part in spans(time, len(values), len(self._grid)):
            self._grid[places] = values[part]
            self._digests.forget(places)

    def take(self, at: Any) -> Tensor:
        return self._memory.send(self._slots.take(at, axis=0))

    def held(self, n_used: int) -> Chunked:
        grid = self._grid
        return self._digests.chunked(grid.dtype, grid.shape[1:], n_used, lambda rows: np.ascontiguousarray(grid[rows]))

    def load(self, saved: np.ndarray | Chunked) -> None:
        for rows, values in by_rows(saved):
            self._grid[rows] = values
        self._digests.take_over(saved)


class TensorColumn(Column):
    """On the learner's device, so that only the numbers of the rows drawn travel."""

    def __init__(self, slots: Tensor, L: int, B: int, by_env: bool) -> None:
        """`slots` [L * B + more, ...]."""
        self._slots = slots
        lead = (B, L) if by_env else (L, B)
        grid = slots[: L * B].view(*lead, *slots.shape[1:])
        self._grid = grid.transpose(0, 1) if by_env else grid
        self._digests = Digests(L, self._grid[:1].nbytes)

    def write(self, time: int, values: np.ndarray) -> None:
        tensor = torch.from_numpy(values)
        for places, part in spans(time, len(values), len(self._grid)):
            self._grid[places].copy_(sent(tensor[part], self._grid.device))
            self._digests.forget(places)

    def take(self, at: Any) -> Tensor:
        return self._slots.index_select(0, at.reshape(-1)).view(*at.shape, *self._slots.shape[1:])

    def held(self, n_used: int) -> Chunked:
        grid = self._grid
        dtype = grid[:0].cpu().numpy().dtype
        return self._digests.chunked(
            dtype, tuple(grid.shape[1:]), n_used, lambda rows: grid[rows].contiguous().cpu().numpy()
        )

    def load(self, saved: np.ndarray | Chunked) -> None:
        for rows, values in by_rows(saved):
            self._grid[rows].copy_(torch.from_numpy(values))
        self._digests.take_over(saved)


class HostMemory(Memory):
    """Ordinary memory; the operating system provides it as it is filled."""

    def column(self, L: int, B: int, shape: Sequence[int], dtype: Any, by_env: bool = False, more: int = 0) -> Column:
        return ArrayColumn(np.zeros((L * B + more, *shape), dtype), L, B, by_env, self)

    def locate(self, slots: np.ndarray) -> Any:
        return slots

    def available(self) -> int:
        return available_memory()


class DiskMemory(Memory):
    """Files in `folder` that have no name, so that nothing of them stays whatever ends the process."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        super().__init__(device)
        self.folder = folder

    def column(self, L: int, B: int, shape: Sequence[int], dtype: Any, by_env: bool = False, more: int = 0) -> Column:
        dtype, shape = np.dtype(dtype), (L * B + more, *shape)
        n_bytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, n_bytes)  # a full disk is told now, not by SIGBUS later
            else:
                file.truncate(n_bytes)
            mapped = mmap.mmap(file.fileno(), n_bytes)
        return ArrayColumn(np.frombuffer(mapped, dtype, count=int(np.prod(shape))).reshape(shape), L, B, by_env, self)

    def locate(self, slots: np.ndarray) -> Any:
        return slots

    def available(self) -> int:
        return shutil.disk_usage(self.folder).free


class DeviceMemory(Memory):
    """The learner's device, usually a GPU; on the CPU for tests."""

    def column(self, L: int, B: int, shape: Sequence[int], dtype: Any, by_env: bool = False, more: int = 0) -> Column:
        like = torch.from_numpy(np.zeros(0, dtype))
        return TensorColumn(torch.zeros((L * B + more, *shape), dtype=like.dtype, device=self.device), L, B, by_env)

    def locate(self, slots: np.ndarray) -> Any:
        return self.send(slots)

    def available(self) -> int:
        if self.device.type != "cuda":
            return available_memory()
        return int(torch.cuda.mem_get_info(self.device)[0])


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, and of the control groups it is in."""
    available = int(psutil.virtual_memory().available)
    for group in _control_groups():
        available = min(available, _left_in(group, available))
    return max(0, available)


def _control_groups() -> list[Path]:
    """The folders, from the process's own group to the root, of both versions of Linux's control groups."""
    root, own = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    groups = [root, root / "memory"]
    if own.is_file():
        for line in own.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                top = root if number == "0" else root / "memory"
                inner = top / path.lstrip("/")
                groups += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return list(dict.fromkeys(groups))


def _left_in(group: Path, otherwise: int) -> int:
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            bound = (group / limit).read_text(encoding="utf-8").strip()
            if bound == "max":
                return otherwise
            used = int((group / usage).read_text(encoding="utf-8"))
            counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError):
            continue
        return int(bound) - used + int(counts.get(cache, 0))  # cached files give way
    return otherwise
