"""A child process: commands, log, exceptions, signals, and cleanup of everything it started."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from rlframe.core.errors import ConfigError
from rlframe.core.struct import leaves
from rlframe.system.process import ChildDied, ChildProcess
from rlframe.system.shared import make_shared_parameters, post_parameters, read_parameters, share_zeros
from rlframe.system.worker_main import ParentLink
from tests.processes import is_running, until
from tests.variants import variants

METHODS = ["forkserver", "spawn"]


@contextmanager
def child_for(work: Callable[..., None], *args: Any, method: str = "forkserver") -> Iterator[ChildProcess]:
    """A child that is gone in the end."""
    child = ChildProcess("the child", work, args, method=method)
    try:
        yield child
    finally:
        child.stop()
        child.close(5.0)
        until(lambda: not is_running(child.pid))


def answer(child: ChildProcess, command: int, argument: int = 0, timeout_s: float = 10.0) -> Any:
    """Carry out a command."""
    child.start_command(command, argument)
    while not child.wait(0.1):
        child.check(0.1, timeout_s)
    return child.answer(timeout_s)


def serve(parent: ParentLink) -> None:
    """0: the process id; 1: the argument, doubled, after many lines of log; 2: nothing; 3: nothing, after some log."""

    def handle(command: int, argument: int) -> Any:
        if command == 0:
            return os.getpid()
        if command == 1:
            for _ in range(100):
                logging.getLogger("rlframe").info("so %s", "x" * 10_000)
            return 2 * argument
        if command == 3:
            logging.getLogger("rlframe.envs").warning("it %s", "rains")
            logging.getLogger("elsewhere").info("%d is no number", "this")
            warnings.warn("take an umbrella", stacklevel=1)
        return None

    parent.serve(handle)


@pytest.mark.parametrize("method", variants(METHODS, ("forkserver",)))
def test_commands_are_answered_in_order(method: str) -> None:
    with child_for(serve, method=method) as child:
        assert answer(child, 0) == child.pid
        assert [answer(child, 1, n) for n in (1, 2)] == [2, 4]
        assert answer(child, 2) is None


def test_an_answer_that_comes_while_the_child_is_looked_at_is_kept() -> None:
    with child_for(serve) as child:
        child.start_command(0)
        until(lambda: child.busy_s)
        for _ in range(100):
            child.check(0.0, 10.0)
            time.sleep(0.001)
        assert child.wait(1.0)
        assert child.answer(1.0) == child.pid


def test_log_and_warnings_arrive_with_the_childs_name_as_soon_as_the_command_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with child_for(serve) as child:
        answer(child, 3)
        lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "the child: it rains"
    assert lines[1].startswith("the child: UserWarning: take an umbrella (")
    assert caplog.records[0].levelno == logging.WARNING


def test_a_busy_or_closed_child_cannot_start_a_command() -> None:
    with child_for(serve) as child:
        child.start_command(2)
        with pytest.raises(RuntimeError, match="the child cannot start a command: it is busy"):
            child.start_command(2)
        until(lambda: child.wait(0.1))
        child.stop()
        child.close()
        child.close()
        with pytest.raises(RuntimeError, match="the child cannot start a command: it is closed"):
            child.start_command(2)
        child.stop()


def test_an_unknown_start_method_is_an_error() -> None:
    with (
        pytest.raises(ConfigError, match="start_method='fork' is not one of forkserver, spawn"),
        child_for(serve, method="fork"),
    ):
        pass


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_whole_groups_do_not_disturb_a_child(signum: int) -> None:
    with child_for(serve) as child:
        answer(child, 0)
        os.kill(child.pid, signum)
        assert answer(child, 0) == child.pid


def start_programs(parent: ParentLink, ignores: bool) -> None:
    """Start a program and a fork, and let the first go when told to."""
    program = subprocess.Popen(["sleep", "1000"])
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        fork.start()
    parent.send((program.pid, fork.pid))
    parent.serve(lambda command, argument: None)
    if not ignores:
        program.terminate()
        fork.kill()
        program.wait()
        fork.join()
        Path(os.environ["GONE"]).touch()


@pytest.mark.parametrize("how", ["stop", "kill", "forget"])
def test_processes_started_by_a_child_end_with_it(how: str) -> None:
    with child_for(start_programs, True) as child:
        pids = child.receive(10.0)
        assert all(map(is_running, pids))
        if how == "stop":
            child.stop()
        if how == "kill":
            os.kill(child.pid, signal.SIGKILL)
        if how == "forget":
            child.close(0.0)
        child.close(0.3)
        until(lambda: not any(map(is_running, pids)))


def test_processes_started_by_a_child_receive_the_signals_that_the_child_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GONE", str(tmp_path / "gone"))
    with child_for(start_programs, False) as child:
        child.receive(10.0)
        child.stop()
        child.close(10.0)
    assert (tmp_path / "gone").exists(), "both ended when asked, so the child ended in order"


def idle(parent: ParentLink, ballast: np.ndarray) -> None:
    """Do nothing, with much in hand."""
    parent.serve(lambda command, argument: None)


def test_a_death_before_the_work_was_received_is_raised_by_receive() -> None:
    multiprocessing.resource_tracker.ensure_running()  # which is no newcomer then
    before = set(psutil.Process().children())

    def kill_the_newcomer() -> None:
        until(lambda: set(psutil.Process().children()) - before)
        for newcomer in set(psutil.Process().children()) - before:
            newcomer.kill()

    killer = threading.Thread(target=kill_the_newcomer)
    killer.start()
    with child_for(idle, np.zeros(10**6), method="spawn") as child, pytest.raises(ChildDied, match="killed by SIGKILL"):
        child.receive(30.0)
    killer.join()


def fork_and_die(parent: ParentLink) -> None:
    """Leave a fork that holds all lines open."""
    if os.fork() == 0:
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", METHODS)
def test_a_death_is_noticed_while_a_fork_of_the_child_lives(method: str) -> None:
    with child_for(fork_and_die, method=method) as child:
        start = time.monotonic()
        with pytest.raises(ChildDied, match="killed by SIGKILL"):
            child.receive(60.0)
        assert time.monotonic() - start < 30.0


def start_grandchild(parent: ParentLink) -> None:
    """Have a child of one's own."""
    child = ChildProcess("the grandchild", serve, ())
    parent.send(answer(child, 0))
    parent.serve(lambda command, argument: answer(child, 1, argument))


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.slow), "kill"])
def test_a_child_may_have_children_which_end_with_it(how: str) -> None:
    with child_for(start_grandchild) as child:
        pid = child.receive(20.0)
        assert answer(child, 1, 21) == 42
        if how == "stop":
            child.stop()
        else:
            os.kill(child.pid, signal.SIGKILL)
        until(lambda: not is_running(pid) and not is_running(child.pid))


def test_an_unreferenced_child_ends() -> None:
    child = ChildProcess("the child", serve, ())
    pid = child.pid
    answer(child, 0)
    del child
    gc.collect()
    until(lambda: not is_running(pid))


def test_starts_in_threads_leave_the_parents_environment_and_main_module_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main = sys.modules["__main__"]
    errors: list[BaseException] = []

    def start() -> None:
        try:
            for _ in range(2):
                with child_for(serve) as child:
                    assert answer(child, 0) == child.pid
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    assert sys.modules["__main__"] is main
    assert "OMP_NUM_THREADS" not in os.environ


def tell_environment(parent: ParentLink) -> None:
    """Send the environment variables."""
    parent.send(dict(os.environ))


@pytest.mark.parametrize("method", METHODS)
def test_a_child_has_the_environment_variables_of_its_start(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with child_for(serve):  # the server of forks, whose own variables these are not
        pass
    monkeypatch.setenv("ADDED", "1")
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with child_for(tell_environment, method=method) as child:
        found = child.receive(20.0)
    assert found == {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}


TREE = {"a": np.zeros((3, 5), np.float32), "b": (np.zeros(7, bool), np.zeros((), np.int64)), "c": np.zeros((0, 2))}


def double(parent: ParentLink) -> None:
    """Double what is in the memory."""
    tree = parent.receive_memory().tree

    def handle(command: int, argument: int) -> None:
        tree["a"] *= 2
        tree["b"][0][...] = ~tree["b"][0]
        tree["b"][1][...] *= 2

    parent.serve(handle)


def test_shared_memory_is_one_memory_for_both() -> None:
    shared = share_zeros(TREE, "numbers")
    tree = shared.tree
    assert [x.shape for x in leaves(tree)] == [x.shape for x in leaves(TREE)]
    assert [x.dtype for x in leaves(tree)] == [x.dtype for x in leaves(TREE)]
    assert all(x.ctypes.data % 64 == 0 for x in leaves(tree)), "no two arrays share a cache line"
    assert not any(x.any() for x in leaves(tree))
    with child_for(double) as child:
        child.send_memory(shared)
        shared.close()
        shared.close()
        assert shared.fd == -1
        tree["a"][...], tree["b"][1][...] = 21, 2**40
        answer(child, 0)
    assert (tree["a"] == 42).all()
    assert tree["b"][0].all()
    assert tree["b"][1] == 2**41


def test_too_little_free_memory_is_an_error_with_the_remedy() -> None:
    huge = np.broadcast_to(np.uint8(0), (10**15,))
    with pytest.raises(ConfigError, match=r"rows needs 1000000\.0 GB of memory and [\d.]+ GB are free; .*batch_B"):
        share_zeros(huge, "rows")


def test_memory_beyond_a_limit_of_the_shell_is_an_error_with_the_remedy() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"numbers needs 4,096 bytes of shared memory; raise ulimit -f"):
            share_zeros(TREE, "numbers")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_memory_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))  # one for the memory, none for its map
    try:
        with pytest.raises(OSError, match="Too many open files"):
            share_zeros(TREE, "numbers")
        gc.collect()  # a second attempt to close it would be an error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(free)


def post_all(parent: ParentLink) -> None:
    """Post 1, 2, ..., each to arrays that take a while to write."""
    posted = parent.receive_memory().tree
    for number in itertools.count(1):
        post_parameters(posted, {"a": np.full(3000, number), "b": np.full(3000, number)})


def test_parameters_are_never_read_half_written() -> None:
    shared = make_shared_parameters({"a": np.zeros(3000), "b": np.zeros(3000)})
    values = {"a": np.zeros(3000), "b": np.zeros(3000)}
    version, seen = -1, set()
    with child_for(post_all) as child:
        child.send_memory(shared)
        while len(seen) < 30:
            version = read_parameters(shared.tree, values, version)
            assert len(np.unique(np.concatenate([values["a"], values["b"]]))) == 1
            seen.add(float(values["a"][0]))
        child.kill()


def test_an_interrupted_write_of_parameters_is_repaired_by_the_next() -> None:
    shared = make_shared_parameters({"a": np.zeros(2)})
    shared.tree["version"][0] += 1  # as an exception within `post` would leave it
    values = {"a": np.zeros(2)}
    assert post_parameters(shared.tree, {"a": np.ones(2)}) % 2 == 0
    read_parameters(shared.tree, values, 2)
    np.testing.assert_array_equal(values["a"], 1)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"/dev/shm is full \([\d,]+ of [\d,]+ bytes free\); remove what .*--shm-size=1g"),
        (errno.EACCES, "/dev/shm: Permission denied; it must be mounted, and writable"),
    ],
)
def test_a_semaphore_that_the_system_refuses_is_an_error_with_the_remedy(
    code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Mock(side_effect=OSError(code, os.strerror(code)))
    monkeypatch.setattr("rlframe.system.shared.SemLock", Mock(side_effect=refusal, SEM_VALUE_MAX=1))
    with pytest.raises(ConfigError, match=message):
        ChildProcess("child", print, ())
