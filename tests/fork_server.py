"""`Popen` and `run_python` for `[sys.executable, ...]`, forked from a process that has imported torch and rlframe once.

A command that starts a Python of its own spends 2 s of a core on imports. One that is forked has its own arguments,
streams, directory, environment, session, signals, warnings and exit status all the same. Use `subprocess` where a test
needs a new interpreter: for claims about imports, and for variables that libraries read when they are loaded.

As a main program this module is the server; it ends when the process that started it does.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
_MESSAGE_BYTES = 1 << 20


class Popen(subprocess.Popen[str]):
    """`subprocess.Popen` whose process is a child of the server, which reports its exit status."""

    def _execute_child(self, args: list[Any], *options: Any) -> None:
        cwd, env, streams, new_session = options[4], options[5], options[9:15], options[20]
        assert args[0] == sys.executable
        request = {
            "args": [str(each) for each in args[1:]],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": new_session,
        }
        descriptors = [given if given != -1 else fd for fd, given in enumerate((streams[0], streams[3], streams[5]))]
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(_server(), [json.dumps(request).encode()], [theirs.fileno(), *descriptors])
        self.pid = self._receive()
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        return self._wait(0.0)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = self._receive()
            self._status.close()
        if self.returncode is None and timeout != 0.0:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _receive(self) -> int:
        message = self._status.recv(_MESSAGE_BYTES)
        assert message, "the server of forks has ended"
        return int(message)


def run_python(args: list[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its output, as `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
    """
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


@functools.cache
def _server() -> socket.socket:
    """The line to this process's server, which the first command starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.fork_server", str(theirs.fileno())],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(server.wait)
    atexit.register(ours.close)  # before that
    return ours


def _serve(line: socket.socket) -> dict[str, Any]:
    """Fork for every request; returns the request in the forked process, and exits here when the line is closed."""
    running: dict[int, socket.socket] = {}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready = select.select([line, woken], [], [])[0]
        if woken in ready:
            os.read(woken, _MESSAGE_BYTES)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with running.pop(ended[0]) as status:
                    status.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
        if line not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 4)
        if not message:
            sys.exit()
        status = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd, given in enumerate(descriptors[1:]):
                os.dup2(given, fd)
            for fd in (woken, wake, *descriptors[1:]):
                os.close(fd)
            for each in (line, status, *running.values()):
                each.close()
            return json.loads(message)
        running[pid] = status
        status.send(str(pid).encode())
        for fd in descriptors[1:]:
            os.close(fd)


def _become(args: list[str], cwd: str, env: dict[str, str], new_session: bool) -> None:
    """Do what `python ARGS` would."""
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if args[:2] == ["-W", "error"]:
        del args[:2]
    else:
        sys.warnoptions.clear()
        warnings.filters.remove(("error", None, Warning, None, 0))  # type: ignore[attr-defined]
        warnings.simplefilter("ignore", ImportWarning, append=True)  # which takes note of the removal
    inherited = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    first = {"-m": cwd, "-c": ""}.get(args[0], os.path.dirname(args[0]))
    sys.path[:] = [first, *inherited, *sys.path[1:]]
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(args[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")


def _exit(status: int) -> NoReturn:
    """End as the interpreter does, without taking torch apart, which takes 0.2 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    importlib.import_module("tests.preloaded")
    with socket.socket(fileno=int(sys.argv[1])) as line:
        request = _serve(line)
    try:
        _become(**request)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _exit(end.code or 0)
    _exit(0)
