"""What a runner and its parts were made with, as keys of the command line: for params.json of runs made in scripts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import chz

from rlframe.core.flat import flatten
from rlframe.envs import EnvConfig
from rlframe.envs.make import env_name

if TYPE_CHECKING:
    from rlframe.runners.base import Runner


def config_of(runner: Runner) -> dict[str, Any]:
    """The flat config of its parts; without those of the user's own that do not say what they were made with."""
    algo, sampler, evaluator, env = runner.algo, runner.sampler, runner.evaluator, runner.sampler.env
    parts = {**algo.configs(), "model": runner.agent.model_config, "sampler": sampler.config}
    parts["runner"] = _options(runner)
    if env is not None:
        parts |= {"env": env_name(env.id), "env_kwargs": dict(env.kwargs), "env_backend": env.backend}
        parts |= {"env_options": env.options}
        if parts["sampler"] is not None:
            own = {"complete_episodes": env.whole_episodes, "env_restarts": env.restarts}
            parts["sampler"] = chz.replace(parts["sampler"], **own)
    parts |= {"seed": sampler.seed, "world_size": runner.ranks.world_size}
    if evaluator is not None and evaluator.config is not None:
        parts["eval"] = chz.replace(evaluator.config, **_other_env(evaluator.env, env))
    flat = flatten(**{key: value for key, value in parts.items() if value is not None})
    return {key: _in_json(value) for key, value in flat.items()}


def _in_json(value: Any) -> Any:
    """A value as it is, or as text what JSON does not have, such as an object among an environment's arguments."""
    if isinstance(value, dict):
        return {str(name): _in_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _other_env(own: EnvConfig | None, env: EnvConfig | None) -> dict[str, Any]:
    """The fields of EvalConfig that tell an evaluator's environment from that of training."""
    if own is None or env is None or own == env:
        return {}
    if own.id != env.id:
        return {"env": env_name(own.id), "env_kwargs": dict(own.kwargs)}
    changed = {name: value for name, value in own.kwargs.items() if env.kwargs.get(name) != value}
    return {"env_kwargs": changed}


def _options(runner: Runner) -> Any:
    """The Config of the runner's module; None if it is of the user's own, without one."""
    config = vars(sys.modules[type(runner).__module__]).get("Config")
    if config is None:
        return None
    limits = runner.limits
    return config(
        n_steps=runner.n_steps,
        log_interval_steps=runner.log_interval_steps,
        max_time_s=limits.max_time_s,
        target_score=limits.target_score,
        nonfinite=limits.nonfinite,
        **runner.options(),
    )
