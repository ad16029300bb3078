"""A child process from within: its start, the commands it waits for, and its ways home."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from rlframe.core.errors import ReadableError
from rlframe.system.affinity import pin
from rlframe.system.handover import Signal
from rlframe.system.shared import Shared

COMMAND, ARGUMENT, PROGRESS, ANSWERED, BUSY_NS, NOTES = range(6)  # words that parent and child share
N_WORDS = 8
STOP = -1  # the command to end
STACK_BYTES = 16 * mmap.PAGESIZE  # for the stacks of a stuck child's threads
VALUE, LOG, ERROR = range(3)  # kinds of messages home
_PR_SET_PDEATHSIG = 1  # prctl.h of Linux

Handler = Callable[[int, int], Any]  # (command, argument) -> an answer, or None for none


class Parent:
    """The process that started this one, as its work sees it."""

    def __init__(self, connection: Connection, go: Signal, done: Signal) -> None:
        self._connection, self._go, self._done = connection, go, done
        self._lock = threading.Lock()  # the log may speak from any thread
        self.words = Shared.take(connection).tree

    def send(self, value: Any) -> None:
        """Send a value."""
        self._message(VALUE, value)

    def receive(self) -> Any:
        """The next value that the parent sends."""
        return cloudpickle.loads(self._connection.recv_bytes())

    def take(self) -> Shared:
        """The next memory that the parent hands over."""
        return Shared.take(self._connection)

    def _message(self, kind: int, value: Any) -> None:
        message = cloudpickle.dumps((kind, value))
        with self._lock:
            self._connection.send_bytes(message)

    def serve(self, handle: Handler) -> None:
        """Carry out commands until told to stop. An answer is sent after the command counts as done."""
        words, go, done = self.words, self._go, self._done
        while True:
            go.wait(None)
            start = time.perf_counter_ns()
            command = int(words[COMMAND])
            if command == STOP:
                return
            answer = handle(command, int(words[ARGUMENT]))
            words[ANSWERED] = answer is not None
            words[BUSY_NS] += time.perf_counter_ns() - start
            done.post()
            if answer is not None:
                self.send(answer)

    def fail(self, error: Exception) -> None:
        """Send home an error of the work, which ends this process."""
        foreign = error.__cause__ if isinstance(error, ReadableError) else error
        text = "".join(traceback.format_exception(foreign)) if foreign else ""
        try:
            pickle.loads(cloudpickle.dumps(error))
        except Exception:  # whatever its constructor demands
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.__cause__ = error.__context__ = None
        self.words[ANSWERED] = True
        self._message(ERROR, (error.with_traceback(None), text))
        self._done.post()

    def log(self, level: int, text: str) -> None:
        """Let the parent log a line."""
        self._message(LOG, (level, text))


class _LogHome(logging.Handler):
    """Every message of this process goes to the parent's log."""

    def __init__(self, parent: Parent) -> None:
        super().__init__(logging.INFO)
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        self._parent.log(record.levelno, self.format(record))


def main(connection: Connection, line: Connection, go: Signal, done: Signal, cpus: tuple[int, ...]) -> None:
    """The whole life of a child process; what to do comes over the connection."""
    _end_with_parent(line)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # sent to the whole group: the parent decides what becomes of it
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    pin(cpus)
    try:
        parent = Parent(connection, go, done)
        stack = Shared.take(connection)
        _write_stack_when_asked(stack)
        environment, payload = pickle.loads(connection.recv_bytes())
        os.environ.update(environment)
    except (EOFError, ConnectionError):
        return  # the parent has gone before we began
    logging.getLogger().addHandler(_LogHome(parent))
    logging.getLogger("rlframe").setLevel(logging.INFO)
    warnings.showwarning = _warning_to(parent)
    try:
        work, args = cloudpickle.loads(payload)
        work(parent, *args)
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        parent.fail(error)
        sys.exit(1)


def _end_with_parent(line: Connection) -> None:
    """Two ways: the kernel's, which works while the environment holds the interpreter, and a thread's, everywhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        try:
            line.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _write_stack_when_asked(stack: Shared) -> None:
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack.fd, all_threads=True)


def _warning_to(parent: Parent) -> Callable[..., None]:
    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        parent.log(logging.WARNING, f"{category.__name__}: {message} ({filename}:{lineno})")

    return show
