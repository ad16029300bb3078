"""Memory that several processes map: trees of arrays without a name, gone with the last process that maps them."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import psutil

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree, map_tree

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
