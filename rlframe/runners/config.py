"""RunnerConfig, the options of a runner, `runner.<field>=value`; and how a script's runner is recorded as keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import chz

from rlframe.agents import Agent
from rlframe.core.config import choice, count, number, positive
from rlframe.core.errors import ConfigError
from rlframe.core.parts import ROOTS, flatten, kinds_of
from rlframe.envs import EnvConfig
from rlframe.envs.make import env_name
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.runners.callbacks import Callback
from rlframe.runners.learner import Learner
from rlframe.samplers import Source
from rlframe.system.affinity import Affinity
from rlframe.system.distributed import TIMEOUT_S

NO_AFFINITY: Mapping[str, Any] = MappingProxyType({})


@chz.chz
class RunnerConfig:
    """The options that all runners have, and the base of those of each."""

    runner_class: ClassVar[Any]  # a subclass of Runner
    samples_in_background = False  # the sampler has its own process: n_slots, learner_cores and supervision() apply
    trains_in_ranks = False  # world_size may be above 1
    becomes_sync_rl = False  # with world_size above 1
    evolves = False  # for evolution strategies, and for nothing else
    learns_from_data = False  # without a sampler

    n_steps: int = count(1_000_000, "env_steps to train, over all ranks")
    log_interval_steps: int = count(10_000, "env_steps between rows of the log, evaluations and snapshots")
    max_time_s: float = number(0.0, "seconds after which this start saves a snapshot and ends; 0: no limit")
    window: int = count(100, "training episodes, the last ones, that episode/return_mean and similar metrics are of")
    target_return: float = number(
        math.inf,
        "end once eval/return_mean, or episode/return_mean without evaluation, is this high; inf: never",
        low=-math.inf,
    )
    timeout_s: float = positive(TIMEOUT_S, "seconds that a rank waits for the others before the run ends (world_size)")
    nonfinite: str = choice(
        "stop", ("stop", "skip"), "what to do if a loss or gradient is NaN or Inf; skip skips the update"
    )

    def sampler_count(self) -> int:
        """Samplers that share the environments."""
        return 1

    def evaluates(self, n_episodes: int) -> bool:
        """Whether the runner evaluates, given eval.n_episodes."""
        return n_episodes > 0

    def batches_held(self) -> int:
        """Batches in memory at once."""
        return 1

    def make_envs(self, sampler: Any, env: EnvConfig, seed: int, affinity: Affinity) -> Any:
        """The environments, or the processes that have them, as this sampler wants them."""
        return sampler.make_envs(env, seed, affinity.workers)

    def make_sampler(
        self, sampler: Any, algo: Any, envs: Any, agent: Agent, seed: int, devices: Sequence[str] = ("cpu",)
    ) -> Source:
        """The sampler of these environments.

        Args:
            algo: the algorithm's config.
            devices: where samplers in processes of their own act, in turn, unless their config says where.
        """
        made: Source = sampler.make_sampler(envs, agent, seed)
        sampler.follow_episodes(made)
        return made

    def make_runner(
        self,
        sampler: Source,
        learners: Learner | Mapping[str, Learner],
        evaluator: BaseEvaluator | None,
        callbacks: Sequence[Callback],
        stop: str = "",
    ) -> Any:
        """The Runner with these options; `stop`: see Runner. Raises ConfigError if its Config names no class."""
        if "runner_class" not in dir(self):
            raise ConfigError(f"{type(self).__name__} needs runner_class, a subclass of Runner")
        if missing := sorted(self.runner_class.__abstractmethods__):
            raise ConfigError(f"{self.runner_class.__name__}, a subclass of Runner, needs {', '.join(missing)}")
        return self.runner_class(sampler, learners, self, evaluator, callbacks, stop)


_C = TypeVar("_C", bound=RunnerConfig)


def as_kind(options: RunnerConfig, kind: type[_C]) -> _C:
    """A config of this kind, with the options that all runners have from `options`."""
    return kind(**{name: getattr(options, name) for name in chz.chz_fields(RunnerConfig)})


def config_of(runner: Any) -> dict[str, Any]:
    """The flat config of its parts; without those of the user's own that do not say what they were made with."""
    sampler, evaluator = runner.sampler, runner.evaluator
    env = sampler.env or (evaluator.env if evaluator is not None else None)
    parts: dict[str, Any] = {"sampler": sampler.config, "runner": _options(runner)}
    if env is not None:
        parts |= {"env": env_name(env.id), "env_kwargs": dict(env.kwargs), "env_backend": env.backend}
        parts |= {"env_options": env.options}
        if parts["sampler"] is not None:
            own = {"complete_episodes": env.whole_episodes, "env_restarts": env.restarts}
            parts["sampler"] = chz.replace(parts["sampler"], **own)
    parts |= {"seed": sampler.seed, "world_size": runner.ranks.world_size}
    if evaluator is not None and evaluator.config is not None:
        parts["eval"] = chz.replace(evaluator.config, **_other_env(evaluator.env, env))
    flat = _flat(parts)
    for learner in runner.learners.values():
        made_with = {"algo": learner.algo.config, "reward": learner.rewards.config}
        own = _flat({**made_with, "model": learner.agent.model_config})
        flat |= {f"agents.policies.{learner.name}.{key}" if learner.name else key: value for key, value in own.items()}
    return {key: _in_json(value) for key, value in flat.items()}


def _flat(parts: Mapping[str, Any]) -> dict[str, Any]:
    return flatten(**{key: value for key, value in parts.items() if value is not None})


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


def _options(runner: Any) -> Any:
    """Its options as those of its kind; None if it is of the user's own, without one."""
    options, evaluates = runner.options, runner.evaluator is not None
    if type(options) is RunnerConfig:  # given in a script
        known: Iterable[Any] = kinds_of(ROOTS["runner"]).values()
        kinds = [kind for kind in known if kind.runner_class is type(runner)]
        found = [kind for kind in kinds if as_kind(options, kind).evaluates(int(evaluates)) == evaluates]
        if not found:
            return None
        options = as_kind(options, found[0])
    made_with = runner.sampler.made_with()
    return chz.replace(options, **{key: x for key, x in made_with.items() if key in chz.chz_fields(type(options))})
