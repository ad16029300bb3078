"""Workers that hang are killed after the timeout, and their stack is logged; slow ones are not killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlframe.envs import EnvConfig
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.samplers import GpuSampler
from tests.processes import until
from tests.samplers import faulty
from tests.samplers.batch_history import LENGTH, BatchHistory, without_diagnostics
from tests.samplers.faulty import Coded, Fault, length_of
from tests.samplers.made import agent_for
from tests.samplers.supervised import FAULTY_SEED, SLOW, collected, restarts, sampler_for, supervision, warnings_of


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("gpu", faulty.hang_in_c),
        pytest.param("cpu", faulty.hang_in_python, marks=SLOW),
        pytest.param("alternating", faulty.hang_in_python, marks=SLOW),
        pytest.param("gpu", faulty.stop, marks=SLOW),
    ],
)
def test_a_hang_costs_only_the_workers_episodes_and_its_stack_is_logged(
    kind: str, what: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with sampler_for(kind, kwargs={"faults": (Fault(what, at=10, seed=FAULTY_SEED),)}, timeout_s=3.0) as sampler:
        history = BatchHistory(collected(sampler, 3))
        assert without_diagnostics(sampler.trajectories()) == history.ended
        assert [env for _, env in history.interruptions] == [2, 3]
        assert restarts(sampler) == 1
    (line,) = warnings_of(caplog)
    assert "worker 1" in line
    assert "made no progress for 3 s and was killed" in line
    assert f"in {what.__name__}" in line or what is faulty.stop
    assert "stepping its 2 environments may take that long, raise sampler.timeout_s; restarted" in line


@pytest.mark.parametrize("when", ["constructor", pytest.param("reset", marks=SLOW)])
def test_a_worker_that_hangs_at_start_is_replaced(when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault(faulty.hang_in_c, when, path=str(tmp_path / "faults"))
    with sampler_for("gpu", kwargs={"faults": (fault,)}, timeout_s=3.0) as sampler:
        assert restarts(sampler) == 1
        assert not BatchHistory(collected(sampler, 2)).interruptions
    assert "in hang_in_c" in warnings_of(caplog)[0]


@pytest.mark.parametrize(("T", "steps_before"), [(32, 0), (1, 56)], ids=["a batch", "random steps before it"])
def test_many_steps_may_take_longer_than_the_timeout_of_one(T: int, steps_before: int) -> None:
    start = time.monotonic()
    with sampler_for("cpu", kwargs={"pace_s": 0.05}, T=T, steps_before=steps_before, timeout_s=2.0) as sampler:
        collected(sampler, 1)
        assert time.monotonic() - start > 2.4
        assert restarts(sampler) == 0


@pytest.mark.parametrize(
    "fault",
    [Fault(faulty.kill, at=9), Fault(faulty.kill, "reset", 2), pytest.param(Fault(faulty.hang_in_c, at=9), marks=SLOW)],
)
def test_an_evaluation_replaces_workers_that_die_or_hang(
    fault: Fault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = Fault(fault.what, fault.when, fault.at, path=str(tmp_path / "faults"))
    env = Coded()
    agent = agent_for(env.observation_space, env.action_space)
    config = EnvConfig(Coded, {"faults": (once,)}, "python")
    evaluator = Evaluator(config, agent, EvalConfig(n_envs=3, n_episodes=7, n_workers=2), 0, (), supervision(5.0))
    try:
        for _ in range(2):
            played = evaluator.play()
            assert [each.env for each in played] == [0, 0, 0, 1, 1, 2, 2]
            assert all(LENGTH <= each.length <= length_of(LENGTH, 2) for each in played)
            assert all(each.return_ == sum(range(each.length + 1)) for each in played)
        assert evaluator.envs.counters()["sampler/restarts"] == 1  # type: ignore[union-attr]
    finally:
        evaluator.close()
    assert len(warnings_of(caplog)) == 1


def test_a_worker_that_died_between_evaluations_is_replaced() -> None:
    env = Coded()
    agent = agent_for(env.observation_space, env.action_space)
    config = EvalConfig(n_envs=3, n_episodes=3, n_workers=3)
    evaluator = Evaluator(EnvConfig(Coded, {}, "python"), agent, config, 0, (), supervision())
    try:
        evaluator.play()
        evaluator.envs.workers[1].child.kill()  # type: ignore[union-attr]
        played = evaluator.play()
    finally:
        evaluator.close()
    assert [each.env for each in played] == [0, 1, 2]
    assert played[1].length == LENGTH, "the first episode of a new process"


@pytest.mark.parametrize("what", [faulty.diverge, faulty.kill, pytest.param(faulty.hang_in_c, marks=SLOW)])
def test_closing_ignores_what_environments_do_in_close(what: Callable[[], None]) -> None:
    with sampler_for("gpu", faulty.Closing, {"what": what}) as sampler:
        collected(sampler, 1)
        start = time.monotonic()
    assert time.monotonic() - start < 30.0


@pytest.mark.slow
def test_closing_takes_bounded_time_while_a_worker_hangs(tmp_path: Path) -> None:
    fault = Fault(faulty.hang_in_c, path=str(tmp_path / "hangs"))
    with sampler_for("gpu", kwargs={"faults": (fault,)}) as sampler:
        assert isinstance(sampler, GpuSampler)
        sampler.collector.steppers[0].start_step(0)
        until(Path(f"{fault.path}.0").exists)
        start = time.monotonic()
        sampler.close()
        sampler.close()
        assert 2.0 <= time.monotonic() - start < 30.0
