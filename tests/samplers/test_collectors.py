"""Collectors: each samples for itself, in its own stream, and none waits for another; deaths, seeds, levels, keys."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlframe import launch
from rlframe.agents import PolicyAgent
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, EnvError
from rlframe.samplers import cpu, serial
from rlframe.samplers.collectors import CollectorProcesses, Collectors
from rlframe.system.service import Supervision
from tests.processes import is_running, until
from tests.runners.resumed import log, stopped_at, words
from tests.samplers import faulty
from tests.samplers.faulty import Coded, Fault
from tests.samplers.made import agent_for, assert_equal, copied

SERIAL = serial.Config(batch_T=8, batch_B=4)


def uneven(env_index: int, pace_s: float = 0.2) -> Coded:
    """Environments of which the last is slow."""
    return Coded(pace_s=pace_s if env_index == 3 else 0.0)


@contextmanager
def collectors(
    n: int = 2, env: Any = Coded, kwargs: Any = None, config: Any = SERIAL, timeout_s: float = 90.0, n_slots: int = 2
) -> Iterator[tuple[Collectors, PolicyAgent]]:
    """Of four environments, whose processes must all have ended at the end."""
    watched = Supervision(timeout_s, 9, name="sampler")
    processes = CollectorProcesses(config, EnvConfig(env, kwargs or {}, "python"), 3, n, supervision=watched)
    try:
        agent = agent_for(processes.observation_space, processes.action_space, 0)
        sampler = Collectors(processes, agent, n_slots)
        yield sampler, agent
        sampler.close()
    finally:
        processes.close()
        until(lambda: not any(is_running(each.child.pid) for each in processes.processes))


def batches(sampler: Collectors, n: int) -> list[Any]:
    return [copied(sampler.collect()) for _ in range(n)]


def in_turn(sampler: Collectors, n: int) -> list[Any]:
    """Batches that are taken only while all have one."""
    for each in sampler.samplers:
        each.start()
    found = []
    for _ in range(n):
        until(lambda: all(each.n_ready for each in sampler.samplers))
        found += batches(sampler, 1)
    return found


@pytest.mark.parametrize(
    "config", [SERIAL, pytest.param(cpu.Config(batch_T=8, batch_B=4, n_workers=2), marks=pytest.mark.slow)]
)
def test_together_they_sample_what_one_sampler_of_all_environments_does(config: Any) -> None:
    with collectors(config=config) as (sampler, agent):
        found = in_turn(sampler, 6)
        ended = sampler.trajectories()
        assert sampler.batch_spec == (8, 2, 2)
    envs = SERIAL.make_envs(EnvConfig(Coded, {}, "python"), 3, ())
    here = SERIAL.make_sampler(envs, agent, 3)
    whole = [copied(here.collect()) for _ in range(3)]
    assert [(batch.stream, batch.start) for batch in found] == [(0, 0), (1, 0), (0, 8), (1, 8), (0, 16), (1, 16)]
    for n, batch in enumerate(found):
        all_, columns = whole[n // 2], slice(2 * batch.stream, 2 * batch.stream + 2)
        assert_equal(batch.action, all_.action[:, columns])
        assert_equal(batch.inputs.observation, all_.inputs.observation[:, columns])
    assert sorted(ended, key=str) == sorted(here.trajectories(), key=str)
    envs.close()


def test_those_that_are_ready_are_taken_in_turn() -> None:
    with collectors(4) as (sampler, _):
        assert [batch.stream for batch in in_turn(sampler, 6)] == [0, 1, 2, 3, 0, 1]
        assert sampler.n_ready >= 3


def test_none_waits_for_a_slow_one() -> None:
    with collectors(4, uneven) as (sampler, _):
        begin = time.monotonic()
        streams = [batch.stream for batch in batches(sampler, 30)]
        assert streams.count(3) <= 1 + (time.monotonic() - begin) / 1.6, "of a batch of the slow one"
        assert streams.count(3) < 5, "in turn it would be 7"
        counters = sampler.counters()
        rates = [counters[f"async/env_steps_per_second_{i}"] for i in range(4)]
        assert rates[3] < max(rates) / 1.5


def test_a_version_is_pushed_to_all_at_once_and_batches_carry_theirs() -> None:
    with collectors() as (sampler, agent):
        first = sampler.posted_version
        sampler.collect()
        assert sampler.version == first
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter.fill_(0.0)
        sampler.refresh(agent)
        assert sampler.posted_version == first + 2
        seen: dict[int, list[int]] = {0: [], 1: []}
        while not all(first + 2 in each for each in seen.values()):  # one may send many before the other's first
            batch = sampler.collect()
            seen[batch.stream].append(sampler.version)
            if sampler.version > first:  # of zeros each action is as likely as another
                torch.testing.assert_close(batch.info.log_prob[batch.valid].exp().mean(), torch.tensor(1 / 3))
        for each in seen.values():
            assert each == sorted(each)
            assert each.count(first) <= 2, "those that were collected before"


def test_one_that_is_killed_is_replaced_while_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    with collectors() as (sampler, _):
        batches(sampler, 4)
        os.kill(sampler.samplers[1].process.child.pid, signal.SIGKILL)
        while not sampler.counters()["sampler/restarts"]:
            sampler.check()
            batches(sampler, 1)
        assert {batch.stream for batch in in_turn(sampler, 6)} == {0, 1}
        assert sampler.counters()["sampler/restarts"] == 1
    assert "sampler 1 (process" in caplog.text


def test_one_that_hangs_is_replaced_though_others_have_batches(caplog: pytest.LogCaptureFixture) -> None:
    with collectors(timeout_s=3.0) as (sampler, _):  # which holds for its start, too
        batches(sampler, 4)
        os.kill(sampler.samplers[1].process.child.pid, signal.SIGSTOP)
        start = time.monotonic()
        while not sampler.counters()["sampler/restarts"]:
            sampler.check()
            sampler.collect()
            time.sleep(0.02)
            assert time.monotonic() - start < 60.0
        assert {batch.stream for batch in in_turn(sampler, 4)} == {0, 1}
    assert "made no progress for 3 s and was killed" in caplog.text


def test_with_one_slot_each_goes_on_and_none_counts_as_hung_while_its_batch_is_learned_from() -> None:
    with collectors(timeout_s=3.0, n_slots=1) as (sampler, _):
        assert {batch.stream for batch in batches(sampler, 6)} == {0, 1}
        until(lambda: sampler.n_ready > 0)  # the other has no slot before the next batch is waited for
        for _ in range(12):  # long updates
            sampler.check()
            sampler._watched_at -= 1.0
        batches(sampler, 4)
        assert not sampler.counters()["sampler/restarts"]


def test_the_time_of_long_updates_counts_for_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with collectors(timeout_s=80.0) as (sampler, _):
        sampler.check()
        now, clock = time.monotonic(), Mock()
        looks = [Mock() for _ in sampler.samplers]
        for each, look in zip(sampler.samplers, looks, strict=True):
            monkeypatch.setattr(each, "check", look)
        monkeypatch.setattr("rlframe.samplers.collectors.time", clock)
        clock.monotonic.return_value = sampler._watched_at = now
        for passed_s in (4.0, 5.0, 3600.0):  # the last of a machine that slept
            clock.monotonic.return_value += passed_s
            sampler.check()
        for look in looks:
            assert [call.args[0] for call in look.call_args_list] == pytest.approx([4.0, 5.0, 10.0])
        monkeypatch.undo()


def test_an_error_of_an_environment_ends_the_run_with_its_traceback() -> None:
    faults = (Fault(faulty.diverge, at=9),)
    with collectors(kwargs={"faults": faults}) as (sampler, _), pytest.raises(EnvError, match="the simulator diverged"):
        batches(sampler, 8)


def test_saved_noise_is_that_of_all_environments() -> None:
    with collectors() as (sampler, _):
        state = sampler.state_dict()
        assert len({str(each) for each in state["noise"]}) == 4
        assert len(sampler.load_state_dict(state)) == 4
        with pytest.raises(ValueError, match="of 3 environments, not of 4"):
            sampler.load_state_dict({"noise": state["noise"][:3]})


CASE = (
    "env=CartPole-v1 sampler=serial sampler.batch_B=4 model.hidden=[8] eval.n_episodes=1 eval.n_envs=1 eval.n_workers=0"
)
FEW = "algo.learning_starts=80 algo.replay_ratio=1 algo.batch_size=8"
ASYNC = f"runner=async_rl runner.n_samplers=2 {CASE}"


def test_levels_of_exploration_are_graded_over_the_environments_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy: dict[int, list[Any]] = {0: [], 1: []}
    collect = Collectors.collect

    def watched(self: Collectors) -> Any:
        samples = collect(self)
        greedy[samples.stream].append(samples.action == samples.info.q.argmax(-1))  # type: ignore[attr-defined]
        return samples

    monkeypatch.setattr(Collectors, "collect", watched)
    case = f"algo=dqn {ASYNC} sampler.batch_T=4 algo.explore.epsilon=1 algo.explore.epsilon_last=1e-9"
    assert launch.main(words(f"{case} {FEW} runner.n_steps=800 runner.log_interval_steps=400", tmp_path)) == 0
    (first, _), (_, last) = (torch.cat(greedy[i]).float().mean(0).tolist() for i in (0, 1))
    assert 0.3 < first < 0.7, "at random"
    assert last == 1.0


@pytest.mark.parametrize(
    "algo",
    [
        pytest.param("algo=ppo sampler.batch_T=16 algo.minibatches=2", marks=pytest.mark.slow),
        f"algo=dqn sampler.batch_T=4 {FEW} algo.prioritized=true",
    ],
)
def test_a_run_with_two_collectors_learns_is_stopped_and_goes_on(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"{algo} {ASYNC} runner.push_interval=2 runner.n_steps=640 runner.log_interval_steps=160"
    stopped_at(200, case, tmp_path, monkeypatch)
    row = log(tmp_path / "run_0")[-1]
    assert int(row["env_steps"]) >= 640
    assert int(row["updates"]) > 10
    assert "async/env_steps_per_second_1" in row


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("runner.n_samplers=3", "runner.n_samplers=3 must divide sampler.batch_B=4: each steps a part"),
        ("runner.n_samplers=2 sampler=cpu sampler.n_workers=3", "runner.n_samplers=2 must divide sampler.n_workers=3"),
        ("runner.n_samplers=0", "runner.n_samplers=0 must be at least 1"),
        ("sampler=gpu sampler.n_workers=1 sampler.device=cuda:99", "device=cuda:99"),
        ("sampler=cpu sampler.n_workers=1 sampler.device=cuda", "workers of sampler=cpu act on the CPU"),
        ("runner=minibatch_rl sampler.device=cpu", "sampler.device=cpu is for a sampler in a process of its own"),
        ("runner.push_interval=0", "runner.push_interval=0 must be at least 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_starts(
    given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = f"algo=ppo runner=async_rl {CASE}"
    for word in given.split():
        case = " ".join(each for each in case.split() if each.split("=")[0] != word.split("=")[0])
    assert launch.main(words(f"{case} {given}", tmp_path)) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("cpus", "parts"), [((4, 5, 6, 7), [(4, 5), (6, 7)]), ((3,), [(3,), (3,)])])
def test_processes_share_their_cpus(
    cpus: tuple[int, ...], parts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    monkeypatch.setattr("rlframe.samplers.collectors.BackgroundProcess", made)
    CollectorProcesses(SERIAL, EnvConfig(Coded, {}, "python"), 0, 2, cpus)
    assert [call.args[3] for call in made.call_args_list] == parts


def test_environments_that_cannot_be_divided_are_refused_in_python() -> None:
    with pytest.raises(ConfigError, match="must divide sampler"):
        CollectorProcesses(SERIAL, EnvConfig(Coded, {}, "python"), 0, 3)
