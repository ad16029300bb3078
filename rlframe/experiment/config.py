"""The Experiment config: everything that decides a run, and its way from and to key=value words."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import chz
import yaml

from rlframe.core.config import AUTO, choice, count, count_or_auto, module_part, nearest, option
from rlframe.core.errors import ConfigError, pluralize
from rlframe.envs import EnvConfig
from rlframe.kernels.precision import PRECISIONS
from rlframe.models import ModelConfig
from rlframe.runners import minibatch_rl, minibatch_rl_eval, sync_rl
from rlframe.runners.base import RunnerConfig
from rlframe.samplers import EvalConfig
from rlframe.samplers.base import SamplerConfig

PARTS = {
    "algo": "rlframe.algos",
    "sampler": "rlframe.samplers",
    "runner": "rlframe.runners",
}  # key: where its names are
_SIZES = tuple(f"sampler.{name}" for name in chz.chz_fields(SamplerConfig))  # which all samplers have
_FREE = ("env_kwargs.", "eval.env_kwargs.")  # keys below these are the environment's own


@chz.chz
class Experiment:
    """One run, whole: everything that decides its result, and where its record goes."""

    algo: Any = chz.field(meta_factory=module_part(PARTS["algo"], "ppo"), doc="algorithm; or package.module, ./file.py")
    env: str = option("CartPole-v1", "Gymnasium id, or package.module:callable")
    env_kwargs: Mapping[str, Any] = chz.field(default_factory=dict, doc="the environment's own: env_kwargs.name=value")
    env_backend: str = choice("auto", ("auto", "native", "envpool", "python"), "what steps the environments")
    model: ModelConfig
    sampler: Any = chz.field(meta_factory=module_part(PARTS["sampler"], "auto"), doc="who steps the environments")
    runner: Any = chz.field(meta_factory=module_part(PARTS["runner"], "minibatch_rl_eval"), doc="the training loop")
    eval: EvalConfig
    affinity: str = option("auto", "auto | none | a code such as 16cpu_4gpu_1gpr_0slt: the part of the machine to use")
    world_size: int = count(1, "ranks: processes that train together, each with its own sampler (runner=sync_rl)")
    device: str = option("auto", "auto | cpu | cuda:0: where the agent acts and learns")
    threads: int = count_or_auto("torch threads; 0: for images one a core, else one; auto: measured at the start", 0)
    precision: str = choice("auto", PRECISIONS, "of learning's matrix products; auto: bf16 on a CPU with units for it")
    seed: int = count(0, "root of every random stream")
    name: str = option("", "of the run; default: algorithm and environment")
    run_ID: int = count(0, "number of the run in its directory")
    log_dir: str = option("", "directory of runs; default: data/local/<date>/<time>/<name>")
    snapshot_mode: str = choice("last", ("none", "last", "all", "gap", "best"), "which snapshots are kept")
    snapshot_gap: int = count(0, "env_steps between kept snapshots, with snapshot_mode=gap")
    snapshot_keep: int = count(2, "newest snapshots kept, with snapshot_mode=last or best")
    snapshot_best: str = option("", "metric that best goes by, -metric where lower is better; default: the mean return")
    snapshot_errors: str = choice("stop", ("stop", "continue"), "what a disk means that refuses a snapshot or a row")
    init: str = option("", "snapshot or run directory to take trained weights from")

    @chz.validate
    def _check(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size={self.world_size} must be at least 1")
        if self.eval.n_episodes < self.world_size:
            raise ConfigError(
                f"eval.n_episodes={self.eval.n_episodes} must be at least world_size={self.world_size}: ranks share"
            )
        if self.seed < 0 or self.threads < AUTO or self.run_ID < 0:
            raise ConfigError(f"seed={self.seed}, threads={self.threads}, run_ID={self.run_ID} must not be negative")
        if self.snapshot_mode == "gap" and self.snapshot_gap < 1:
            raise ConfigError(f"snapshot_mode=gap needs snapshot_gap=N env_steps, got {self.snapshot_gap}")

        if self.snapshot_keep < 1:
            raise ConfigError(f"snapshot_keep={self.snapshot_keep} must be at least 1: the newest is always kept")
        if self.snapshot_errors == "continue" and self.world_size > 1:
            raise ConfigError("snapshot_errors=continue needs world_size=1: of several ranks, all must save or none")

    def env_config(self) -> EnvConfig:
        """The training environment."""
        return EnvConfig(self.env, dict(self.env_kwargs), self.env_backend)

    def eval_env_config(self) -> EnvConfig:
        """The evaluation environment."""
        return EnvConfig(self.env, {**self.env_kwargs, **self.eval.env_kwargs}, self.env_backend)

    def title(self) -> str:
        """`name`, or one made of algorithm and environment, usable as a directory's."""
        environment = self.env.rpartition("/")[2].rpartition(":")[2]
        return (
            self.name or f"{part_name(self.algo, PARTS['algo']).rpartition('/')[2].removesuffix('.py')}_{environment}"
        )


def part_name(config: object, package: str) -> str:
    """The word that names a part: its module's name, short inside `package`; a path for a user's file."""
    module = type(config).__module__
    if module.startswith(f"{package}."):
        return module.removeprefix(f"{package}.")
    file = sys.modules[module].__file__
    return str(file) if "." not in module and file else module


def flatten(**fields: Any) -> dict[str, Any]:
    """Configs and values as the keys of the command line, JSON-able: what `logger_context` keeps of a script's run.

    flatten(algo=ppo.Config(clip=0.2), env="CartPole-v1") gives {"algo": "ppo", "algo.clip": 0.2, ..., "env": ...}.
    """
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if key in PARTS:
            flat[key] = part_name(value, PARTS[key])
        if chz.is_chz(value):
            below = flatten(**{name: getattr(value, name) for name in chz.chz_fields(value)})
            flat.update({f"{key}.{name}": sub for name, sub in below.items()})
        elif key not in PARTS:
            flat[key] = _plain(value)
    return flat


def to_flat(experiment: Experiment) -> dict[str, Any]:
    """Every key of an experiment with its value: what params.json holds, and what `from_flat` reads."""
    return flatten(**{field: getattr(experiment, field) for field in chz.chz_fields(experiment)})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it; as a word of the command line it means the same
    return list(value) if isinstance(value, tuple) else value


def from_flat(*layers: Mapping[str, Any]) -> Experiment:
    """The experiment that some layers of key: value describe, later ones first in rank.

    A layer that names another algo, sampler or runner than a layer below it hides that layer's fields of the part, but
    for the sizes of the sampler's batch.

    Raises:
        ConfigError: an unknown key or name (with the nearest), a wrong type or value.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for part in PARTS:
            if part in layer and part in merged and merged[part] != layer[part]:
                merged = {k: v for k, v in merged.items() if not k.startswith(f"{part}.") or k in _SIZES}
        merged |= layer
    arguments: dict[str, Any] = {}
    for key, value in merged.items():
        free = next((prefix for prefix in _FREE if key.startswith(prefix)), "")
        if free:
            arguments[free[:-1]] = {**arguments.get(free[:-1], {}), key.removeprefix(free): _parse(key, value)}
        elif key in ("env_kwargs", "eval.env_kwargs"):
            arguments[key] = {**_mapping(key, value), **arguments.get(key, {})}
        else:
            arguments[key] = chz.Castable(_text(value))
    try:
        return chz.Blueprint(Experiment).apply(arguments).make()
    except chz.blueprint._entrypoint.EntrypointException as error:
        raise ConfigError(_readable(str(error).strip())) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None


# What a command line may have beside the config's keys.
_BESIDE = ("experiment", "resume", "trust", "dry_run", "tune_sampler", "traceback", "retries", "stall_s", "seeds")


def _readable(message: str) -> str:
    """The line that matters of chz's explanation."""
    unknown = re.match(r"Extraneous argument '([^']+)'", message)
    if unknown:
        near = re.search(r"Did you mean '([^']+)'", message)
        hint = f"; did you mean {near[1]}?" if near else nearest(unknown[1], _BESIDE)
        return f"unknown key {unknown[1]}{hint} (--help lists the keys)"
    bad = re.match(r"Could not interpret argument '(.*)' provided for param '([^']+)'", message)
    reasons = re.findall(r"^- Failed to interpret it as a .*:\n(.+)$", message, re.MULTILINE)
    if not bad or len(reasons) != 2:
        return message
    return f"{bad[2]}={bad[1]}: {reasons[bad[2] in PARTS]}"


def _parse(key: str, value: Any) -> Any:
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except (yaml.YAMLError, RecursionError, ValueError):  # of a date that is none
        raise ConfigError(f"{key}={value:.60} is no YAML; write text that looks like it in quotes: '\"...\"'") from None


def _mapping(key: str, value: Any) -> dict[str, Any]:
    parsed = _parse(key, value)
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{key}={value!r} must be a mapping; write {key}.name=value")
    return dict(parsed)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "[]"
    return str(value)


def for_ranks(experiment: Experiment, world_size: int) -> Experiment:
    """The experiment as it is trained in so many ranks: by SyncRl, if they are several.

    Raises:
        ConfigError: it wants another number of ranks, or a runner that trains in one process.
    """
    if experiment.world_size not in (1, world_size):
        raise ConfigError(f"world_size={experiment.world_size}, but {pluralize(world_size, 'rank')} were started")
    runner = experiment.runner
    if world_size > 1 and isinstance(runner, minibatch_rl.Config | minibatch_rl_eval.Config):
        runner = sync_rl.Config(**{name: getattr(runner, name) for name in chz.chz_fields(RunnerConfig)})
    if world_size > 1 and not isinstance(runner, sync_rl.Config):
        name = part_name(runner, PARTS["runner"])
        raise ConfigError(f"world_size={world_size} needs runner=sync_rl; runner={name} trains in one process")
    return chz.replace(experiment, world_size=world_size, runner=runner)
