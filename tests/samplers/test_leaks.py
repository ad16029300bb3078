"""Restarts and long runs leak neither file descriptors nor memory, and closing frees everything."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.samplers.faulty import Small
from tests.samplers.supervised import SLOW, collected, restarts, sampler_for


class Held(NamedTuple):
    """Resources of this process."""

    n_fds: int
    n_maps: int  # of our shared memory
    rss_mb: float


def held() -> Held:
    """Measured after garbage collection."""
    gc.collect()
    process = psutil.Process()
    n_maps = Path("/proc/self/maps").read_text().count("/memfd:rlframe-")
    return Held(process.num_fds(), n_maps, process.memory_info().rss / 1e6)


def kill_all(sampler: Any) -> None:
    """Kill all workers between batches."""
    for worker in sampler.envs.workers:
        os.kill(worker.child.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "n_rounds"), [("gpu", 5), pytest.param("gpu", 20, marks=SLOW), pytest.param("cpu", 20, marks=SLOW)]
)
def test_restarts_cost_no_descriptors_and_no_memory(kind: str, n_rounds: int) -> None:
    with sampler_for(kind, Small, T=4, n_workers=1) as sampler:
        for _ in range(2):
            kill_all(sampler)
            collected(sampler, 1)
        before = held()
        for _ in range(n_rounds):
            kill_all(sampler)
            collected(sampler, 1)
        after = held()
        assert restarts(sampler) == 2 + n_rounds
    assert (after.n_fds, after.n_maps) == (before.n_fds, before.n_maps)
    assert after.rss_mb < before.rss_mb + 8.0


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_closing_frees_everything(kind: str) -> None:
    def sample() -> None:
        with sampler_for(kind, Small) as sampler:
            collected(sampler, 2)

    sample()  # starts the server of forks
    before = held()
    sample()
    after = held()
    assert (after.n_fds, after.n_maps) == (before.n_fds, before.n_maps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_million_steps_cost_no_memory(kind: str) -> None:
    with sampler_for(kind, Small, T=500) as sampler:
        processes = [psutil.Process(), *(psutil.Process(worker.child.pid) for worker in sampler.envs.workers)]  # type: ignore[attr-defined]

        def run(n_batches: int) -> list[float]:
            for _ in range(n_batches):
                sampler.collect()
                sampler.trajectories()
            gc.collect()
            return [process.memory_info().rss / 1e6 for process in processes]

        before = run(100)
        after = run(400)
    assert all(late < early + 3.0 for early, late in zip(before, after, strict=True)), (before, after)
