"""Errors of environments and agents in worker processes reach the parent; what is allowed there works."""

from __future__ import annotations

import functools
import multiprocessing
import re
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, EnvError
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import PolicyModel
from rlframe.samplers import CpuSampler
from tests.samplers import faulty
from tests.samplers.batch_history import BatchHistory
from tests.samplers.faulty import Coded, Fault, Small
from tests.samplers.made import agent_for
from tests.samplers.supervised import FAULTY_SEED, KINDS, SLOW, collected, sampler_for, supervision, workers_for

METHODS = ("forkserver", "spawn")


def traceback_of(error: BaseException) -> str:
    """The traceback that a user sees."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("kind", "method"),
    [("cpu", "forkserver"), ("alternating", "forkserver"), *(pytest.param("gpu", how, marks=SLOW) for how in METHODS)],
)
def test_an_exception_of_an_environment_is_raised_with_all_facts_to_reproduce_it(kind: str, method: str) -> None:
    fault = Fault(faulty.diverge, at=7, seed=FAULTY_SEED)
    with sampler_for(kind, kwargs={"faults": (fault,)}, method=method) as sampler:
        start = time.monotonic()
        with pytest.raises(EnvError) as caught:
            sampler.collect()
        assert time.monotonic() - start < 20.0
        with pytest.raises(RuntimeError, match="cannot start a command"):
            sampler.collect()
    assert re.match(
        r"in worker 1 \(process \d+\), environment 2 raised: ValueError: the simulator diverged "
        r"\(seed \d+, episode 1, step 3, action [0-2]\); ",
        str(caught.value),
    )
    assert re.search(r'File ".*faulty.py", line \d+, in diverge\n +raise ValueError', str(caught.value.__cause__))


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("constructor", r"in worker \d .*environment \d could not be made: ValueError: the simulator .*\(seed 1\d\)"),
        ("reset", r"in worker \d .*environment \d raised: ValueError: .*seed 1\d, episode 0, step 0, action the reset"),
    ],
)
def test_an_exception_at_start_is_raised_too(when: str, message: str) -> None:
    with (
        pytest.raises(EnvError, match=message) as caught,
        sampler_for("gpu", kwargs={"faults": (Fault(faulty.diverge, when),)}),
    ):
        pass
    assert "in diverge\n" in str(caught.value.__cause__)


def test_an_exception_in_evaluation_says_so() -> None:
    env = Coded()
    agent = agent_for(env.observation_space, env.action_space)
    config = EnvConfig(Coded, {"faults": (Fault(faulty.diverge, at=3),)}, "python")
    evaluator = Evaluator(config, agent, EvalConfig(n_workers=2), 0, (), supervision())
    try:
        with pytest.raises(
            EnvError, match=r"^in evaluation, in worker \d .*environment \d raised: ValueError"
        ) as caught:
            evaluator.play()
    finally:
        evaluator.close()
    assert "in diverge\n" in traceback_of(caught.value)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [("nan", "not finite"), ("nan_reward", "reward is not finite"), ("shape", r"shape \(2,\)"), ("dtype", "complex64")],
)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=SLOW)])
def test_invalid_values_are_found_in_the_worker(kind: str, invalid: str, message: str) -> None:
    with (
        pytest.raises(EnvError, match=rf"^in worker 1 .*environment 2 .*{message}.*seed 13, episode 0, step 2"),
        sampler_for(kind, kwargs={"faults": (Fault(invalid, at=2, seed=FAULTY_SEED),)}) as sampler,
    ):
        sampler.collect()


class Failing(PolicyModel):
    """A model that raises in worker processes only."""

    def __init__(self, model: torch.nn.Module, fail: Any) -> None:
        super().__init__()
        self.model, self.fail = model, fail

    def initial_state(self, n: int) -> Any:
        return self.model.initial_state(n)  # type: ignore[operator]

    def forward(self, *args: Any) -> Any:
        if multiprocessing.parent_process() is not None:
            self.fail()
        return self.model(*args)


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        (faulty.diverge, ValueError, "the simulator diverged"),
        (faulty.fail_oddly, RuntimeError, "Unpicklable: 1 and 2"),
        (faulty.lose_connection, ConnectionResetError, "the simulator's server is gone"),
        (faulty.be_cancelled, RuntimeError, "CancelledError: the simulator's task"),
    ],
)
def test_any_exception_of_the_agent_is_raised(fail: Any, error: Any, message: str) -> None:
    with workers_for(Coded, {}) as envs:
        agent = agent_for(envs.observation_space, envs.action_space)
        agent.model = Failing(agent.model, fail)  # type: ignore[assignment]
        sampler = CpuSampler(envs, agent, 8)
        with pytest.raises(error, match=message) as caught:
            sampler.collect()
    assert re.match(r"\nin worker [01] \(process \d+\)\n", str(caught.value.__cause__))
    assert f"in {fail.__name__}\n" in str(caught.value.__cause__)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=SLOW)])
def test_lambdas_closures_and_local_classes_may_be_environments(method: str) -> None:
    length = 3

    class Local(Coded):
        def __init__(self) -> None:
            super().__init__(length)

    for env in (lambda: Local(), functools.partial(Coded, length)):
        with sampler_for("gpu", env, method=method) as sampler:
            sampler.collect()
            assert sampler.trajectories()[0].length == length


def test_an_environment_that_cannot_be_pickled_is_an_error_with_the_remedy() -> None:
    lock = threading.Lock()

    def locked() -> Any:
        with lock:
            return Small()

    with (
        pytest.raises(ConfigError, match=r"the work of worker 0 cannot be pickled: .*lock.*create those"),
        workers_for(locked, {}),
    ):
        pass


class Lost:
    """An environment that cannot be unpickled in the worker."""

    def __call__(self) -> Any:
        return Small()

    def __setstate__(self, state: Any) -> None:
        raise FileNotFoundError("there is no such level")

    def __getstate__(self) -> Any:
        return {"some": "state"}


def test_an_environment_that_cannot_be_received_says_why() -> None:
    with pytest.raises(FileNotFoundError, match="no such level") as caught, workers_for(Lost(), {}):
        pass
    assert "in __setstate__" in str(caught.value.__cause__)


def test_workers_with_different_spaces_are_an_error(tmp_path: Path) -> None:
    kwargs = {"path": str(tmp_path / "processes")}
    message = r"^worker \d \(environments (\d) to \1\) has different spaces from worker 0: .*Discrete.*Discrete"
    with pytest.raises(EnvError, match=message), workers_for(faulty.Different, kwargs, n_workers=4):
        pass


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=SLOW)])
def test_an_environment_may_have_threads_and_locks(method: str) -> None:
    with sampler_for("gpu", faulty.Threaded, method=method) as sampler:
        collected(sampler, 2)
        assert len(sampler.trajectories()) == 4 * 2


def test_an_environment_may_print_and_report_a_lot() -> None:
    with sampler_for("cpu", faulty.Talkative) as sampler:
        collected(sampler, 2)
        (first, *_) = sampler.trajectories()
    assert len(first.diagnostics) == 20_000


def test_each_environment_may_have_a_process() -> None:
    with sampler_for("alternating", n_workers=4) as sampler:
        assert BatchHistory(collected(sampler, 2)).ended


def test_samplers_may_run_together_and_in_threads() -> None:
    histories: list[BatchHistory] = []

    def run(kind: str) -> None:
        with sampler_for(kind) as sampler:
            histories.append(BatchHistory(collected(sampler, 3)))

    threads = [threading.Thread(target=run, args=(kind,)) for kind in KINDS]
    with ExitStack() as stack:
        sampler = stack.enter_context(sampler_for("gpu"))
        for thread in threads:
            thread.start()
        histories.append(BatchHistory(collected(sampler, 3)))
        for thread in threads:
            thread.join(30)
    assert [len(history.ended) for history in histories] == [len(histories[0].ended)] * 4


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_thread_that_made_a_sampler_may_end_before_it(method: str) -> None:
    with ExitStack() as stack:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(stack.enter_context(sampler_for("gpu", method=method))))
        thread.start()
        thread.join(30)
        assert not BatchHistory(collected(made[0], 3)).interruptions
