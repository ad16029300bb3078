"""Worker processes are killed at any point: the run continues, and no row mixes two processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlframe.envs.base import EnvError
from rlframe.samplers import GpuSampler
from rlframe.system.service import WorkersFailed
from tests.processes import until
from tests.samplers import faulty
from tests.samplers.batch_history import BatchHistory, assert_states_match_rows, column, without_diagnostics
from tests.samplers.faulty import Fault
from tests.samplers.made import assert_equal
from tests.samplers.supervised import FAULTY_SEED, KINDS, SLOW, agent_of, collected, restarts, sampler_for, warnings_of

LSTM = {"memory": "lstm", "memory_size": 4, "feed_back": True}
CASES = [("cpu", 8), ("gpu", 1), ("alternating", 8)]  # kind, T


def kill(sampler: Any, worker: int = 1) -> None:
    """Kill one of a sampler's workers."""
    os.kill(sampler.envs.workers[worker].child.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, int], Any]:
    """Batches of samplers whose workers do not die."""
    made = {}
    for kind, T in CASES:
        with sampler_for(kind, T=T, model=LSTM) as sampler:
            made[kind, T] = collected(sampler, 32 // T)
            BatchHistory(made[kind, T])
    return made


@pytest.mark.parametrize(("kind", "T"), CASES)
def test_a_death_in_a_step_cuts_the_episodes_of_that_worker_and_no_other(
    kind: str, T: int, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"faults": (Fault(faulty.kill, at=13, seed=FAULTY_SEED),)}
    with sampler_for(kind, kwargs=kwargs, T=T, model=LSTM) as sampler:
        batches = collected(sampler, 32 // T)
        assert restarts(sampler) == 1
        history, trajectories = BatchHistory(batches), sampler.trajectories()
        assert_states_match_rows(agent_of(sampler, LSTM), batches)
    ((t, _), (same_t, _)) = history.interruptions
    assert history.interruptions == [(t, 2), (same_t, 3)]
    assert t == same_t
    assert without_diagnostics(trajectories) == history.ended
    assert_equal(column(batches, 0, 2), column(undisturbed[kind, T], 0, 2))
    whole = slice(0, t // T)
    assert_equal(column(batches[whole], 2, 4), column(undisturbed[kind, T][whole], 2, 4))
    (line,) = warnings_of(caplog)
    said = re.search(
        r"worker 1 \(process \d+, environments 2 to 3\) was killed by SIGKILL .*fresh seeds \[(\d+), (\d+)\]", line
    )
    assert said
    assert len({11, 12, 13, 14, int(said[1]), int(said[2])}) == 6


@pytest.mark.parametrize(("kind", "T"), CASES)
def test_a_death_between_batches_cuts_at_the_next_ones_first_row(kind: str, T: int, undisturbed: Any) -> None:
    n = 16 // T
    with sampler_for(kind, T=T, model=LSTM) as sampler:
        batches = collected(sampler, n)
        kill(sampler)
        batches += collected(sampler, n)
        history = BatchHistory(batches)
        assert without_diagnostics(sampler.trajectories()) == history.ended
        assert_states_match_rows(agent_of(sampler, LSTM), batches)
    assert history.interruptions == [(16, 2), (16, 3)]
    assert_equal(column(batches, 0, 2), column(undisturbed[kind, T], 0, 2))
    assert_equal(column(batches[:n], 2, 4), column(undisturbed[kind, T][:n], 2, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_in_a_reset_cuts_no_episode_of_that_environment(kind: str) -> None:
    with sampler_for(kind, kwargs={"faults": (Fault(faulty.kill, "reset", 3, FAULTY_SEED),)}) as sampler:
        history = BatchHistory(collected(sampler, 4))
        assert without_diagnostics(sampler.trajectories()) == history.ended
    (t, env), (_, other) = history.interruptions
    assert (env, other) == (2, 3)
    assert not history.valid[t, 2]
    assert (history.terminated | history.truncated)[t - 1, 2]


@pytest.mark.parametrize(
    ("when", "at", "times", "steps_before"),
    [("constructor", 1, 2, 0), ("reset", 1, 1, 3), ("step", 2, 1, 3)],
)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=SLOW)])
def test_a_worker_that_dies_at_start_is_replaced_before_the_first_row(
    kind: str, when: str, at: int, times: int, steps_before: int, tmp_path: Path
) -> None:
    faults = (Fault(faulty.kill, when, at, path=str(tmp_path / "faults"), times=times),)
    with sampler_for(kind, kwargs={"faults": faults}, steps_before=steps_before) as sampler:
        assert restarts(sampler) == times
        history = BatchHistory(collected(sampler, 2))
    assert history.first[0].all()
    assert not history.interruptions


@pytest.mark.parametrize(
    ("kind", "T"),
    [
        ("cpu", 1),
        pytest.param("alternating", 8, marks=SLOW),
        pytest.param("cpu", 8, marks=SLOW),
        pytest.param("gpu", 1, marks=SLOW),
    ],
)
def test_repeated_deaths_leave_every_row_valid(kind: str, T: int, tmp_path: Path) -> None:
    faults = (Fault(faulty.kill, at=7), Fault(faulty.kill, "reset", 2, path=str(tmp_path / "faults"), times=3))
    with sampler_for(kind, kwargs={"faults": faults}, T=T) as sampler:
        batches = collected(sampler, 24 // T)
        history = BatchHistory(batches)
        assert without_diagnostics(sampler.trajectories()) == history.ended
        n_restarts = restarts(sampler)
    assert n_restarts >= 4
    assert len(set.union(*history.seeds)) > 6, "seeds are always fresh"
    assert {env for _, env in history.interruptions} == {0, 1, 2, 3}


def test_a_death_before_noise_is_saved_costs_only_the_workers_episodes() -> None:
    with sampler_for("cpu") as sampler:
        batches = collected(sampler, 1)
        kill(sampler)
        noise = sampler.state_dict()["noise"]
        batches += collected(sampler, 1)
        kill(sampler, 0)
        sampler.load_state_dict({"noise": noise})
        (after,) = collected(sampler, 1)
        assert sampler.state_dict()["noise"] != noise
        assert restarts(sampler) == 2
        assert BatchHistory(batches).interruptions == [(8, 2), (8, 3)]
        assert after.start != 16, "a batch that does not continue the one before"
        assert after.inputs.first[0, 2:].all()
        assert after.valid[0].all()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_worker_that_dies_before_it_is_restored_goes_on_with_the_restored_episodes(kind: str) -> None:
    with sampler_for(kind) as one, sampler_for(kind) as other:
        collected(one, 1)
        state = one.state_dict()
        collected(other, 1)
        kill(other)
        assert not any(other.load_state_dict(state))
        assert_equal(collected(other, 1)[0], collected(one, 1)[0])


def test_a_death_before_diagnostics_are_read_costs_only_the_workers_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sampler_for("gpu") as sampler:
        assert isinstance(sampler, GpuSampler)
        (stepper,) = sampler.collector.steppers
        tell = stepper.pop_events

        def die_and_tell() -> Any:
            kill(sampler)
            until(lambda: not sampler.envs.workers[1].child.alive)
            return tell()

        with monkeypatch.context() as patch:
            patch.setattr(stepper, "pop_events", die_and_tell)
            batches = collected(sampler, 1)
        batches += collected(sampler, 1)
        assert BatchHistory(batches).interruptions == [(8, 2), (8, 3)]


@pytest.mark.parametrize("kind", [pytest.param("cpu", marks=SLOW), "gpu"])
def test_a_death_is_noticed_while_another_worker_is_slow(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Fault(faulty.be_slow, at=3, seed=11, path=str(tmp_path / "slow"))
    fault = Fault(faulty.kill, at=3, seed=FAULTY_SEED, path=str(tmp_path / "faults"))
    with sampler_for(kind, kwargs={"faults": (slow, fault)}, T=4) as sampler:
        sampler.collect()
    (record,) = [record for record in caplog.records if "killed by SIGKILL" in record.getMessage()]
    assert record.created < faulty.counted_at(slow.path) + faulty.SLOW_S


@pytest.mark.parametrize(
    ("kind", "what", "logged_as"),
    [
        ("gpu", faulty.abort, r"killed by SIGABRT, at\n[^$]*in abort\n"),
        ("cpu", faulty.crash, r"killed by SIGSEGV, at\n[^$]*in crash\n"),
        ("gpu", faulty.leave_at_once, "ended with exit status 3"),
    ],
)
def test_every_end_of_a_worker_process_counts_as_a_death(
    kind: str, what: Any, logged_as: str, caplog: pytest.LogCaptureFixture
) -> None:
    with sampler_for(kind, kwargs={"faults": (Fault(what, at=5, seed=FAULTY_SEED),)}) as sampler:
        assert len(BatchHistory(collected(sampler, 2)).interruptions) == 2
    assert re.search(logged_as, "".join(warnings_of(caplog)))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_sys_exit_in_an_environment_is_its_error_and_not_a_death(kind: str) -> None:
    fault = Fault(faulty.leave, at=5, seed=FAULTY_SEED)
    error = pytest.raises(EnvError, match=r"environment 2 called sys.exit\(4\) \(seed \d+, episode 1, step 1, action")
    with error, sampler_for(kind, kwargs={"faults": (fault,)}) as sampler:
        collected(sampler, 2)


@pytest.mark.slow
def test_a_run_survives_the_death_of_the_forkserver() -> None:
    with sampler_for("gpu") as sampler:
        batches = collected(sampler, 1)
        server = psutil.Process(sampler.envs.workers[0].child.pid).parent()  # type: ignore[attr-defined]
        assert server is not None
        assert server.parent() == psutil.Process()
        server.kill()
        kill(sampler)
        batches += collected(sampler, 2)
        assert {(8, 2), (8, 3)} <= set(BatchHistory(batches).interruptions)


@pytest.mark.parametrize(
    ("kind", "when"),
    [("gpu", "reset"), pytest.param("gpu", "constructor", marks=SLOW), pytest.param("cpu", "step", marks=SLOW)],
)
def test_a_worker_that_always_dies_ends_the_run_with_its_name_and_count(kind: str, when: str) -> None:
    start = time.monotonic()
    with (
        pytest.raises(WorkersFailed, match=r"^worker 0 .* killed by SIGKILL .*; it died 5 times in a row"),
        sampler_for(kind, kwargs={"faults": (Fault(faulty.kill, when),)}, n_workers=1) as sampler,
    ):
        sampler.collect()
    assert time.monotonic() - start < 60.0


@pytest.mark.parametrize(("kind", "max_restarts"), [("cpu", 0), ("gpu", 2)])
def test_no_more_workers_are_replaced_than_allowed(kind: str, max_restarts: int) -> None:
    with sampler_for(kind, kwargs={"faults": (Fault(faulty.kill, at=3),)}, max_restarts=max_restarts) as sampler:
        with pytest.raises(
            WorkersFailed, match=rf"that makes {max_restarts + 1} deaths .* sampler\.max_restarts={max_restarts}$"
        ):
            collected(sampler, 4)
        with pytest.raises(RuntimeError, match="cannot start a command"):
            sampler.collect()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_deaths_at_random_times_leave_every_row_valid(kind: str) -> None:
    with sampler_for(kind, T=16, n_workers=3, model=LSTM, max_restarts=1000) as sampler:
        workers, over, rng = sampler.envs.workers, threading.Event(), np.random.default_rng(0)  # type: ignore[attr-defined]

        def kill_now_and_then() -> None:
            while not over.wait(rng.uniform(0.05, 0.25)):
                worker = rng.choice(workers)
                if worker.deaths_in_a_row < 2:  # a busy machine starts processes slowly
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.child.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        batches = []
        deadline = time.monotonic() + 20
        try:
            while time.monotonic() < deadline:
                batches += collected(sampler, 1)
        finally:
            over.set()
            killer.join()
        history = BatchHistory(batches)
        assert without_diagnostics(sampler.trajectories()) == history.ended
        assert restarts(sampler) > 10
        assert_states_match_rows(agent_of(sampler, LSTM), batches)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_worker_that_is_replaced_after_a_resume_has_seeds_that_the_earlier_run_had_not(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with sampler_for(kind) as first:
        collected(first, 1)
        state = first.state_dict()
        kill(first)
        collected(first, 1)
    with sampler_for(kind) as second:
        second.load_state_dict(state)
        kill(second)
        collected(second, 1)
    seeds = [re.findall(r"fresh seeds \[(\d+), (\d+)\]", line)[0] for line in warnings_of(caplog)]
    assert len({*seeds[0], *seeds[1]}) == 4
