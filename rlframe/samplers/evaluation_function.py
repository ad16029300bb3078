"""EvaluationFunction: a function of the user's in place of evaluation episodes, `eval.function=module:function`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ReadableError, warn_once
from rlframe.envs import EnvConfig
from rlframe.envs.make import make_env
from rlframe.rollout.policy import Policy
from rlframe.samplers.evaluator import BaseEvaluator, Stop, never

MakeEnv = Callable[[], gymnasium.Env]
Function = Callable[[Policy, MakeEnv], Mapping[str, float]]
_BEAT_S = 1.0
_METRIC = re.compile(r"[^\s,/\"]+")
_OWN = ("return_best", "since_best", "restarts")  # of the runner


class EvaluationError(ReadableError):
    """A function of the user's failed, or did not return metrics."""

    shows_cause = True


class EvaluationFunction(BaseEvaluator):
    """Calls `function(policy, make_env)`, and logs what it returns, {name: number}, as eval/<name>.

    `policy.act(observation)` acts greedily, and with explore=True as in training; `make_env()` makes a Gymnasium
    environment, which the function seeds and closes. If it returns a `return_mean`, that is the score of the agent.
    """

    def __init__(
        self,
        function: Function,
        env: EnvConfig,
        agent: Agent,
        observation_space: Space,
        action_space: Space,
        interval_steps: float = 0.0,
    ) -> None:
        self.interval_steps = interval_steps
        self._function, self._env, self._agent = function, env, agent
        self._spaces = observation_space, action_space

    def score(self, number: int, stop: Stop = never) -> dict[str, float]:
        """Raises:
        EvaluationError: the function raised, or did not return numbers by name.
        """
        policy, name = Policy(self._agent, *self._spaces), getattr(self._function, "__name__", "eval.function")
        try:
            found = self._function(policy, lambda: make_env(self._env))
        except Exception as error:
            raise EvaluationError(f"eval.function {name} failed: {type(error).__name__}: {error}") from error
        return self._checked(found, name)

    def _checked(self, found: Any, name: str) -> dict[str, float]:
        try:
            metrics = {str(metric): float(value) for metric, value in found.items()}
        except (AttributeError, TypeError, ValueError):
            raise EvaluationError(f"eval.function {name} must return numbers by name, not {str(found)[:200]}") from None
        wrong = next((metric for metric in metrics if not _METRIC.fullmatch(metric) or metric in _OWN), "")
        if wrong:
            raise EvaluationError(f"eval.function {name} returned {wrong!r}, which cannot be the name of a metric")
        if "return_mean" not in metrics:
            warn_once(f"eval.function {name} returns no return_mean, so its agents have no score")
        return {f"eval/{metric}": value for metric, value in metrics.items()}

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        """Nothing shows its progress, so it counts as alive as long as the process runs."""
        _Heartbeat(heartbeat).start()

    def close(self) -> None:
        """Nothing is open."""


class _Heartbeat(threading.Thread):
    """Increments a number every second."""

    def __init__(self, heartbeat: np.ndarray) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._heartbeat, self._never = heartbeat, threading.Event()

    def run(self) -> None:
        while not self._never.wait(_BEAT_S):
            self._heartbeat[0] += 1
