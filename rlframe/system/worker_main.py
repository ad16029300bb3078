"""A child process from within: its start, the commands it waits for, and its ways home."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import cloudpickle

from rlframe.core.errors import ReadableError
from rlframe.system.affinity import pin
from rlframe.system.parent_death import die_with_writer
from rlframe.system.shared import Shared, Signal

COMMAND, ARGUMENT, PROGRESS, ANSWERED, BUSY_NS, NOTES, LINES = range(7)  # words that parent and child share
N_WORDS = 8
STOP = -1  # the command to end
STACK_BYTES = 16 * mmap.PAGESIZE  # for the stacks of a stuck child's threads
VALUE, LOG, ERROR = range(3)  # kinds of messages home
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # sent to all processes of a terminal or a job

Handler = Callable[[int, int], Any]  # (command, argument) -> an answer, or None for none


class Parent:
    """The process that started this one, as its work sees it."""

    def __init__(self, connection: Connection, go: Signal, done: Signal) -> None:
        self._connection, self._go, self._done = connection, go, done
        self._lock = threading.Lock()  # the log may speak from any thread
        self.words = self.take().tree

    def send(self, value: Any) -> None:
        """Send a value."""
        self._message(VALUE, value)

    def receive(self) -> Any:
        """The next value that the parent sends."""
        with _ending_without_parent():
            message = self._connection.recv_bytes()
        return cloudpickle.loads(message)

    def take(self) -> Shared:
        """The next memory that the parent hands over."""
        with _ending_without_parent():
            return Shared.take(self._connection)

    def _message(self, kind: int, value: Any) -> None:
        message = cloudpickle.dumps((kind, value))
        with self._lock, _ending_without_parent():
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

    def fail(self, error: BaseException) -> None:
        """Send home an error of the work, which ends this process."""
        foreign = error.__cause__ if isinstance(error, ReadableError) else error
        text = "".join(traceback.format_exception(foreign)) if foreign else ""
        summary = "".join(traceback.format_exception_only(error)).strip()
        error.__cause__ = error.__context__ = None
        try:
            pickled = cloudpickle.dumps(error.with_traceback(None))
        except Exception:  # whatever it holds
            pickled = b""
        self.words[ANSWERED] = True
        self._message(ERROR, (pickled, summary, text))
        self._done.post()

    def log(self, level: int, text: str) -> None:
        """Let the parent log a line."""
        self._message(LOG, (level, text))
        self.words[LINES] += 1


class _LogHome(logging.Handler):
    """Every message of this process goes to the parent's log."""

    def __init__(self, parent: Parent) -> None:
        super().__init__(logging.INFO)
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._parent.log(record.levelno, self.format(record))
        except Exception:  # a line that does not format must not end an environment, here as little as elsewhere
            self.handleError(record)


def main(connection: Connection, line: Connection, go: Signal, done: Signal, cpus: tuple[int, ...]) -> None:
    """The whole life of a child process; what to do comes over the connection."""
    _end_with_parent(line)
    _leave_signals_to_parent()
    pin(cpus)
    parent = Parent(connection, go, done)
    stack = parent.take()
    _write_stack_to(stack.fd)
    environment, payload = parent.receive()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    logging.getLogger().addHandler(_LogHome(parent))
    logging.getLogger("rlframe").setLevel(logging.INFO)
    warnings.showwarning = _warning_to(parent)
    try:
        work, args = cloudpickle.loads(payload)
        work(parent, *args)
    except SystemExit:
        raise
    except BaseException as error:
        parent.fail(error)
        sys.exit(1)


@contextlib.contextmanager
def _ending_without_parent() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        sys.exit()  # in order: environments are closed


def _end_with_parent(line: Connection) -> None:
    """Make the end of the parent ours, and of all processes that the work will have started.

    Two ways: the kernel's, which also ends work that holds the interpreter, and a thread's, everywhere.
    """
    os.setpgid(0, 0)
    die_with_writer(line.fileno())
    if line.poll():
        sys.exit()  # it was gone before we knew

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            line.recv_bytes()
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _leave_signals_to_parent() -> None:
    """Do nothing on signals to whole groups of processes: the parent decides what becomes of them.

    By a handler of ours: what is ignored would stay ignored in the programs that the work starts.
    """
    pid = os.getpid()

    def leave(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # in a fork that the work has made
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    for signum in GROUP_SIGNALS:
        signal.signal(signum, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # which the parent had blocked for our start


def _write_stack_to(fd: int) -> None:
    """Let our threads' stacks be written when the parent asks, and when we crash."""
    faulthandler.enable(fd)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


def _warning_to(parent: Parent) -> Callable[..., None]:
    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        parent.log(logging.WARNING, f"{category.__name__}: {message} ({filename}:{lineno})")

    return show
