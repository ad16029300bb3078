"""FreeCpus against real load: that of others counts, that of this process and its children does not."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_the_work_of_low_priority_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It delays operations of several threads as any other."""
    cpus = FreeCpus()
    monkeypatch.setattr("rlframe.system.free_cpus._STAT", tmp_path / "stat")
    ticks = {"user": 100, "nice": 200, "system": 300, "idle": 4000, "iowait": 5000, "irq": 10, "softirq": 20}
    cells = " ".join(map(str, ticks.values()))
    (tmp_path / "stat").write_text(f"cpu  9 9 9 9 9 9 9\ncpu{cpus._cpus[0]} {cells}\n")
    assert cpus._busy_s() == pytest.approx((100 + 200 + 300 + 10 + 20) / os.sysconf("SC_CLK_TCK"))
