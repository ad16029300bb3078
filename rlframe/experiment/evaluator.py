"""The evaluator that an experiment asks for: of episodes or a function, in this process or in one of its own."""

from __future__ import annotations

import inspect
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.core.parts import find_attribute
from rlframe.core.ranks import current_ranks
from rlframe.envs import EnvConfig, make_envs
from rlframe.experiment.config import Experiment
from rlframe.samplers import EvalConfig, Evaluator
from rlframe.samplers.async_evaluator import AsyncEvaluator, MakeEvaluator
from rlframe.samplers.evaluation_function import EvaluationFunction
from rlframe.samplers.evaluator import BaseEvaluator, NoEvaluator
from rlframe.samplers.filming_evaluator import FilmingEvaluator
from rlframe.system.affinity import Affinity


def make_evaluator(experiment: Experiment, agent: Agent, affinity: Affinity, envs: Any) -> BaseEvaluator | None:
    """The evaluator of a run, for its runner; None: it evaluates nothing. `envs`: those of training.

    Raises:
        ConfigError: eval.env has other spaces, there is no eval.function, or eval.video_every cannot film.
    """
    config, seed = experiment.eval, experiment.seed
    env = replace(experiment.eval_env_config(), gpus=affinity.gpus)
    if not experiment.evaluates:
        if config.video_every:
            raise ConfigError(f"eval.video_every={config.video_every} films evaluations, and this run makes none")
        return None
    spaces_ = envs.observation_space, envs.action_space
    if config.env:
        _check_spaces(env, *spaces_)
    supervision = experiment.sampler.supervision()
    of_workers = affinity.workers, replace(supervision, name="evaluation worker")
    make: MakeEvaluator = partial(_evaluator, env, config, seed, of_workers)
    if config.function:
        function = _function(config.function)
        make = partial(_evaluation_function, function, env, spaces_, config.interval_steps)
    if not config.asynchronous and not config.function:
        return make(agent)
    if current_ranks().rank:
        return NoEvaluator(config.interval_steps)  # rank 0 evaluates
    if not config.asynchronous:
        return make(agent)
    own = replace(supervision, name="evaluation")
    return AsyncEvaluator(make, agent, config.interval_steps, affinity.master, own)


def _function(name: str) -> Any:
    function = find_attribute(name, "eval.function")
    if isinstance(function, type):
        raise ConfigError(f"eval.function={name} is a class; it must be a function of (policy, make_env)")
    try:
        inspect.signature(function).bind("policy", "make_env")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"eval.function={name} must be a function of (policy, make_env): {error}") from None
    return function


def _evaluator(env: EnvConfig, config: EvalConfig, seed: int, of_workers: Any, agent: Agent) -> BaseEvaluator:
    make = partial(Evaluator, env, agent, config, seed, *of_workers)
    films = config.video_every and not current_ranks().rank
    return FilmingEvaluator(make, env, agent, config, seed) if films else make()


def _evaluation_function(
    function: Any, env: EnvConfig, spaces_: tuple[Space, Space], interval_steps: float, agent: Agent
) -> BaseEvaluator:
    return EvaluationFunction(function, env, agent, *spaces_, interval_steps)


def _check_spaces(env: EnvConfig, observation_space: Space, action_space: Space) -> None:
    with closing(make_envs(env, 1, [0])) as envs:
        for name, own, other in (
            ("observation", observation_space, envs.observation_space),
            ("action", action_space, envs.action_space),
        ):
            if own != other:
                raise ConfigError(f"eval.env={env.id} has the {name} space {other}, and the agent is for {own}")
