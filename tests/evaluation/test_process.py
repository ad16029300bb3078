"""EvaluatorProcess: the metrics of an evaluation in this process, and what it costs when its process dies or hangs."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlframe.agents import Agent
from rlframe.core.errors import PartError
from rlframe.envs import EnvConfig, EnvError, make_envs
from rlframe.envs.debug_envs import TimeLimit
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.evaluation.evaluator import BaseEvaluator, EvaluationStopped, Result
from rlframe.evaluation.function import EvaluationFunction
from rlframe.evaluation.process import EvaluatorProcess
from rlframe.system.service import Supervision, WorkersFailed
from tests.evaluation.killing import kill_evaluations
from tests.processes import is_running, until
from tests.samplers.made import agent_for
from tests.samplers.supervised import supervision

CARTPOLE = EnvConfig("CartPole-v1")
CONFIG = EvalConfig(n_envs=3, n_episodes=7, explore=True)


def cartpole_agent() -> Agent:
    with closing(make_envs(CARTPOLE, 1, [0])) as envs:
        return agent_for(envs.observation_space, envs.action_space)


def episodes(env: EnvConfig, config: EvalConfig, agent: Agent) -> BaseEvaluator:
    return Evaluator(env, agent, config, 5)


@contextmanager
def started(
    make: Callable[[Agent], BaseEvaluator], agent: Agent, watched: Supervision | None = None
) -> Iterator[EvaluatorProcess]:
    with closing(EvaluatorProcess(make, agent, 0.0, (), watched or Supervision(name="evaluation"))) as evaluator:
        yield evaluator


def result(evaluator: EvaluatorProcess, number: int) -> dict[str, float]:
    assert evaluator.evaluate(number) == {}
    assert evaluator.busy
    ((of, metrics),) = evaluator.finished(wait=True)
    assert of == number
    assert not evaluator.busy
    return metrics


def test_its_metrics_are_those_of_an_evaluation_here_of_the_parameters_at_its_start() -> None:
    agent = cartpole_agent()
    with (
        closing(Evaluator(CARTPOLE, agent, CONFIG, 5)) as here,
        started(partial(episodes, CARTPOLE, CONFIG), agent) as there,
    ):
        for number in (0, 1000, 2000):
            expected = here.evaluate(number)
            there.evaluate(number)
            with torch.no_grad():
                for parameter in agent.parameters():  # learning goes on meanwhile
                    parameter += 0.1 * torch.randn_like(parameter)
            ((of, metrics),) = there.finished(wait=True)
            assert of == number
            assert metrics.pop("eval/restarts") == 0
            assert metrics == expected


def test_it_does_not_wait_for_a_result_unless_asked_to() -> None:
    agent = cartpole_agent()
    with started(partial(episodes, CARTPOLE, EvalConfig(n_envs=1, n_episodes=300)), agent) as evaluator:
        assert evaluator.finished(wait=True) == []
        evaluator.evaluate(0)
        assert evaluator.finished(wait=False) == []
        with pytest.raises(RuntimeError, match="evaluation of env_steps 0 is not finished"):
            evaluator.evaluate(1)
        assert evaluator.finished(wait=True, stop=lambda: True) == []
        assert evaluator.busy
        found: list[Result] = []
        until(lambda: found.extend(evaluator.finished(wait=False)) or found)
        assert [number for number, _ in found] == [0]


def test_an_evaluation_asked_for_in_between_takes_no_result_from_the_runner() -> None:
    agent = cartpole_agent()
    with started(partial(episodes, CARTPOLE, CONFIG), agent) as evaluator:
        evaluator.evaluate(7)
        between = evaluator.evaluate_now(9)
        ((number, metrics),) = evaluator.finished(wait=False)
        assert number == 7
        assert result(evaluator, 9) == between
        assert result(evaluator, 7) == metrics


def test_a_killed_process_makes_its_evaluation_again_twice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = cartpole_agent()
    with started(partial(episodes, CARTPOLE, CONFIG), agent) as evaluator:
        before = result(evaluator, 3)
        kill_evaluations(2, monkeypatch)
        assert result(evaluator, 3) == {**before, "eval/restarts": 2}
        for n in (1, 2):
            assert f"the evaluation of env_steps 3 is made again (restart {n})" in caplog.text
        kill_evaluations(3, monkeypatch)
        evaluator.evaluate(3)
        assert evaluator.finished(wait=True) == []
        assert "the evaluation of env_steps 3 is lost (restart 5)" in caplog.text
        assert not evaluator.busy
        assert result(evaluator, 3) == {**before, "eval/restarts": 5}


def test_a_hung_process_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    env = EnvConfig(Stuck, {}, "python")
    agent = agent_for(Stuck().observation_space, Stuck().action_space)
    with started(partial(episodes, env, EvalConfig(n_envs=1, n_episodes=1)), agent, supervision()) as evaluator:
        evaluator._timeout_s = 1.0  # once it has started
        hung = evaluator._service.child.pid
        evaluator.evaluate(0)
        assert evaluator.finished(wait=True) == []
        assert "made no progress for 1 s" in caplog.text
        until(lambda: not is_running(hung))
        evaluator.evaluate(1)
        assert is_running(evaluator._service.child.pid)


def dies_until(path: str, agent: Agent) -> BaseEvaluator:
    """An evaluator whose environment ends the process at its start, but for the third time."""
    with open(path, "a") as file:
        file.write("x")
        if file.tell() < 3:
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return episodes(CARTPOLE, CONFIG, agent)


def test_a_process_that_dies_at_its_start_is_replaced_and_ends_the_run_the_fifth_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = cartpole_agent()
    with started(partial(dies_until, str(tmp_path / "starts")), agent) as evaluator:
        assert result(evaluator, 3)["eval/restarts"] == 2
        assert "another one starts (restart 2)" in caplog.text
    with pytest.raises(WorkersFailed, match="it died 5 times in a row without finishing an evaluation"):
        EvaluatorProcess(partial(dies_until, "/dev/null"), agent, 0.0)


def test_two_looks_at_a_process_that_works_never_see_the_same_heartbeat() -> None:
    heartbeat, seen = np.zeros(1, np.int64), list[int]()

    class Watched(TimeLimit):
        def step(self, action: Any) -> Any:
            seen.append(int(heartbeat[0]))
            return super().step(action)

    agent = agent_for(Watched().observation_space, Watched().action_space)
    config = EvalConfig(n_envs=1, n_episodes=20)
    with closing(Evaluator(EnvConfig(Watched, {}, "python"), agent, config, 0)) as evaluator:
        evaluator.set_heartbeat(heartbeat)
        evaluator.evaluate(0)
    assert len(seen) == len(set(seen)) > 32


class Stuck(TimeLimit):
    """Its second step does not end."""

    def step(self, action: Any) -> Any:
        time.sleep(600 if self._time else 0)
        return super().step(action)


def test_an_error_of_its_environment_is_raised_here() -> None:
    env = EnvConfig(Failing, {}, "python")
    agent = agent_for(Failing().observation_space, Failing().action_space)
    with started(partial(episodes, env, EvalConfig(n_envs=1, n_episodes=1)), agent) as evaluator:
        evaluator.evaluate(0)
        with pytest.raises(EnvError, match="in evaluation, environment 0 raised: ArithmeticError: the sky fell"):
            evaluator.finished(wait=True)


class Failing(TimeLimit):
    def step(self, action: Any) -> Any:
        raise ArithmeticError("the sky fell")


def test_too_many_deaths_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = cartpole_agent()
    few = Supervision(max_restarts=1, name="evaluation")
    with started(partial(episodes, CARTPOLE, CONFIG), agent, few) as evaluator:
        kill_evaluations(2, monkeypatch)
        evaluator.evaluate(0)
        with pytest.raises(WorkersFailed, match=r"more than sampler\.max_restarts=1"):
            evaluator.finished(wait=True)


def steps_of_a_game(policy: Any, make_env: Callable[[], gymnasium.Env]) -> dict[str, float]:
    with closing(make_env()) as env:
        observation, _ = env.reset(seed=3)
        n, ended = 0, False
        while not ended:
            observation, _, terminated, truncated, _ = env.step(policy.act(observation))
            n, ended = n + 1, terminated or truncated
    return {"n": n}


def function_of(agent: Agent) -> BaseEvaluator:
    with closing(make_envs(CARTPOLE, 1, [0])) as envs:
        return EvaluationFunction(steps_of_a_game, CARTPOLE, agent, (envs.observation_space, envs.action_space))


def test_a_function_of_the_users_gives_the_same_metrics_in_either_process() -> None:
    agent = cartpole_agent()
    here = function_of(agent).evaluate(0)
    assert here["eval/n"] >= 8
    with started(function_of, agent) as there:
        assert result(there, 0) == {**here, "eval/restarts": 0}


def test_a_function_of_the_users_is_stopped_where_it_asks_for_an_action() -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(0)
        return len(asked) == 3

    with pytest.raises(EvaluationStopped):
        function_of(cartpole_agent()).evaluate(0, stop)
    assert len(asked) == 3


@pytest.mark.parametrize("found", [None, {}, {"n": "many"}, 3, {"a b": 1}, {"restarts": 1}])
def test_a_function_that_does_not_return_numbers_by_name_is_an_error(found: Any) -> None:
    agent = cartpole_agent()
    with closing(make_envs(CARTPOLE, 1, [0])) as envs:
        spaces = envs.observation_space, envs.action_space
    evaluator = EvaluationFunction(lambda policy, make_env: found, CARTPOLE, agent, spaces)
    with pytest.raises(PartError, match=r"eval\.function <lambda> (must return numbers by name|returned)"):
        evaluator.evaluate(0)
