"""One child process: it executes commands, cannot outlive its parent, and is watched while it works.

Both start methods behave alike: the work is sent by cloudpickle (so lambdas and classes of a script are sent by value),
the child never imports the parent's main module, ignores Ctrl-C, and is killed when its parent dies.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np

from rlframe.core.errors import ConfigError, warn_once
from rlframe.system import worker_main as child_side
from rlframe.system.env_vars import variables_set
from rlframe.system.shared import Shared, WakeUp, share_zeros
from rlframe.system.signals import SIGNALS

SLICE_S = 0.2  # interval of checks while waiting for a child
_CLOSE_S = 2.0  # for a child to exit by itself
_STACK_S = 1.0  # for a hung child to write its stack trace
_starting = threading.Lock()  # a start briefly changes os.environ and the main module
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
START_METHODS = ("forkserver", "spawn")
_FREE, _BUSY, _FAILED, _CLOSED = "is free", "is busy", "has failed", "is closed"

_log = logging.getLogger("rlframe")


class ChildDied(Exception):
    """A child process died or was killed as hung; its work raised nothing."""


class ChildHung(ChildDied):
    """A child process was killed because it made no progress within its timeout; it may have been merely slow."""


class RemoteTraceback(Exception):
    """Cause of an exception sent by a child: the traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


class ChildProcess:
    """A child process as seen by its parent.

    Call `start_command`, then `wait`, and `check` whenever `wait` times out. The child's log is forwarded to ours. An
    exception of its work is raised here; its death raises `ChildDied`. Used by one thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[..., None],
        args: tuple[Any, ...],
        cpus: Sequence[int] = (),
        method: str = "forkserver",
        preload: Sequence[str] = (),
    ) -> None:
        """Start `work(parent, *args)` in a process. Raises ConfigError if the work cannot be pickled.

        Args:
            cpus: CPUs to pin it to; empty: not pinned.
            preload: modules that the fork server imports once, if this is its first child.
        """
        if method not in START_METHODS:
            raise ConfigError(f"start_method={method!r} is not one of {', '.join(START_METHODS)}")
        self.name = name
        payload = _pickled((work, args), name)
        context = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        line, self._line = context.Pipe(duplex=False)  # closes when we die; watched by the child
        self._shared = share_zeros(np.zeros(child_side.CONTROL_SIZE, np.int64), f"{name}-words")
        self._stack = share_zeros(np.zeros(child_side.STACK_BYTES, np.uint8), f"{name}-stack")
        self._control = self._shared.tree
        self._seen, self._idle_s = -1, 0.0  # last seen progress, and seconds since it changed
        self._lines = 0  # log lines received
        self._values: list[Any] = []  # sent by the child, not yet returned by `receive`
        self._state, self._n_begun = _FREE, 0  # unfinished commands
        self._go, self._done = WakeUp(), WakeUp()
        process = context.Process(  # type: ignore[attr-defined]
            target=child_side.main, args=(theirs, line, self._go, self._done, tuple(cpus)), name=name
        )
        with _starting, _start_environment(), contextlib.ExitStack() as on_error:
            for wake_up in (self._go, self._done):  # whose names the child removes, if it starts
                on_error.callback(wake_up.remove_name)
            multiprocessing.set_forkserver_preload(["rlframe.system.worker_main", *preload])
            process.start()
            assert process.pid
            self._process, self.pid = process, process.pid
            # Kill it at our exit if it was not closed; multiprocessing would wait for it.
            self._finalizer = multiprocessing.util.Finalize(self, process.kill, exitpriority=0)
            on_error.pop_all()
        theirs.close()
        line.close()
        with contextlib.suppress(ConnectionError):  # it died; `wait` or `receive` reports that
            self._shared.send(self._connection)
            self._stack.send(self._connection)
            environment = {**os.environ, **dict.fromkeys(_THREADS, "1")}  # the fork server still has that of its start
            self._connection.send_bytes(pickle.dumps((environment, payload)))

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def progress(self) -> int:
        """Progress of the current command as reported by the child; -1 at its start."""
        return int(self._control[child_side.PROGRESS])

    @property
    def n_events(self) -> int:
        """Number of events that the child reports as pending."""
        return int(self._control[child_side.N_EVENTS])

    @property
    def busy_s(self) -> float:
        return float(self._control[child_side.BUSY_NS]) / 1e9

    def send(self, value: Any) -> None:
        """Send a picklable value, which the child's work `receive`s."""
        payload = _pickled(value, self.name)
        with self._while_alive():
            self._connection.send_bytes(payload)

    def send_memory(self, shared: Shared) -> None:
        """Send shared memory, which the child's work receives in the same order."""
        with self._while_alive():
            shared.send(self._connection)

    def start_command(self, command: int, argument: int = 0) -> None:
        """Let the child execute a command. Raises RuntimeError if it is busy, has failed, or is closed."""
        if self._state is not _FREE:
            raise RuntimeError(
                f"{self.name} cannot start a command: it {self._state}; after an error or interruption, close it and "
                f"start a new process"
            )
        self._state, self._n_begun = _BUSY, 1
        self._command(command, argument)

    def queue_command(self, command: int) -> None:
        """Queue the same command again behind the current ones. Each is finished by one `wait` and has no result."""
        if self._state in (_FAILED, _CLOSED):
            raise RuntimeError(f"{self.name} cannot start a command: it {self._state}")
        self._state = _BUSY
        self._n_begun += 1
        self._control[child_side.COMMAND] = command
        self._go.post()

    def _command(self, command: int, argument: int = 0) -> None:
        self._control[child_side.PROGRESS] = self._seen = -1
        self._idle_s = 0.0
        self._control[child_side.COMMAND] = command
        self._control[child_side.ARGUMENT] = argument
        self._go.post()

    def wait(self, slice_s: float) -> bool:
        """Wait up to `slice_s` seconds for the oldest unfinished command; True if it is done."""
        if not self._done.wait(slice_s):
            return False
        self._idle_s = 0.0
        self._n_begun -= 1
        self._state = _BUSY if self._n_begun else _FREE
        return True

    def check(self, waited_s: float, timeout_s: float) -> bool:
        """Check a child whose command was not done after another `waited_s` seconds; True if it is done after all.

        Waits are added up instead of reading the clock, so that a suspended machine does not look like a hung child.

        Raises:
            ChildDied: it died.    ChildHung: it was killed after `timeout_s` seconds without progress.
            The exception of its work.
        """
        self._receive_pending()
        if not self.alive:
            if self.wait(0.0):  # it finished this command before it died
                return True
            raise ChildDied(self._exit_reason())
        self._check_timeout(waited_s, timeout_s)
        return False

    def _check_timeout(self, waited_s: float, timeout_s: float) -> None:
        self._idle_s = 0.0 if self.progress != self._seen else self._idle_s + waited_s
        self._seen = self.progress
        if self._idle_s >= timeout_s:
            stack = self._stack_text()
            self.kill()
            raise ChildHung(f"made no progress for {timeout_s:g} s and was killed; its stack was\n{stack}")

    def answer(self, timeout_s: float) -> Any:
        """The result of the finished command. Raises as `check`."""
        if self._control[child_side.ANSWERED]:
            return self.receive(timeout_s)
        if self._control[child_side.LINES] != self._lines:
            self._lines = int(self._control[child_side.LINES])
            self._receive_pending()
        return None

    def receive(self, timeout_s: float) -> Any:
        """The next value that the child's work sends. Raises as `check`."""
        self._idle_s = 0.0
        while not self._values:
            with self._while_alive():
                message = self._connection.recv_bytes() if self._connection.poll(SLICE_S) else b""
            if message:
                self._idle_s = 0.0
                self._handle_message(message)
            elif not self.alive and not self._connection.poll(0):  # a grandchild may hold the connection open
                raise ChildDied(self._exit_reason())
            else:
                self._check_timeout(SLICE_S, timeout_s)
        return self._values.pop(0)

    def _receive_pending(self) -> None:
        while True:
            try:
                if not self._connection.poll(0):
                    return
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            self._handle_message(message)

    def _handle_message(self, message: bytes) -> None:
        kind, value = cloudpickle.loads(message)
        if kind == child_side.VALUE:
            self._values.append(value)
        elif kind == child_side.LOG:
            level, text, once = value
            if once:
                warn_once(text)
            else:
                _log.log(level, f"{self.name}: {text}")
        else:
            self._raise(*value)

    def _raise(self, pickled: bytes, summary: str, text: str) -> None:
        try:
            error = pickle.loads(pickled)
        except Exception:  # its constructor may raise anything
            error = None
        if not isinstance(error, Exception):  # a KeyboardInterrupt in the child is none here
            error = RuntimeError(summary)
        self._state = _FAILED
        raise error from (RemoteTraceback(f"in {self.name} (process {self.pid})\n{text}") if text else None)

    @contextlib.contextmanager
    def _while_alive(self) -> Iterator[None]:
        """Turn a broken connection into its cause: the child's exception, or its death."""
        try:
            yield
        except (EOFError, ConnectionError):
            self._process.join(_CLOSE_S)
            self._receive_pending()
            raise ChildDied(self._exit_reason()) from None

    def _exit_reason(self) -> str:
        self._process.join(_CLOSE_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"ended with exit status {code}"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (by a user, or out of memory)"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # of real time
        return f"was killed by {name}, at\n{self._stack_text()}"

    def _stack_text(self) -> str:
        """Stack traces of the child's threads, written by its signal handlers, so also inside C code."""
        written = 0
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            deadline = time.monotonic() + _STACK_S
            while time.monotonic() < deadline and not (0 < written == np.count_nonzero(self._stack.tree)):
                written = int(np.count_nonzero(self._stack.tree))
                time.sleep(0.05)
        return bytes(self._stack.tree).rstrip(b"\0").decode(errors="replace").rstrip() or "(unknown)"

    def kill(self) -> None:
        """Kill it and its process group at once."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to exit; `close` waits for that."""
        if self._state is not _CLOSED and self.alive:
            self._command(child_side.STOP)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                line.shutdown(socket.SHUT_WR)  # if it is waiting for a value

    def close(self, grace_s: float = _CLOSE_S) -> None:
        """Wait `grace_s` seconds for it to exit, then kill it, and free its resources. May be called twice."""
        if self._state is _CLOSED:
            return
        self._process.join(grace_s)
        self.kill()
        self._process.join()
        self._finalizer.cancel()
        self._state = _CLOSED
        with contextlib.suppress(Exception):  # must not hide the exception that led here
            self._receive_pending()
        for connection in (self._connection, self._line):
            connection.close()
        self._shared.close()
        self._stack.close()
        self._go.remove_name()  # a child that ended before its start has not
        self._done.remove_name()


def close_all(children: Iterable[ChildProcess], grace_s: float) -> None:
    """Close child processes, all within `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    for child in children:
        child.close(max(0.0, deadline - time.monotonic()))


def _pickled(value: Any, name: str) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except ConfigError:  # of an object that the user gave
        raise
    except Exception as error:  # pickling runs user code, which may raise anything
        raise ConfigError(
            f"the work of {name} cannot be pickled: {type(error).__name__}: {error}; an environment or agent for "
            f"worker processes must not hold locks, open files or windows: create those in its constructor"
        ) from error


@contextlib.contextmanager
def _start_environment() -> Iterator[None]:
    """State of this process while a child, and with the first one the fork server, is started.

    One compute thread; an empty main module, since the real one may load torch or start a run; and blocked signals,
    which would kill the fork server, or the child before it ignores them.
    """
    main = sys.modules["__main__"]
    multiprocessing.resource_tracker.ensure_running()  # its start unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with variables_set(dict.fromkeys(_THREADS, "1")):
            sys.modules["__main__"] = types.ModuleType("__main__")
            yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last: a handler may raise now
