"""Main function of a child process and its link to the parent: commands, results, log messages and errors.

The parent's side is `system.process.ChildProcess`.
"""

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

from rlframe.core.errors import ONCE, ReadableError
from rlframe.system.affinity import pin
from rlframe.system.parent_death import die_with_writer
from rlframe.system.shared import Shared, WakeUp
from rlframe.system.signals import SIGNALS

COMMAND, ARGUMENT, PROGRESS, ANSWERED, BUSY_NS, N_EVENTS, LINES = range(7)  # shared control words
CONTROL_SIZE = 8
STOP = -1  # command: exit
STACK_BYTES = 16 * mmap.PAGESIZE  # for the stack traces of a hung child
VALUE, LOG, ERROR = range(3)  # kinds of messages to the parent

Handler = Callable[[int, int], Any]  # (command, argument) -> result or None


class ParentLink:
    """The child's connection to its parent process."""

    def __init__(self, connection: Connection, go: WakeUp, done: WakeUp) -> None:
        self._connection, self._go, self._done = connection, go, done
        self._lock = threading.Lock()  # log messages come from any thread
        self.control = self.receive_memory().tree

    def send(self, value: Any) -> None:
        self._message(VALUE, value)

    def receive(self) -> Any:
        """The next value that the parent sends."""
        with _exit_if_parent_gone():
            message = self._connection.recv_bytes()
        return cloudpickle.loads(message)

    def receive_memory(self) -> Shared:
        with _exit_if_parent_gone():
            return Shared.receive(self._connection)

    def _message(self, kind: int, value: Any) -> None:
        message = cloudpickle.dumps((kind, value))
        with self._lock, _exit_if_parent_gone():
            self._connection.send_bytes(message)

    def serve(self, handle: Handler) -> None:
        """Handle commands until STOP. A result is sent after the command counts as done."""
        words, go, done = self.control, self._go, self._done
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
        """Send an exception of the work to the parent, before this process exits."""
        foreign = error.__cause__ if isinstance(error, ReadableError) else error
        text = "".join(traceback.format_exception(foreign)) if foreign else ""
        summary = "".join(traceback.format_exception_only(error)).strip()
        error.__cause__ = error.__context__ = None
        try:
            pickled = cloudpickle.dumps(error.with_traceback(None))
        except Exception:  # user exceptions may hold anything
            pickled = b""
        self.control[ANSWERED] = True
        self._message(ERROR, (pickled, summary, text))
        self._done.post()

    def log(self, level: int, text: str, once: bool = False) -> None:
        self._message(LOG, (level, text, once))
        self.control[LINES] += 1

    def show_warning(
        self, message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        self.log(logging.WARNING, f"{category.__name__}: {message} ({filename}:{lineno})")


class _ParentLogHandler(logging.Handler):
    def __init__(self, parent: ParentLink) -> None:
        super().__init__(logging.INFO)
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._parent.log(record.levelno, self.format(record), ONCE in vars(record))
        except Exception:  # a message that fails to format must not stop the work
            self.handleError(record)


def main(connection: Connection, line: Connection, go: WakeUp, done: WakeUp, cpus: tuple[int, ...]) -> None:
    """Run the work that the parent sends over the connection, then exit."""
    go.remove_name()
    done.remove_name()
    _exit_with_parent(line)
    _ignore_group_signals()
    pin(cpus)
    parent = ParentLink(connection, go, done)
    stack = parent.receive_memory()
    faulthandler.enable(stack.fd)
    faulthandler.register(signal.SIGUSR1, file=stack.fd, all_threads=True)
    environment, payload = parent.receive()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    logging.getLogger().addHandler(_ParentLogHandler(parent))
    logging.getLogger("rlframe").setLevel(logging.INFO)
    warnings.showwarning = parent.show_warning
    try:
        work, args = cloudpickle.loads(payload)
        work(parent, *args)
    except SystemExit:
        raise
    except BaseException as error:
        parent.fail(error)
        sys.exit(1)


@contextlib.contextmanager
def _exit_if_parent_gone() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        sys.exit()  # normal exit: environments are closed


def _exit_with_parent(line: Connection) -> None:
    """Kill this process group when the parent dies: on Linux by the kernel, and everywhere by a thread."""
    os.setpgid(0, 0)
    die_with_writer(line.fileno())
    if line.poll():
        sys.exit()  # the parent has died already

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            line.recv_bytes()
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()


def _ignore_group_signals() -> None:
    """Ignore signals sent to the whole process group; the parent decides when this process stops.

    By a handler, because an ignored signal would stay ignored in programs started by the work.
    """
    pid = os.getpid()

    def ignore(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # in a fork made by the work
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    for signum in SIGNALS:
        signal.signal(signum, ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by the parent during the start
