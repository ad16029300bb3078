"""One child process from start to end: it answers commands, cannot outlive its parent, and is watched while it works.

Both start methods behave alike: a child gets its work as a cloudpickle (so lambdas and classes of a script travel by
value), never imports the parent's main module, ignores Ctrl-C, and ends when its parent does, whatever it is doing.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np

from rlframe.core.errors import ConfigError
from rlframe.system import worker_main as child_side
from rlframe.system.shared import Shared, Signal, share

SLICE_S = 0.2  # between looks at whether a child that is waited for is alive
_CLOSE_S = 2.0  # for a child to end in order
_STACK_S = 1.0  # for a stuck child to write its stack
_starting = threading.Lock()  # a start changes the process's environment and main module for a moment
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
START_METHODS = ("forkserver", "spawn")
_FREE, _BUSY, _FAILED, _CLOSED = "is free", "is still at another", "has failed", "is closed"

_log = logging.getLogger("rlframe")


class ChildDied(Exception):
    """A child is gone, or was taken for hung and killed: the infrastructure's fault, not its work's."""


class ChildHung(ChildDied):
    """It gave no sign for so long that it was killed; it may have been merely slow."""


class RemoteTraceback(Exception):
    """The cause of an error that a child sent home: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


class Child:
    """One child process, as its parent sees it.

    `begin` hands over a command; then whoever waits calls `wait` and, while that is in vain, `check`. The child's log
    goes to ours. An exception of the work is raised here; a death is `ChildDied`. Owned by one thread.
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
        """Start `work(parent, *args)` in a process.

        Args:
            cpus: it is pinned to; none: not pinned.
            preload: modules that the first child's server of forks imports once for all.
        Raises:
            ConfigError: the work cannot be pickled, or `method` is unknown.
        """
        if method not in START_METHODS:
            raise ConfigError(f"start_method={method!r} is not one of {', '.join(START_METHODS)}")
        self.name = name
        payload = _pickled((work, args), name)
        context = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        line, self._line = context.Pipe(duplex=False)  # which the child reads to learn that we are gone
        self._go, self._done = Signal(context), Signal(context)
        self._shared = share(np.zeros(child_side.N_WORDS, np.int64), f"{name}-words")
        self._stack = share(np.zeros(child_side.STACK_BYTES, np.uint8), f"{name}-stack")
        self._words = self._shared.tree
        self._seen, self._idle_s = -1, 0.0  # its progress when last looked at, and for how long it has been that
        self._lines = 0  # of its log that have been taken home
        self._values: list[Any] = []  # that it sent and nobody has received
        self._state, self._n_begun = _FREE, 0  # commands that no `wait` has seen done
        process = context.Process(  # type: ignore[attr-defined]
            target=child_side.main, args=(theirs, line, self._go, self._done, tuple(cpus)), name=name
        )
        with _starting, _start_environment():
            multiprocessing.set_forkserver_preload(["rlframe.system.worker_main", *preload])
            process.start()
            assert process.pid
            self._process, self.pid = process, process.pid
            # At our exit, should nobody `close` before: multiprocessing would wait for it.
            self._last_resort = multiprocessing.util.Finalize(self, process.kill, exitpriority=0)
        theirs.close()
        line.close()
        with contextlib.suppress(ConnectionError):  # a death, which whoever waits for an answer will find
            self._shared.hand_over(self._connection)
            self._stack.hand_over(self._connection)
            self._connection.send_bytes(pickle.dumps((_environment(), payload)))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    @property
    def progress(self) -> int:
        """How far the child says it has come with its command; -1 at its beginning."""
        return int(self._words[child_side.PROGRESS])

    @property
    def n_notes(self) -> int:
        """How much the child says it has to tell."""
        return int(self._words[child_side.NOTES])

    @property
    def busy_s(self) -> float:
        """Seconds that the child has worked on commands since its start."""
        return float(self._words[child_side.BUSY_NS]) / 1e9

    def send(self, value: Any) -> None:
        """Hand over a value, which the child's work `receive`s: NumPy arrays, configs, functions."""
        payload = _pickled(value, self.name)
        with self._while_alive():
            self._connection.send_bytes(payload)

    def hand_over(self, shared: Shared) -> None:
        """Hand over memory, which the child's work takes in the same order."""
        with self._while_alive():
            shared.hand_over(self._connection)

    def begin(self, command: int, argument: int = 0) -> None:
        """Let the child carry out a command.

        Raises:
            RuntimeError: it is still at another command, has failed, or is closed.
        """
        if self._state is not _FREE:
            raise RuntimeError(
                f"{self.name} takes no command, it {self._state}; "
                f"after an error or an interruption, close it and start anew"
            )
        self._state, self._n_begun = _BUSY, 1
        self._command(command, argument)

    def begin_another(self, command: int) -> None:
        """Let the child carry out a command after those that it is still at, which are the same one.

        Each is done by a `wait` of its own; none has an answer. Progress goes on from where it is.

        Raises:
            RuntimeError: it has failed, or is closed.
        """
        if self._state in (_FAILED, _CLOSED):
            raise RuntimeError(f"{self.name} takes no command, it {self._state}")
        self._state = _BUSY
        self._n_begun += 1
        self._words[child_side.COMMAND] = command
        self._go.post()

    def _command(self, command: int, argument: int = 0) -> None:
        self._words[child_side.PROGRESS] = self._seen = -1
        self._idle_s = 0.0
        self._words[child_side.COMMAND] = command
        self._words[child_side.ARGUMENT] = argument
        self._go.post()

    def wait(self, slice_s: float) -> bool:
        """Whether the command that was begun, the first if there are several, is done within `slice_s`."""
        if not self._done.wait(slice_s):
            return False
        self._idle_s = 0.0
        self._n_begun -= 1
        self._state = _BUSY if self._n_begun else _FREE
        return True

    def check(self, waited_s: float, timeout_s: float) -> bool:
        """Look at a child that was not done for another `waited_s`; True if it is done after all.

        Slices are added up instead of reading a clock, so that a machine that slept does not look like a child that
        hangs.

        Args:
            timeout_s: without any progress, after which the child is taken for hung and killed.
        Raises:
            ChildDied: it died.    ChildHung: and was killed by us.    The work's own exception: it raised.
        """
        self._pump()
        if not self.alive:
            if self.wait(0.0):  # it finished this command before it died; the next one will tell
                return True
            raise ChildDied(self._epitaph())
        self._age(waited_s, timeout_s)
        return False

    def _age(self, waited_s: float, timeout_s: float) -> None:
        self._idle_s = 0.0 if self.progress != self._seen else self._idle_s + waited_s
        self._seen = self.progress
        if self._idle_s >= timeout_s:
            raise ChildHung(self._shoot(timeout_s))

    def answer(self, timeout_s: float) -> Any:
        """What the command that is done answers.

        Raises:
            As `check`.
        """
        if self._words[child_side.ANSWERED]:
            return self.receive(timeout_s)
        if self._words[child_side.LINES] != self._lines:
            self._lines = int(self._words[child_side.LINES])
            self._pump()
        return None

    def receive(self, timeout_s: float) -> Any:
        """The next value that the child's work sends.

        Raises:
            As `check`.
        """
        self._idle_s = 0.0
        while not self._values:
            with self._while_alive():
                message = self._connection.recv_bytes() if self._connection.poll(SLICE_S) else b""
            if message:
                self._idle_s = 0.0
                self._take(message)
            elif not self.alive and not self._connection.poll(0):  # what it has started may hold the line open
                raise ChildDied(self._epitaph())
            else:
                self._age(SLICE_S, timeout_s)
        return self._values.pop(0)

    def _pump(self) -> None:
        """Take home what the child has sent while its work goes on."""
        while True:
            try:
                if not self._connection.poll(0):
                    return
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            self._take(message)

    def _take(self, message: bytes) -> None:
        """Keep a value, log a line, raise an error."""
        kind, value = cloudpickle.loads(message)
        if kind == child_side.VALUE:
            self._values.append(value)
        elif kind == child_side.LOG:
            level, text = value
            _log.log(level, f"{self.name}: {text}")
        else:
            self._raise(*value)

    def _raise(self, pickled: bytes, summary: str, text: str) -> None:
        try:
            error = pickle.loads(pickled)
        except Exception:  # its constructor may demand anything
            error = None
        if not isinstance(error, Exception):  # a KeyboardInterrupt there is none here
            error = RuntimeError(summary)
        self._state = _FAILED
        raise error from (RemoteTraceback(f"in {self.name} (process {self.pid})\n{text}") if text else None)

    @contextlib.contextmanager
    def _while_alive(self) -> Iterator[None]:
        """Turn a broken line into what broke it: the child's error, if it sent one, or its death."""
        try:
            yield
        except (EOFError, ConnectionError, BrokenPipeError):
            self._process.join(_CLOSE_S)
            self._pump()
            raise ChildDied(self._epitaph()) from None

    def _epitaph(self) -> str:
        self._process.join(_CLOSE_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"ended with exit status {code}"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (by somebody, or for want of memory)"
        return f"was killed by {signal.Signals(-code).name}, at\n{self._stack_text()}"

    def _shoot(self, timeout_s: float) -> str:
        """Kill a child that hangs, and say where it stood."""
        stack = self._stack_text()
        self.kill()
        return f"gave no sign for {timeout_s:g} s and was killed; it stood at\n{stack}"

    def _stack_text(self) -> str:
        """What the child's threads do, or did when it crashed: from its signal handlers, so also within C."""
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
        """End it at once, whatever it does, and with it what it has started."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end in order; `close` waits for that."""
        if self._state is not _CLOSED and self.alive:
            self._command(child_side.STOP)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                line.shutdown(socket.SHUT_WR)  # to a child that waits for a value instead

    def close(self, grace_s: float = _CLOSE_S) -> None:
        """Wait `grace_s` for its end, then kill it; frees what it held. May be called twice."""
        if self._state is _CLOSED:
            return
        self._process.join(grace_s)
        self.kill()
        self._process.join()
        self._last_resort.cancel()
        self._state = _CLOSED
        with contextlib.suppress(Exception):  # what a child says while it is thrown away must not hide why
            self._pump()
        for connection in (self._connection, self._line):
            connection.close()
        self._shared.close()
        self._stack.close()
        del self._go, self._done  # whose names go with them


def _pickled(value: Any, name: str) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # pickling runs foreign code, which may raise anything
        raise ConfigError(
            f"{name} cannot be sent its work: {type(error).__name__}: {error}; an environment or agent for worker "
            f"processes must not hold locks, open files or windows: make those in its constructor, inside the worker"
        ) from error


def _environment() -> dict[str, str]:
    """Ours as it is now, but for one compute thread; a server of forks would still have that of its own start."""
    return {**os.environ, **dict.fromkeys(_THREADS, "1")}


@contextlib.contextmanager
def _start_environment() -> Iterator[None]:
    """How a child starts, and the server of forks with the first.

    With one compute thread, without an import of the parent's main module, which may load torch or start a run, and
    with the signals blocked that the server would die of and the child not yet know to leave to us.
    """
    threads = {name: os.environ.get(name) for name in _THREADS}
    main = sys.modules["__main__"]
    multiprocessing.resource_tracker.ensure_running()  # whose start unblocks signals
    os.environ.update(dict.fromkeys(threads, "1"))
    sys.modules["__main__"] = types.ModuleType("__main__")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, child_side.GROUP_SIGNALS)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in threads.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last, for now a handler may raise
