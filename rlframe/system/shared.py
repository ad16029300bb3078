"""Memory shared between processes: trees of arrays, versioned parameters, and a wake-up semaphore."""

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import socket
import tempfile
import time
from _multiprocessing import SemLock, sem_unlink  # type: ignore[import-not-found]  # of the standard library
from dataclasses import dataclass
from math import prod
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Self

import cloudpickle
import numpy as np

from rlframe.core.errors import ConfigError
from rlframe.core.memory import available_memory
from rlframe.core.struct import Tree, as_numpy, map_tree, write

_ALIGNMENT = 64  # bytes: arrays do not share cache lines


@dataclass(frozen=True)
class _Place:
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def view(self, memory: mmap.mmap) -> np.ndarray:
        return np.frombuffer(memory, self.dtype, prod(self.shape), self.offset).reshape(self.shape)


class Shared:
    """A tree of NumPy arrays in memory that can be sent to other processes.

    The memory is anonymous: nothing is left behind when processes die, and a small /dev/shm (64 MB in many containers)
    does not limit it. `label` appears in /proc/<pid>/maps. Valid as long as the arrays are referenced.
    """

    def __init__(self, fd: int, layout: Tree, n_bytes: int) -> None:
        self.fd, self._layout, self.n_bytes = fd, layout, n_bytes
        memory = mmap.mmap(fd, n_bytes)
        self.tree: Tree = map_tree(lambda place: place.view(memory), layout)

    def send(self, connection: Connection) -> None:
        """Send the memory to the process at the other end, which calls `receive`."""
        connection.send_bytes(cloudpickle.dumps((self._layout, self.n_bytes)))
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            socket.send_fds(line, [b"f"], [self.fd])

    @classmethod
    def receive(cls, connection: Connection) -> Self:
        """Map memory that the process at the other end sends."""
        layout, n_bytes = cloudpickle.loads(connection.recv_bytes())
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            _, fds, _, _ = socket.recv_fds(line, 1, 1)
        return cls(fds[0], layout, n_bytes)

    def close(self) -> None:
        """Close the file descriptor; the arrays stay valid. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def share_zeros(example: Tree, label: str) -> Shared:
    """Shared zeros with the shapes and dtypes of `example`.

    Raises:
        ConfigError: there is too little free memory, or the system's limits allow less.
    """
    end = 0

    def place(array: Any) -> _Place:
        nonlocal end
        found = _Place(end, array.shape, array.dtype.str)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    layout = map_tree(place, example)
    n_bytes = max(end, mmap.PAGESIZE)
    available = available_memory()
    if n_bytes > available:
        raise ConfigError(
            f"{label} needs {n_bytes / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are free; "
            f"reduce sampler.batch_T or sampler.batch_B"
        )
    fd = os.memfd_create(f"rlframe-{label}") if hasattr(os, "memfd_create") else _file()
    try:
        os.ftruncate(fd, n_bytes)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise ConfigError(f"{label} needs {n_bytes:,} bytes of shared memory; raise ulimit -f") from error
        raise
    return Shared(fd, layout, n_bytes)  # owns fd, even if its constructor fails


def _file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_Parameters = dict[str, Any]  # {"version": [1] int64, "values": the tree}


def make_shared_parameters(values: Tree) -> Shared:
    """Shared parameters with the shapes, dtypes and values of `values`, version 2."""
    shared = share_zeros({"version": np.zeros(1, np.int64), "values": map_tree(as_numpy, values)}, "board")
    post_parameters(shared.tree, values)
    return shared


def post_parameters(shared: _Parameters, values: Tree) -> int:
    """Write new values, tensors on any device; returns their version."""
    version = shared["version"]
    version[0] |= 1  # odd: being written, or left so by an interrupted write
    write(shared["values"], values)
    version[0] += 1
    return int(version[0])


def read_parameters(shared: _Parameters, values: Tree, known: int) -> int:
    """Copy the parameters into `values` if their version differs from `known`; returns the version of `values`.

    Reads again if they were written meanwhile, so `values` are never a mixture of two versions.
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


_COUNTING = 1  # kind of a SemLock
_SEMAPHORES = "/dev/shm"  # where Linux has them
_TRIES = 10  # yields of the core before sleeping
_SLOW_YIELD_S = 1e-3  # a yield this long gave the core to a busy process
_REST = 1000  # waits without yields after a slow one


class WakeUp:
    """A semaphore that yields the core a few times before it sleeps. Can be passed to a child process at its start.

    On an idle core ten yields avoid the longer time of sleeping and waking (`python -m benchmarks.handover`). On a
    busy core each yield costs a time slice, so after a slow yield the next thousand waits sleep at once.

    The system knows it by a name, which is left behind if the process is killed. So the child removes the name as soon
    as it has opened the semaphore; a multiprocessing.Semaphore keeps it.
    """

    def __init__(self) -> None:
        """Raises ConfigError if /dev/shm is full, or cannot be written to."""
        self._name = f"/rlframe-{os.getpid()}-{secrets.token_hex(6)}"
        try:
            self._semaphore = SemLock(_COUNTING, 0, SemLock.SEM_VALUE_MAX, self._name, False)
        except OSError as error:
            raise _no_semaphore(error) from error
        resource_tracker.register(self._name, "semaphore")  # removes the name if we die before the child has
        self._resting = 0

    def __getstate__(self) -> str:
        return self._name

    def __setstate__(self, name: str) -> None:
        self._name, self._resting = name, 0
        self._semaphore = SemLock._rebuild(0, _COUNTING, SemLock.SEM_VALUE_MAX, name)

    def remove_name(self) -> None:
        """No other process can open it from now on. May be called twice, and by both processes."""
        with contextlib.suppress(FileNotFoundError):
            sem_unlink(self._name)
            resource_tracker.unregister(self._name, "semaphore")

    def post(self) -> None:
        """Wake one waiter, now or at its next wait. Earlier writes are visible to it."""
        self._semaphore.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for a `post`; False after timeout_s seconds (None: no timeout)."""
        acquire = self._semaphore.acquire
        if self._resting:
            self._resting -= 1
            return acquire(True, timeout_s)
        for _ in range(_TRIES):
            if acquire(False):
                return True
            start = perf_counter()
            os.sched_yield()
            if perf_counter() - start > _SLOW_YIELD_S:
                self._resting = _REST
                break
        return acquire(True, timeout_s)


def _no_semaphore(error: OSError) -> ConfigError:
    """What to do if the system gives no semaphore."""
    if error.errno == errno.ENOSPC and os.path.isdir(_SEMAPHORES):
        size = shutil.disk_usage(_SEMAPHORES)
        why = f"{_SEMAPHORES} is full ({size.free:,} of {size.total:,} bytes free)"
        remedy = "remove what other programs left there, or give the container more, as docker run --shm-size=1g does"
    else:
        why, remedy = f"{_SEMAPHORES}: {error.strerror}", "it must be mounted, and writable"
    return ConfigError(f"no process can be started, which needs a semaphore of 32 bytes: {why}; {remedy}")
