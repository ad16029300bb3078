"""BackgroundSampler: the same batches as in this process, versions of parameters, and the death of its process."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.agents import PolicyAgent
from rlframe.core.errors import ConfigError, Stopped
from rlframe.core.ranks import SamplerRank, use_ranks
from rlframe.envs import EnvConfig, EnvError
from rlframe.samplers import BackgroundProcess, BackgroundSampler, background, cpu, gpu, serial
from rlframe.system.service import Supervision, WorkersFailed
from tests.processes import descendants, is_running, until
from tests.samplers import faulty
from tests.samplers.batch_history import BatchHistory, without_diagnostics
from tests.samplers.faulty import Coded, Fault
from tests.samplers.made import agent_for, assert_equal, copied
from tests.samplers.supervised import collected, restarts, warnings_of
from tests.variants import variants

CONFIGS: dict[str, Any] = {
    "serial": serial.Config(batch_T=8, batch_B=4),
    "cpu": cpu.Config(batch_T=8, batch_B=4, n_workers=2),
    "alternating": gpu.Config(batch_T=8, batch_B=4, n_workers=2, n_groups=2),
}
LSTM = {"memory": "lstm", "memory_size": 4, "feed_back": True}


@contextmanager
def remote(
    kind: str = "serial",
    kwargs: dict[str, Any] | None = None,
    n_slots: int = 2,
    timeout_s: float = 90.0,
    max_restarts: int = 9,
    **model: Any,
) -> Iterator[tuple[BackgroundSampler, PolicyAgent]]:
    """A sampler of four environments, whose processes must all have ended at the end."""
    env = EnvConfig(Coded, kwargs or {}, "python")
    process = BackgroundProcess(CONFIGS[kind], env, 3, supervision=Supervision(timeout_s, max_restarts, name="sampler"))
    pids = {process.child.pid}
    try:
        agent = agent_for(process.observation_space, process.action_space, 0, **model)
        sampler = BackgroundSampler(process, agent, n_slots)
        pids |= family(sampler)
        yield sampler, agent
        pids |= family(sampler)
    finally:
        process.close()
        until(lambda: not any(map(is_running, pids)))


def family(sampler: BackgroundSampler) -> set[int]:
    """The sampler's process and its workers, without forkservers."""
    pid = sampler.process.child.pid
    return {pid, *descendants(pid)} if is_running(pid) else set()


@pytest.mark.parametrize("kind", variants(CONFIGS, ("serial", "alternating")))
def test_the_first_batches_are_those_of_the_same_sampler_in_this_process(kind: str) -> None:
    with remote(kind, n_slots=3, **LSTM) as (sampler, agent):
        batches = collected(sampler, 6)
        trajectories = sampler.trajectories()
        assert sampler.trajectories() == []
        state = sampler.state_dict()
    config = CONFIGS["serial"]
    envs = config.make_envs(EnvConfig(Coded, {}, "python"), 3, ())
    here = config.make_sampler(envs, agent, 3)
    for number, batch in enumerate(batches):
        same = here.collect()
        assert_equal(batch, copied(same))
        assert (batch.start, batch.stream, batch.n_env_steps) == (number * len(same.valid), 0, same.n_env_steps)
    assert trajectories == here.trajectories() != []
    assert len(state["noise"]) == 4
    envs.close()


def test_the_process_of_another_rank_has_the_environments_after_those_of_the_first() -> None:
    with use_ranks(SamplerRank(1, 2)):
        with remote() as (sampler, agent):
            batch = copied(sampler.collect())
        config = CONFIGS["serial"]
        envs = config.make_envs(EnvConfig(Coded, {}, "python"), 3, ())
        assert_equal(batch, copied(config.make_sampler(envs, agent, 3).collect()))
        envs.close()


@pytest.mark.parametrize(("n_slots", "most"), [(1, 0), (2, 2)])
def test_batches_are_sampled_with_the_version_that_they_carry_which_lags_by_the_slots_at_most(
    n_slots: int, most: int
) -> None:
    """Of two slots, one is learned from while the other is filled: with what was posted before the one now at hand."""
    with remote(n_slots=n_slots) as (sampler, agent):
        first, versions = sampler.posted_version, []
        posted = {first: copy.deepcopy(agent)}
        for _ in range(6):
            batch = sampler.collect()
            versions.append(sampler.version)
            with torch.no_grad():
                _, value, _ = posted[sampler.version](batch.inputs[:-1], batch.state)
                torch.testing.assert_close(batch.info.value, value, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
                for parameter in agent.parameters():
                    parameter.add_(0.1)
            sampler.refresh(agent)
            posted[sampler.posted_version] = copy.deepcopy(agent)
    assert versions == sorted(versions)
    assert all(version >= first + 2 * (number - most) for number, version in enumerate(versions))


@pytest.mark.parametrize("kind", variants(["serial", "alternating"], ("serial",)))
def test_a_killed_process_is_replaced_and_its_episodes_restart(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with remote(kind) as (sampler, _):
        before = collected(sampler, 2)
        old = family(sampler)
        os.kill(sampler.process.child.pid, signal.SIGKILL)
        until(lambda: not any(map(is_running, old)))
        after = [copied(sampler.collect()) for _ in range(sampler.ring.n_ready)]  # what was filled before
        while not restarts(sampler):
            after = [copied(sampler.collect())]
        after += collected(sampler, 3)
        assert after[0].inputs.first[0].all()
        assert after[0].start == 0, "so it does not continue a batch of the dead process"
        history = BatchHistory(after)
        assert not history.interruptions
        seeds = {float(x) for batch in before for x in batch.inputs.observation[..., 0].flatten()}
        assert seeds.isdisjoint({float(x) for x in after[0].inputs.observation[..., 0].flatten()}), "fresh ones"
        assert restarts(sampler) == 1
    (line,) = warnings_of(caplog)
    assert "sampler (process" in line
    assert "was killed by SIGKILL" in line


def test_check_notices_a_death_between_batches() -> None:
    with remote(n_slots=1) as (sampler, _):
        sampler.collect()
        os.kill(sampler.process.child.pid, signal.SIGKILL)
        start = time.monotonic()
        until(lambda: sampler.check() or restarts(sampler) == 1, 30.0)
        assert time.monotonic() - start < 30.0
        assert sampler.collect().inputs.first[0].all()


def test_too_many_deaths_are_an_error_with_their_number() -> None:
    fault = Fault(faulty.kill, at=30)
    said = "3 deaths of the sampler's process within an hour, more than runner.max_restarts=2"
    with remote(kwargs={"faults": (fault,)}, max_restarts=2) as (sampler, _), pytest.raises(WorkersFailed, match=said):
        collected(sampler, 40)


def test_deaths_in_a_row_without_a_batch_are_an_error() -> None:
    fault = Fault(faulty.kill, at=2)
    with remote(kwargs={"faults": (fault,)}) as (sampler, _), pytest.raises(WorkersFailed, match="5 times in a row"):
        sampler.collect()


def test_an_error_of_an_environment_is_raised_in_the_learner_with_its_traceback() -> None:
    with remote(kwargs={"faults": (Fault(faulty.diverge, at=9),)}) as (sampler, _):
        collected(sampler, 1)
        with pytest.raises(EnvError, match="the simulator diverged") as caught:
            collected(sampler, 2)
    assert "in diverge" in str(caught.value.__cause__)
    assert "in sampler (process" in str(caught.value.__cause__)


def test_an_error_at_start_is_raised_and_leaves_no_process() -> None:
    with pytest.raises(EnvError, match="the simulator diverged"):
        BackgroundProcess(
            CONFIGS["serial"], EnvConfig(Coded, {"faults": (Fault(faulty.diverge, "constructor"),)}, "python")
        )


def test_a_serial_sampler_that_hangs_is_replaced_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault(faulty.hang_in_c, at=20)
    with remote(kwargs={"faults": (fault,)}, timeout_s=2.0) as (sampler, _):
        batches = collected(sampler, 3)
        assert restarts(sampler) == 1
    assert len(batches) == 3
    assert "made no progress for 2 s and was killed" in warnings_of(caplog)[0]
    assert "in hang_in_c" in warnings_of(caplog)[0]


@pytest.mark.slow
def test_a_slow_batch_whose_steps_are_in_time_is_not_killed() -> None:
    with remote(kwargs={"pace_s": 0.1}, timeout_s=2.0) as (sampler, _):  # 8 steps of 4 environments: 3.2 s
        collected(sampler, 1)
        assert restarts(sampler) == 0


@pytest.mark.slow
def test_deaths_of_workers_are_handled_in_the_process_and_counted(tmp_path: Path) -> None:
    fault = Fault(faulty.kill, at=10, path=str(tmp_path / "faults"))
    with remote("cpu", {"faults": (fault,), "pace_s": 0.01}) as (sampler, _):
        start = time.monotonic()
        batches = []
        while not restarts(sampler):
            batches += collected(sampler, 1)
            assert time.monotonic() - start < 60.0
        assert sampler.process.restarts.n == 0
        assert restarts(sampler) == 1
        history = BatchHistory(batches)
        assert [env for _, env in history.interruptions] in ([0, 1], [2, 3])
        assert without_diagnostics(sampler.trajectories()) == history.ended


def test_closing_interrupts_a_long_batch() -> None:
    with remote("alternating", {"pace_s": 5.0}) as (sampler, _):  # a batch takes 80 s
        sampler.start()
        start = time.monotonic()
        sampler.close()
        sampler.close()
        assert time.monotonic() - start < 30.0


def test_the_fraction_of_time_that_the_sampler_waits_is_reported() -> None:
    with remote(kwargs={"pace_s": 0.005}) as (sampler, _):  # a batch takes 0.16 s
        collected(sampler, 1)
        sampler.counters()
        collected(sampler, 4)
        assert sampler.counters()["time/fraction_sampler_waiting"] < 0.5
        until(lambda: sampler.ring.is_full)
        sampler.counters()
        start = time.monotonic()
        until(lambda: time.monotonic() - start > 0.3)
        assert sampler.counters()["time/fraction_sampler_waiting"] > 0.5


def test_saved_noise_is_new_each_time_and_can_be_loaded_by_any_sampler() -> None:
    with remote() as (sampler, _):
        saved = sampler.state_dict()
        sampler.load_state_dict(saved)
        again = sampler.state_dict()
        assert saved["noise"] != again["noise"]
        batch = copied(sampler.collect())
        with pytest.raises(RuntimeError, match="before the first collect"):
            sampler.load_state_dict(saved)
    config = CONFIGS["serial"]
    envs = config.make_envs(EnvConfig(Coded, {}, "python"), 3, ())
    here = config.make_sampler(envs, agent_for(envs.observation_space, envs.action_space), 3)
    here.load_state_dict(saved)
    assert_equal(batch, copied(here.collect()))
    here.load_state_dict(again)
    envs.close()


def test_a_process_replaced_after_a_resume_has_other_seeds_than_one_replaced_before() -> None:
    with remote() as (sampler, _):
        before, saved = first_of_replacement(sampler), sampler.state_dict()
    with remote() as (sampler, _):
        sampler.load_state_dict(saved)
        after = first_of_replacement(sampler)
    assert (after.inputs.observation[0, :, 0] != before.inputs.observation[0, :, 0]).all(), "its seeds"


def first_of_replacement(sampler: BackgroundSampler) -> Any:
    """Kill the sampler's process; the first batch of the next one."""
    sampler.collect()
    os.kill(sampler.process.child.pid, signal.SIGKILL)
    while not restarts(sampler):
        batch = copied(sampler.collect())
    return batch


def test_a_timeout_below_that_of_the_workers_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"runner.sampler_timeout_s=30.0 must be above sampler.timeout_s=60.0"):
        BackgroundProcess(CONFIGS["cpu"], EnvConfig(Coded, {}, "python"), supervision=Supervision(30.0))


def test_a_second_interrupt_is_ignored_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    try:
        signal.signal(signal.SIGUSR2, background._exit)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) not in (signal.SIG_IGN, signal.SIG_DFL), "Python reports those it drops"
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not capfd.readouterr().err
