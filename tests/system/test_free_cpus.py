"""FreeCpus against real load: that of others counts, that of this process and its children does not."""

import logging
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil
import pytest
import torch

from rlframe.runners.threads import AdaptiveThreads, threads_for
from rlframe.system.free_cpus import FreeCpus

BUSY = [sys.executable, "-S", "-c", "while True: pass"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The kernel's accounts, as the test says."""
    seen = {"clock": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(FreeCpus, "_times", lambda _: (seen["clock"], seen["busy"], seen["own"]))
    return seen


def test_what_others_use_is_not_free(fake: dict[str, float]) -> None:
    cpus = FreeCpus()
    for seconds, busy, own, free in ((2, 3, 3, cpus.n), (2, 3, 1, cpus.n - 1), (1, 9, 0, 0), (1, 0, 5, cpus.n)):
        fake["clock"] += seconds
        fake["busy"] += busy
        fake["own"] += own
        assert cpus.look() == pytest.approx(max(0, free))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_our_own_work_and_that_of_children_is_free_for_us() -> None:
    with ExitStack() as stack:
        child = stack.enter_context(subprocess.Popen(BUSY))
        stack.callback(child.kill)
        cpus, deadline = FreeCpus(), time.monotonic() + 60
        before, begin = cpus._own_s(), sum(psutil.Process(child.pid).cpu_times()[:2])
        while sum(psutil.Process(child.pid).cpu_times()[:2]) - begin < 0.4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        used = cpus._own_s() - before
        assert used > 0.35, "the child's"
        child.kill()
        child.wait()
        assert cpus._own_s() - before >= used - 0.02, "what a child has used stays ours"


def test_a_thread_for_each_free_cpu_and_at_least_one() -> None:
    assert [threads_for(free, 4) for free in (0.0, 0.9, 1.0, 1.7, 1.8, 3.9, 8.0)] == [1, 1, 1, 1, 2, 4, 4]


def test_the_number_of_threads_follows_after_two_looks_that_agree(
    fake: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FreeCpus, "n", 2)
    monkeypatch.setattr("rlframe.runners.threads._LOOK_S", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    caplog.set_level(logging.INFO, "rlframe")
    try:
        threads = AdaptiveThreads(2)
        followed = []
        for others in (0, 1, 0, 1, 1, 1, 0, 0):
            fake["clock"] += 1
            fake["busy"] += others + 1
            fake["own"] += 1
            threads()
            followed.append(torch.get_num_threads())
        assert followed == [2, 2, 2, 2, 1, 1, 1, 2]
        assert [record.getMessage()[:13] for record in caplog.records] == ["1 torch threa", "2 torch threa"]
    finally:
        torch.set_num_threads(before)
