"""EvaluationFunction: a function of the user's in place of evaluation episodes, `eval.function=module:function`."""

from __future__ import annotations

import inspect
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError, PartError, describe, warn_once
from rlframe.core.names import find_attribute
from rlframe.envs import EnvConfig
from rlframe.envs.make import make_env
from rlframe.envs.multi_agent import MultiAgentEnv
from rlframe.evaluation.evaluator import BaseEvaluator, EvaluationStopped, Stop, never
from rlframe.evaluation.policy import Policy
from rlframe.evaluation.team_policy import TeamPolicy, policy_of

MakeEnv = Callable[[], Any]
Function = Callable[[Policy | TeamPolicy, MakeEnv], Mapping[str, float]]
_BEAT_S = 1.0
_METRIC = re.compile(r"[^\s,/\"]+")
_OWN = ("return_best", "since_best", "restarts", "normalized_score")  # of the runner


def find_function(name: str) -> Function:
    """The function that `eval.function` names. Raises ConfigError if it is none of (policy, make_env)."""
    function: Any = find_attribute(name, "eval.function")
    if isinstance(function, type):
        raise ConfigError(f"eval.function={name} is a class; it must be a function of (policy, make_env)")
    try:
        inspect.signature(function).bind("policy", "make_env")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"eval.function={name} must be a function of (policy, make_env): {error}") from None
    return function


class EvaluationFunction(BaseEvaluator):
    """Calls `function(policy, make_env)`, and logs what it returns, {name: number}, as eval/<name>.

    `policy.act(observation)` acts greedily, and with explore=True as in training; `make_env()` makes a Gymnasium
    environment, which the function seeds and closes. Agents are compared by its `return_mean`, if it returns one.
    Where there are several agents, `policy` is as load_policy has it, and the environment PettingZoo's, parallel.
    """

    def __init__(
        self, function: Function, env: EnvConfig, agent: Agent, spaces: tuple[Space, Space], interval_steps: float = 0.0
    ) -> None:
        self.interval_steps = interval_steps
        self._function, self._env, self._agent = function, env, agent
        self._spaces = spaces

    def evaluate(self, number: int, stop: Stop = never) -> dict[str, float]:
        """Raises:
        PartError: the function raised, called sys.exit, or did not return numbers by name.
        EvaluationStopped: it asked the policy for an action after `stop` became true.
        """
        name = getattr(self._function, "__name__", "eval.function")
        policy: Any = policy_of(self._agent, self._spaces, self._env)
        policy.act = _unless(stop, policy.act)
        try:
            found = self._function(policy, self._make_env)
        except EvaluationStopped:
            raise
        except (Exception, SystemExit) as error:
            raise PartError(f"eval.function {name} failed: {describe(error)}") from error
        return self._checked(found, name)

    def _make_env(self) -> Any:
        env, limit = make_env(self._env), self._env.options.max_episode_steps
        if not isinstance(env.unwrapped, MultiAgentEnv):
            return env
        return _TimeLimit(env.unwrapped.env, limit) if limit else env.unwrapped.env

    def _checked(self, found: Any, name: str) -> dict[str, float]:
        try:
            metrics = {str(metric): float(value) for metric, value in found.items()}
        except (AttributeError, TypeError, ValueError):
            metrics = {}
        if not metrics:
            raise PartError(f"eval.function {name} must return numbers by name, not {str(found)[:200]}")
        wrong = next((metric for metric in metrics if not _METRIC.fullmatch(metric) or metric in _OWN), "")
        if wrong:
            raise PartError(f"eval.function {name} returned {wrong!r}, which cannot be the name of a metric")
        if not math.isfinite(metrics.get("return_mean", math.nan)):
            warn_once(f"eval.function {name} returns no finite return_mean, by which agents are compared")
        return {f"eval/{metric}": value for metric, value in metrics.items()}

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        """Nothing shows its progress, so it counts as alive as long as the process runs."""
        threading.Thread(target=_beat, args=(heartbeat,), name="heartbeat", daemon=True).start()


class _TimeLimit:
    """An environment of PettingZoo, parallel, whose agents are truncated after `limit` steps."""

    def __init__(self, env: Any, limit: int) -> None:
        self._env, self._limit, self._elapsed = env, limit, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def agents(self) -> list[str]:
        return [] if self._elapsed >= self._limit else self._env.agents

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._elapsed = 0
        return self._env.reset(seed=seed, options=options)

    def step(self, actions: Mapping[str, Any]) -> Any:
        self._elapsed += 1
        observations, rewards, terminated, truncated, infos = self._env.step(actions)
        if self._elapsed >= self._limit:
            truncated = {agent: not terminated[agent] for agent in truncated}
        return observations, rewards, terminated, truncated, infos


def _unless(stop: Stop, act: Callable[..., Any]) -> Callable[..., Any]:
    """The function `act`, until `stop` is true."""

    def acting(*given: Any, **by_name: Any) -> Any:
        if stop():
            raise EvaluationStopped
        return act(*given, **by_name)

    return acting


def _beat(heartbeat: np.ndarray) -> None:
    """Increment a number every second."""
    while True:
        time.sleep(_BEAT_S)
        heartbeat[0] += 1
