"""Signals, deaths by them, OpenMP settings, garbage collection and malloc settings."""

import ctypes
import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import closing
from ctypes import c_size_t, c_void_p
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from rlframe.experiment.presets import competing_work
from rlframe.system.machine import gc_paused, limit_threads, retain_freed_memory, thread_variables
from rlframe.system.process import ChildDied, ChildProcess
from rlframe.system.signals import stop_request
from rlframe.system.worker_main import ParentLink


def test_previous_signal_handlers_are_restored_after_an_error():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="inside"), stop_request():
        raise ValueError("inside")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_nothing_is_installed():
    found = []

    def run() -> None:
        with stop_request() as stop:
            found.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=10)
    assert found == [False]


def test_openmp_settings_of_the_environment_are_kept(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_threads()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    limit_threads()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_openmp_threads_spin_longer_if_nothing_else_needs_the_cores(tmp_path):
    alone, processes, threads = (
        thread_variables(each).get("GOMP_SPINCOUNT") for each in ("nothing", "processes", "threads")
    )
    assert alone is None
    assert int(processes) > int(threads)
    one = {"sampler.batch_B": "1"}
    (tmp_path / "params.json").write_text('{"config": {"env": "ALE/Pong-v5"}}')
    for words in ({"env": "ALE/Pong-v5"}, {"experiment": "atari/ppo_pong"}, {"resume": str(tmp_path)}):
        assert competing_work(words) == "processes"
        assert competing_work({**words, "sampler": "serial"}) == "threads"
        assert competing_work({**words, "env_backend": "envpool"}) == "threads"
    for words in ({"experiment": "mujoco/td3_halfcheetah"}, {"env": "HalfCheetah-v5", **one}, {"algo": "dqn", **one}):
        assert competing_work(words) == "nothing"
    for words in ({"experiment": "atari/dqn_pong"}, {"env": "ALE/Pong-v5", **one}):
        assert competing_work(words) == "processes", "an update takes longer than the steps of the game"
    for words in ({}, {"env": "HalfCheetah-v5"}, {"resume": str(tmp_path / "none")}, {"experiment": "no/such"}):
        assert competing_work(words) == "processes"
    assert competing_work({"experiment": "async/sac_pendulum"}) == "processes", "the sampler's process"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_imports_are_excluded_from_garbage_collection_and_later_objects_are_not(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    gc.unfreeze()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen > 0
        monkeypatch.undo()
        with gc_paused():
            assert not gc.isenabled()
        assert gc.get_freeze_count() <= frozen, "what a compilation leaves is collected one day"
        gc.disable()
        with gc_paused():
            pass
        assert not gc.isenabled(), "who has turned it off keeps it so"
    finally:
        gc.enable()


def c_library() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [c_size_t], [c_void_p]
    libc.memset.argtypes = [c_void_p, ctypes.c_int, c_size_t]
    return libc


def test_freed_memory_is_kept_where_the_c_library_can():
    assert retain_freed_memory()
    libc, n_bytes, memory = c_library(), 64 << 20, psutil.Process().memory_info
    block = libc.malloc(n_bytes)
    libc.memset(block, 1, n_bytes)
    before = memory().rss
    libc.free(block)
    assert memory().rss > before - n_bytes // 2
    libc.malloc_trim(0)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no large pages")
def test_kept_memory_asks_for_large_pages():
    assert retain_freed_memory()
    libc, n_bytes = c_library(), 128 << 20
    block = libc.malloc(n_bytes)
    try:
        with Path("/proc/self/smaps").open() as smaps:
            assert "hg" in _flags(smaps, block + n_bytes // 2)
    finally:
        libc.free(block)


def _flags(smaps: Iterable[str], address: int) -> list[str]:
    """Of the memory there, as Linux tells them."""
    inside = False
    for line in smaps:
        name, _, rest = line.partition(" ")
        if "-" in name:
            low, high = (int(end, 16) for end in name.split("-"))
            inside = low <= address < high
        elif inside and name == "VmFlags:":
            return rest.split()
    raise AssertionError(f"no memory at {address:#x}")


def die_by_real_time_signal(parent: ParentLink) -> None:
    """By one that Python has no name for."""
    os.kill(os.getpid(), 40)


def test_a_death_by_a_signal_without_a_name_is_a_death() -> None:
    with (
        closing(ChildProcess("the child", die_by_real_time_signal, ())) as child,
        pytest.raises(ChildDied, match="was killed by signal 40, at"),
    ):
        child.receive(30.0)


def test_a_process_that_cannot_be_started_leaves_no_semaphore(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Mock(side_effect=OSError(errno.EAGAIN, "Resource temporarily unavailable"))
    monkeypatch.setattr("multiprocessing.context.SpawnProcess._Popen", refused)
    before = set(Path("/dev/shm").glob("sem.rlframe-*"))
    with pytest.raises(OSError, match="temporarily unavailable"):
        ChildProcess("the child", print, (), method="spawn")
    assert set(Path("/dev/shm").glob(f"sem.rlframe-{os.getpid()}-*")) <= before
