"""The Experiment config, everything that decides a run; and what it is for each of the ranks that train it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import chz

from rlframe.algos.defaults import learns_from
from rlframe.core.config import AUTO, choice, count, count_or_auto, idle_while, names, option
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.parts import ROOTS, part, part_name, values_of
from rlframe.core.schedule import at_last
from rlframe.core.seeding import Role, seed_int
from rlframe.data.transform import load_transform
from rlframe.data.writing import COMPRESSIONS
from rlframe.envs import EnvConfig, EnvOptions
from rlframe.envs.make import NO_ENV
from rlframe.evaluation import EvalConfig
from rlframe.experiment.agents import AgentsConfig
from rlframe.kernels.device import PRECISIONS
from rlframe.models import ModelConfig
from rlframe.record.console import LEVELS
from rlframe.record.loggers import DEFAULT_LOGGERS
from rlframe.replay.make import PACKAGE as OF_REPLAYS
from rlframe.rewards import RewardConfig
from rlframe.rollout.stepper import check_room
from rlframe.runners import SyncRlConfig
from rlframe.runners.config import RunnerConfig, as_kind
from rlframe.runners.stop_rule import StopRule
from rlframe.samplers import SamplerConfig, no_sampler
from rlframe.system.cluster import RayOptions
from rlframe.system.env_vars import check_env_vars


def _kind(name: str, config: Any) -> str:
    """The value of algo=, sampler= or runner= that names a config."""
    return part_name(config, ROOTS[name])


@chz.chz
class Experiment:
    """The settings of one run: everything that decides its result, and where it is recorded."""

    IDLE = (
        idle_while("snapshot_keep", snapshot_mode=("none", "all", "gap"))
        | idle_while("snapshot_best", snapshot_mode="none")
        | idle_while("record_compression", "record_transform", record="")
    )

    algo: Any = part(ROOTS["algo"], "ppo", "algorithm; or package.module, ./file.py")
    env: str = option("CartPole-v1", "Gymnasium id, or package.module:callable")
    env_kwargs: Mapping[str, Any] = chz.field(default_factory=dict, doc="of the environment: env_kwargs.name=value")
    env_options: EnvOptions
    env_backend: str = choice("auto", ("auto", "native", "envpool", "python"), "what steps the environments")
    model: ModelConfig
    agents: AgentsConfig
    reward: RewardConfig
    ray: RayOptions
    sampler: Any = part(ROOTS["sampler"], "auto", "how environments are stepped", SamplerConfig)
    runner: Any = part(ROOTS["runner"], "minibatch_rl_eval", "the training loop", RunnerConfig)
    eval: EvalConfig
    env_vars: Mapping[str, Any] = chz.field(
        default_factory=dict,
        doc="environment variables of all processes: env_vars.NAME=value; of workers: env_vars.workers.NAME=value",
    )
    affinity: str = option("auto", "auto | none | a code such as 16cpu_4gpu_1gpr_0slt: the part of the machine to use")
    world_size: int = count(1, "ranks: processes that train together, each with its own sampler (runner=sync_rl)")
    learners: int = count_or_auto("processes that learn one run together, each a part of a batch; auto: measured", 1)
    device: str = option("auto", "auto | cpu | cuda:0: where the agent acts and learns")
    threads: int = count_or_auto("torch threads; 0: one, for images one per free core; auto: measured at the start", 0)
    precision: str = choice(
        "auto", PRECISIONS, "of matrix products in learning; auto: bf16 on a CPU that is faster in it"
    )
    compile: str = choice(
        "auto",
        ("auto", "true", "false"),
        "updates, with a C++ compiler; auto: where a run gains more time than that takes",
    )
    seed: int = count(0, "root of every random stream")
    name: str = option("", "name of the run; default: algorithm and environment")
    run_ID: int = count(0, "number of the run in its directory")
    log_dir: str = option("", "directory of runs; default: data/local/<date>/<time>/<name>")
    snapshot_mode: str = choice("last", ("none", "last", "all", "gap", "best"), "which snapshots are kept")
    snapshot_gap: int = count(0, "env_steps between kept snapshots, with snapshot_mode=gap")
    snapshot_keep: int = count(2, "newest snapshots kept, with snapshot_mode=last or best")
    snapshot_best: str = option("", "metric that best compares, -metric if lower is better; default: the mean return")
    snapshot_errors: str = choice("stop", ("stop", "continue"), "what to do if a snapshot or row cannot be written")
    stop: str = option("", "end when this holds, such as 'eval/return_mean >= 475 and env_steps > 5e4' (metric names)")
    init: str = option("", "snapshot or run directory to take trained weights from")
    init_optimizer: bool = option(False, "with init, take the state of its optimizers too")
    log_level: str = choice("INFO", LEVELS, "what the console shows; WARNING: no rows of the log either")
    callbacks: tuple[str, ...] = names(
        (), "[module:Class,./file.py:Class(key=value)]: your subclasses of rlframe.runners.Callback"
    )
    record: str = option(
        "",
        "dataset to write all episodes to: an id such as name-{seed}-v0, or a path; {seed} and {run_ID} are replaced",
    )
    record_compression: str = choice("none", COMPRESSIONS, "of that dataset")
    record_transform: str = option("", "module:function of an Episode that changes it before it is written")
    sync: str = option("", "URI (s3://, gs://, sftp://, file://) or folder to which the run is copied; empty: none")
    loggers: tuple[str, ...] = names(
        DEFAULT_LOGGERS, "[tensorboard,wandb,mlflow,trackio,./file.py:Class]: of the log, beside progress.csv"
    )

    @chz.validate
    def _check(self) -> None:
        check_env_vars(self.env_vars)
        n_episodes = self.eval.n_episodes
        if self.learners == 0:
            raise ConfigError("learners=0 must be at least 1, or auto")
        if self.learners != 1 and self.world_size > 1:
            learners = "auto" if self.learners == AUTO else self.learners
            raise ConfigError(f"learners={learners} needs world_size=1, not {self.world_size}; choose one of them")
        if self.init_optimizer and not self.init:
            raise ConfigError("init_optimizer=true needs init=RUN_DIR, whose optimizers it takes")
        if self.stop and (name := StopRule(self.stop).needs("eval")) and not self.evaluates:
            raise ConfigError(f"stop={self.stop:.200}: this run does not evaluate, so that {name} is never known")
        if self.snapshot_best.lstrip("-").startswith("eval/") and not self.evaluates:
            raise ConfigError(
                f"snapshot_best={self.snapshot_best}: this run does not evaluate; use episode/return_mean"
            )
        episodes = self.evaluates and not (self.eval.asynchronous or self.eval.plays_no_episodes)
        if episodes and n_episodes < self.n_ranks:
            key = "learners" if self.learners > 1 else "world_size"
            raise ConfigError(
                f"eval.n_episodes={n_episodes} must be at least {key}={self.n_ranks}: each rank plays some"
            )
        self._check_complete_episodes()
        if (self.snapshot_mode == "gap") != (self.snapshot_gap > 0):
            raise ConfigError(
                f"snapshot_mode=gap and snapshot_gap=N env_steps need each other, "
                f"got snapshot_mode={self.snapshot_mode} and snapshot_gap={self.snapshot_gap}"
            )
        if self.snapshot_errors == "continue" and self.n_ranks > 1:
            raise ConfigError(
                "snapshot_errors=continue needs world_size=1 and learners=1: all ranks must save, or none"
            )

    def _check_complete_episodes(self) -> None:
        sampler, longest = self.sampler, self.env_options.max_episode_steps
        if not sampler.complete_episodes:
            return
        if learns_from(self.algo) == "replay":
            name = _kind("algo", self.algo)
            raise ConfigError(f"sampler.complete_episodes=true is for policy gradients; algo={name} learns from replay")
        if longest:
            check_room(longest, sampler.batch_T)

    @property
    def evaluates(self) -> bool:
        """Whether it evaluates its agent while it trains."""
        other = bool(self.eval.function or self.eval.estimate)
        return bool(self.runner.evaluates(self.eval.n_episodes or int(other)))

    @property
    def n_ranks(self) -> int:
        """Processes that train this run together, all over."""
        return self.world_size * max(1, self.learners)  # AUTO is negative

    @property
    def n_samplers(self) -> int:
        """The ranks that have environments: learners from replay have theirs on rank 0."""
        return self.world_size if learns_from(self.algo) == "replay" else self.n_ranks

    def sampler_config(self) -> Any:
        """With the discount of the algorithm, unless it has its own."""
        discount = at_last(getattr(self.algo, "discount", 1.0))
        return chz.replace(self.sampler, discount=discount) if math.isnan(self.sampler.discount) else self.sampler

    def env_config(self) -> EnvConfig:
        policies = self.agents.policy_map()
        own = EnvConfig(self.env, dict(self.env_kwargs), self.env_backend, options=self.env_options, policies=policies)
        config: EnvConfig = self.sampler.adapted(own)
        return config

    def eval_env_config(self) -> EnvConfig:
        own, options = self.env_kwargs if self.eval.env in ("", self.env) else {}, self.env_options
        if "max_episode_steps" in self.eval.env_kwargs:
            options = chz.replace(options, max_episode_steps=0)
        kwargs = {**own, **self.eval.env_kwargs}
        env, policies = self.eval.env or self.env, self.agents.policy_map(league=False)
        return EnvConfig(env, kwargs, self.env_backend, options=options, mode="eval", policies=policies)

    def of_policy(self, name: str, index: int = 0) -> Experiment:
        """What one of several policies is made from: its own algorithm, model, weights and seed."""
        own = self.agents.policies.get(name)
        if own is None:
            return self
        seed = seed_int(self.seed, Role.POLICY, index) if index else self.seed
        return chz.replace(self, algo=own.algo, model=own.model, init=own.init or self.init, seed=seed)

    def without_init(self) -> Experiment:
        """The experiment that starts from random weights, or from those of its own snapshot."""
        policies = {name: chz.replace(each, init="") for name, each in self.agents.policies.items()}
        league = chz.replace(self.agents.league, members=())
        agents = chz.replace(self.agents, policies=policies, league=league)
        return chz.replace(self, init="", init_optimizer=False, agents=agents)

    def on_ray(self) -> bool:
        """Whether a part of it is in actors of Ray."""
        replays = (value for _, value, key in values_of(self.algo) if key.part and key.part.package == OF_REPLAYS)
        return self.sampler.on_ray or any(each.on_ray for each in replays)

    def title(self) -> str:
        """`name`, or algorithm and environment; usable as the name of a directory."""
        algo = _kind("algo", self.algo).rpartition("/")[2].rpartition(":")[2].removesuffix(".py")
        env = self.env.rpartition("/")[2].rpartition(":")[2].rpartition("<locals>.")[2]
        env = re.sub(r"[^\w.\-]", "", env)  # without () and <lambda>
        return self.name or f"{algo}_{env}"


def _check_places(experiment: Experiment) -> None:
    """Raise ConfigError unless its sampler can be where it is wanted, and be divided."""
    runner, sampler = experiment.runner, experiment.sampler
    if sampler.device and (not runner.samples_in_background or sampler.collects_ahead):
        raise ConfigError(
            f"sampler.device={sampler.device} is for a sampler in a process of its own (runner=async_rl); others act "
            f"on the learner's device, or in their workers"
        )
    if sampler.device not in ("", "cpu") and sampler.acts_in_workers:
        raise ConfigError(
            f"sampler.device={sampler.device}: the workers of sampler=cpu act on the CPU; use sampler=gpu"
        )
    if not experiment.on_ray() and experiment.ray != (default := RayOptions()):
        given = {name: getattr(experiment.ray, name) for name in chz.chz_fields(RayOptions)}
        key = next(name for name, value in given.items() if value != getattr(default, name))
        raise ConfigError(f"ray.{key}={given[key]} is for sampler=ray and replay=ray; remove it")
    if (n := runner.sampler_count()) > 1:
        if sampler.collects_ahead:
            name = _kind("sampler", sampler)
            raise ConfigError(f"runner.n_samplers={n}: sampler={name} collects ahead by itself; use 1")
        sampler.divided(n, "runner.n_samplers")


def _check_recording(experiment: Experiment) -> None:
    """Raise ConfigError unless all that a run should record is there to be recorded."""
    runner, name = experiment.runner, f"record={experiment.record:.100}"
    load_transform(experiment.record_transform, "record_transform")
    for key in ("record_compression", "record_transform"):
        if not experiment.record and (value := getattr(experiment, key)) not in ("", "none"):
            raise ConfigError(f"{key}={value:.100} is for record=NAME; give both, or none")
    if experiment.record and (runner.evolves or runner.learns_from_data):
        raise ConfigError(f"{name} writes the batches of a sampler, which runner={_kind('runner', runner)} has not")
    if experiment.record and experiment.env_options.normalize_reward:
        raise ConfigError(f"{name} writes the sampler's rewards, not those of env.normalize_reward=true; remove it")


def _check_data(experiment: Experiment) -> None:
    """Raise ConfigError unless a runner without a sampler has data, and one with a sampler a place for its rows."""
    algo, name = experiment.algo, _kind("algo", experiment.algo)
    replay = algo.replay if learns_from(algo) == "replay" else None
    if not experiment.runner.learns_from_data:
        if replay is not None and not replay.is_live():
            raise ConfigError(
                f"algo.replay.live=0: the rows of runner={_kind('runner', experiment.runner)} would be lost; use "
                f"runner=offline_rl, or algo.replay.live=0.5 to learn from both"
            )
        if check := getattr(algo, "check_run", None):
            check(experiment.runner.n_steps)
        return
    if experiment.env == NO_ENV and experiment.evaluates and not (experiment.eval.env or experiment.eval.estimate):
        raise ConfigError(f"env={NO_ENV} cannot be played: give eval.env=, eval.estimate= or eval.n_episodes=0")
    how = "algo.replay=dataset algo.replay.path=NAME"
    if replay is None:
        raise ConfigError(f"runner=offline_rl needs an algorithm with replay ({how}), which algo={name} has not")
    if not replay.has_data:
        raise ConfigError(f"runner=offline_rl learns from data: give {how}, or another runner")
    if replay.is_live():
        raise ConfigError(f"algo.replay.live={replay.live:g} is not for runner=offline_rl, which plays nothing")


def _check_policies(experiment: Experiment) -> None:
    """Raise ConfigError unless the algorithms of several policies can learn here, and side by side."""
    for name, policy in experiment.agents.policies.items():
        algo, kind, key = policy.algo, learns_from(policy.algo), f"agents.policies.{name}.algo"
        if kind == "episodes":
            raise ConfigError(f"{key}={_kind('algo', algo)} learns from whole episodes of a single agent; use another")
        if kind == "replay" and not algo.replay.is_live():
            raise ConfigError(f"{key}.replay.live=0: the rows of its agents would be lost; use {key}.replay.live=0.5")
        if experiment.learners > 1 and experiment.n_samplers == 1:
            n, rows = experiment.learners, getattr(algo, "batch_size", 0)
            if kind != "replay" or rows % n:
                has = f"batch_size={rows}" if rows else "no replay"
                raise ConfigError(
                    f"learners={n} divides the rows of updates from replay, and {key}={_kind('algo', algo)} has {has}; "
                    f"use learners=1, or world_size={n}"
                )


def _check_league(experiment: Experiment) -> None:
    """Raise ConfigError unless opponents can be replaced exactly between batches."""
    runner, n = experiment.runner, experiment.agents.league.opponents
    if n and (runner.samples_in_background or runner.evolves or runner.learns_from_data or experiment.sampler.on_ray):
        name = _kind("runner", runner)
        raise ConfigError(
            f"agents.league.opponents={n} replaces opponents between batches, for which runner={name} with "
            f"sampler={_kind('sampler', experiment.sampler)} is not made; use runner=minibatch_rl_eval"
        )
    if n and experiment.n_ranks > 1:
        raise ConfigError(f"agents.league.opponents={n} needs world_size=1 and learners=1, not {experiment.n_ranks}")


def check_parts(experiment: Experiment) -> None:
    """Raise ConfigError unless its algorithm, runner and sampler are made for each other."""
    algo, runner, sampler = experiment.algo, experiment.runner, experiment.sampler
    _check_data(experiment)
    _check_recording(experiment)
    _check_places(experiment)
    _check_policies(experiment)
    _check_league(experiment)
    sampler.collector_class()
    evolves = learns_from(algo) == "episodes"
    if evolves and not runner.evolves:
        name = _kind("algo", algo)
        raise ConfigError(f"algo={name} needs runner=evolution, not runner={_kind('runner', runner)}")
    if not runner.evolves:
        return
    if (bonus := part_name(experiment.reward.bonus, "rlframe.rewards")) != "none":
        name = _kind("algo", algo)
        raise ConfigError(f"reward.bonus={bonus} changes rewards step by step, but algo={name} learns from episodes")
    if not evolves:
        raise ConfigError(f"runner=evolution is for algo=es or ars, not algo={_kind('algo', algo)}")
    workers = sampler.worker_count()
    for key, wrong in {
        f"sampler={_kind('sampler', sampler)}": workers and not (sampler.acts_in_workers or sampler.undecided),
        f"sampler.decorrelation_steps={sampler.decorrelation_steps}": sampler.decorrelation_steps,
        f"sampler.statistics=[{','.join(sampler.statistics)}]": sampler.statistics,
        f"sampler.collector={sampler.collector}": sampler.collector,
        "sampler.complete_episodes=true": sampler.complete_episodes,
        f"sampler.env_restarts={sampler.env_restarts}": sampler.env_restarts,
        "env.normalize_reward=true": experiment.env_options.normalize_reward,
        "threads=auto": experiment.threads == AUTO,
    }.items():
        if wrong:
            raise ConfigError(
                f"{key} has no meaning with runner=evolution, whose workers play whole episodes; remove it"
            )


def for_ranks(experiment: Experiment, world_size: int) -> Experiment:
    """The experiment as it is trained in `world_size` ranks, or by its learners: with runner=sync_rl if several.

    Raises:
        ConfigError: it asks for another number of ranks, its runner cannot train in ranks, or parts do not fit.
    """
    check_parts(experiment)
    if experiment.world_size not in (1, world_size) or (experiment.learners > 1 and world_size > 1):
        asked = f"learners={experiment.learners}" if experiment.learners > 1 else f"world_size={experiment.world_size}"
        raise ConfigError(f"{asked}, but {pluralize(world_size, 'rank')} were started")
    experiment = chz.replace(experiment, world_size=world_size)
    if experiment.n_ranks == 1:
        return experiment
    runner, config = experiment.runner, experiment.eval
    if runner.becomes_sync_rl:
        runner = as_kind(runner, SyncRlConfig)
    if not runner.trains_in_ranks:
        name = _kind("runner", runner)
        asked = f"learners={experiment.learners}" if experiment.learners > 1 else f"world_size={world_size}"
        needs = ": raise sampler.n_workers instead" if runner.evolves else " needs runner=sync_rl"
        raise ConfigError(f"{asked}{needs}; runner={name} trains in one process")
    if not experiment.evaluates:
        config = chz.replace(config, n_episodes=0, function="")
    return chz.replace(experiment, runner=runner, eval=config)


def share_of(experiment: Experiment, rank: int) -> Experiment:
    """What one of its learners does: its part of the environments, or with replay, all of them on rank 0.

    Raises:
        ConfigError: the environments or the rows of an update cannot be divided equally.
    """
    n, sampler, algo = experiment.learners, experiment.sampler, experiment.algo
    if n == 1:
        return experiment
    if experiment.threads <= 0:  # a learner has a core
        experiment = chz.replace(experiment, threads=1)
    if experiment.n_samplers == 1:
        if not hasattr(algo, "batch_size"):
            name = _kind("algo", algo)
            raise ConfigError(f"learners={n} divides the rows of an update, but algo={name} has no batch_size")
        if algo.batch_size % n:
            raise ConfigError(f"learners={n} must divide algo.batch_size={algo.batch_size}: each learns from a part")
        if rank:
            sampler = no_sampler.NoSamplerConfig(batch_T=sampler.batch_T, batch_B=sampler.batch_B)
        return chz.replace(experiment, sampler=sampler)
    return chz.replace(experiment, sampler=sampler.divided(n, "learners"))


def whole_of(share: Experiment, experiment: Experiment) -> Experiment:
    """The experiment again, from rank 0's share of it as `hardware.resolve` returned it."""
    sampler = share.sampler
    if experiment.n_samplers > experiment.world_size:
        n_workers = sampler.worker_count() * experiment.learners
        sampler = chz.replace(sampler, batch_B=experiment.sampler.batch_B).with_workers(n_workers)
    return chz.replace(share, sampler=sampler, threads=experiment.threads)
