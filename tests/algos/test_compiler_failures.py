"""A compiler that is missing, fails or hangs leaves a run as it is, with the remedy in its log."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.system.signals import asked_to_stop, stop_request
from rlframe.updates import compiled
from rlframe.updates.compiled import compiling
from tests.algos.test_compiled import COMPILE, PLAIN, both, warning_of_equal_runs
from tests.algos.test_cuda_graph import batches, learned, made
from tests.processes import DEADLINE_S


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("C++ compile error"), "C++ compile error; use compile=false, or another compiler by CXX"),
        (None, "the compiler has not ended after 0 s; use compile=false"),
    ],
)
def test_where_the_compiler_fails_or_hangs_the_run_goes_on(
    error: Exception | None, says: str, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    def fail(*_: Any) -> Any:
        if error:
            raise error
        time.sleep(1)

    monkeypatch.setattr(compiled, "_import_compiler", lambda: None)
    monkeypatch.setattr(compiled, "_compile", fail)
    monkeypatch.setattr(compiled, "_LONG_S", 0.1)
    monkeypatch.setattr(compiled, "_TIMEOUT_S", 0.2)
    one, other, data = both("pg", **PLAIN)
    line = warning_of_equal_runs(one, other, data[:3], warned)
    assert says in line


def test_a_compiler_that_hangs_is_ended_and_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def hang(*_: Any) -> None:
        started.append(subprocess.Popen(["sleep", "1000"]))
        started[0].wait()

    filters = list(warnings.filters)
    monkeypatch.setattr(compiled, "_import_compiler", lambda: None)
    monkeypatch.setattr(compiled, "_compile", hang)
    monkeypatch.setattr(compiled, "_LONG_S", 0.2)
    monkeypatch.setattr(compiled, "_TIMEOUT_S", 2.0)
    of_others = subprocess.Popen(["sleep", "1000"])
    try:
        with pytest.raises(compiled.CompilerFailed, match="has not ended"):
            compiled.compile_graph(None, [])
        assert started[0].wait(DEADLINE_S) < 0
        assert of_others.poll() is None
    finally:
        for process in (of_others, *started):
            process.kill()
            process.wait()
    assert gc.isenabled()
    assert warnings.filters == filters


def test_a_compiler_that_a_signal_stops_with_the_run_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C in a terminal, which ends g++ too
        raise RuntimeError("C++ compile error")

    chosen: list[Any] = []
    monkeypatch.setattr(compiled, "_import_compiler", lambda: None)
    monkeypatch.setattr(compiled, "_compile", stop)
    monkeypatch.setattr(compiled, "current_run", lambda: SimpleNamespace(record_choices=chosen.append))
    with compiling(COMPILE), stop_request():
        learned(made("pg", **PLAIN), batches("pg")[:1])
        assert asked_to_stop()
    assert not asked_to_stop()
    assert (warned(), chosen) == ([], []), "a resumed run would stay uncompiled"


def test_a_failure_names_what_is_to_be_done() -> None:
    full, other = RuntimeError("torch's own error"), RuntimeError("torch's own error")
    full.inner_exception = OSError(28, "No space left on device")  # type: ignore[attr-defined]  # as torch keeps it
    other.__cause__ = OSError(12, "Cannot allocate memory")
    assert compiled._remedy(full).startswith("[Errno 28] No space left on device; set TORCHINDUCTOR_CACHE_DIR")
    assert "use compile=false" in compiled._remedy(other)
    assert "if its cache may be damaged, remove" in compiled._remedy(AttributeError("no attribute 'call'"))


def test_a_cache_that_cannot_be_made_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    def refuse(name: str) -> None:
        raise PermissionError(13, "Permission denied", "/nowhere")

    monkeypatch.setattr(compiled, "importlib", SimpleNamespace(import_module=refuse))
    with compiling(COMPILE):
        learned(made("sac"), batches("sac")[:1])
    assert warned() == [
        "updates run uncompiled: [Errno 13] Permission denied: '/nowhere'; set TORCHINDUCTOR_CACHE_DIR to a directory "
        "that can be written and has room"
    ]
