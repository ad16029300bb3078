"""Memory shared by processes: trees of arrays, an agent's parameters with a version, and a wake-up signal."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np
import psutil

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree, as_numpy, map_tree, write

_ALIGNMENT = 64  # bytes: a cache line, so that no two arrays share one


@dataclass(frozen=True)
class _Place:
    """Where an array lies in its segment."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def view(self, memory: mmap.mmap) -> np.ndarray:
        array = np.frombuffer(memory, self.dtype, prod(self.shape), self.offset)
        return array.reshape(self.shape)


class Shared:
    """A tree of NumPy arrays in memory that can be handed to other processes.

    The memory has no name, so nothing is left behind however its processes end, and a small /dev/shm (64 MB in many
    containers) does not bound it. `label` is what /proc/<pid>/maps shows. Valid while the arrays are referred to.
    """

    def __init__(self, fd: int, layout: Tree, n_bytes: int) -> None:
        self._fd, self._layout, self.n_bytes = fd, layout, n_bytes
        memory = mmap.mmap(fd, n_bytes)
        self.tree: Tree = map_tree(lambda place: place.view(memory), layout)

    def hand_over(self, connection: Connection) -> None:
        """Let the process at the other end `take` it."""
        connection.send_bytes(cloudpickle.dumps((self._layout, self.n_bytes)))
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            socket.send_fds(line, [b"f"], [self._fd])

    @classmethod
    def take(cls, connection: Connection) -> Shared:
        """Map what the process at the other end hands over."""
        layout, n_bytes = cloudpickle.loads(connection.recv_bytes())
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            _, fds, _, _ = socket.recv_fds(line, 1, 1)
        return cls(fds[0], layout, n_bytes)

    @property
    def fd(self) -> int:
        """The file descriptor, to write to as a file; -1 after `close`."""
        return self._fd

    def close(self) -> None:
        """Hand it to nobody any more; the arrays stay valid. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def share(example: Tree, label: str) -> Shared:
    """Shared zeros with the shapes and dtypes of `example`.

    Raises:
        ConfigError: the machine has not that much memory free.
    """
    end = 0

    def place(array: Any) -> _Place:
        nonlocal end
        found = _Place(end, array.shape, array.dtype.str)
        end += -(-found.n_bytes // _ALIGNMENT) * _ALIGNMENT
        return found

    layout = map_tree(place, example)
    n_bytes = max(end, mmap.PAGESIZE)
    _check_room(n_bytes, label)
    fd = os.memfd_create(f"rlframe-{label}") if hasattr(os, "memfd_create") else _file()
    try:
        os.ftruncate(fd, n_bytes)
    except BaseException:
        os.close(fd)
        raise
    return Shared(fd, layout, n_bytes)  # which owns it, also if it fails


def _file() -> int:
    """Where the OS knows no anonymous memory: a file that is deleted already."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _check_room(n_bytes: int, label: str) -> None:
    available = psutil.virtual_memory().available
    if n_bytes > available:
        raise ConfigError(
            f"{label} needs {n_bytes / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are free; "
            f"make the batch smaller (sampler.batch_T, sampler.batch_B)"
        )


_Parameters = dict[str, Any]  # {"version": [1] int64, "values": the tree}


def make_shared_parameters(values: Tree) -> Shared:
    """A board for trees of the shapes and dtypes of `values`, with these posted on it."""
    shared = share({"version": np.zeros(1, np.int64), "values": map_tree(as_numpy, values)}, "board")
    post_parameters(shared.tree, values)
    return shared


def post_parameters(shared: _Parameters, values: Tree) -> int:
    """Replace what the board says; its new version. Values may be tensors of any device."""
    version = shared["version"]
    version[0] |= 1  # odd: being written, perhaps since a posting that was interrupted
    write(shared["values"], values)
    version[0] += 1
    return int(version[0])


def read_parameters(shared: _Parameters, values: Tree, known: int) -> int:
    """Copy the board into `values` if its version is another than `known`; the version that `values` now have.

    A reader that a posting overtakes reads again, so it never keeps half of one and half of another.
    """
    version = shared["version"]
    while int(version[0]) != known:
        before = int(version[0])
        if before % 2:
            time.sleep(1e-5)
            continue
        write(values, shared["values"])
        if int(version[0]) == before:
            known = before
    return known


_TRIES = 10  # with a yield of the core in between, before sleeping
_SLOW_YIELD_S = 1e-3  # a yield that takes as long has given the core to somebody who keeps it
_REST = 1000  # waits without tries after that


class Signal:
    """A semaphore whose waiter yields its core a few times before it sleeps; picklable into a child that is started.

    On an idle core ten yields take 6 us, and spare the 25 to 30 that sleeping and waking cost on a virtual machine:
    what a step of two workers takes beyond their work falls from 73 us to 15, and the CPU time burnt falls too. Where
    others compute on the core, each yield would cost a slice of their time: so after a slow one it sleeps at once, for
    the next thousand waits.
    """

    def __init__(self, context: BaseContext) -> None:
        self._semaphore: Any = context.Semaphore(0)
        self._resting = 0

    def post(self) -> None:
        """Let one wait end, now or later. What was written before is seen after it."""
        self._semaphore.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it was posted within the time (None: for ever)."""
        take = self._semaphore.acquire
        if self._resting:
            self._resting -= 1
            return take(True, timeout_s)
        for _ in range(_TRIES):
            if take(False):
                return True
            start = perf_counter()
            os.sched_yield()
            if perf_counter() - start > _SLOW_YIELD_S:
                self._resting = _REST
                break
        return take(True, timeout_s)
