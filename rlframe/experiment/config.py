"""The Experiment config: everything that decides a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import chz

from rlframe.algos.defaults import learns_from
from rlframe.core.config import AUTO, choice, count, count_or_auto, names, option
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while
from rlframe.core.files import check_name
from rlframe.core.parts import ROOTS, part, part_name, values_of
from rlframe.core.schedule import at_last
from rlframe.core.seeding import Role, seed_int
from rlframe.data.writing import COMPRESSIONS
from rlframe.envs import EnvConfig, EnvOptions
from rlframe.evaluation import EvalConfig
from rlframe.experiment.agents import AgentsConfig
from rlframe.kernels.device import PRECISIONS
from rlframe.models import ModelConfig
from rlframe.record.loggers import DEFAULT_LOGGERS
from rlframe.record.messages import LEVELS
from rlframe.record.metrics import signed
from rlframe.replay.make import PACKAGE as OF_REPLAYS
from rlframe.rewards import RewardConfig
from rlframe.rollout.stepper import check_room
from rlframe.runners.config import RunnerConfig
from rlframe.runners.stop_rule import StopRule, check_metric
from rlframe.samplers import SamplerConfig
from rlframe.system.cluster import RayOptions
from rlframe.system.env_vars import check_env_vars


def kind_of(name: str, config: Any) -> str:
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
    init_with: str = choice(
        "networks", ("agent", "networks", "optimizers"), "what init takes, each with those before it; networks: critics"
    )
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
        if self.name:
            check_name(self.name)
        if self.learners == 0:
            raise ConfigError("learners=0 must be at least 1, or auto")
        if self.learners != 1 and self.world_size > 1:
            learners = "auto" if self.learners == AUTO else self.learners
            raise ConfigError(f"learners={learners} needs world_size=1, not {self.world_size}; choose one of them")
        if self.init_with != "networks" and not any(
            [self.init, *(each.init for each in self.agents.policies.values())]
        ):
            raise ConfigError(f"init_with={self.init_with} needs init=RUN_DIR, from which it takes them")
        if self.stop and (name := StopRule(self.stop).needs("eval")) and not self.evaluates:
            raise ConfigError(f"stop={self.stop:.200}: this run does not evaluate, so that {name} is never known")
        best, _ = signed(self.snapshot_best)
        if best:
            check_metric(best, f"snapshot_best={self.snapshot_best:.200}")
        if best.startswith("eval/") and not self.evaluates:
            raise ConfigError(
                f"snapshot_best={self.snapshot_best}: this run does not evaluate; use episode/return_mean"
            )
        episodes = self.evaluates and not (self.eval.asynchronous or self.eval.replacement)
        ranks = f"{'learners' if self.learners > 1 else 'world_size'}={self.n_ranks}"
        for key, given in {"n_episodes": self.eval.n_episodes, "n_envs": self.eval.n_envs}.items():
            if episodes and given < self.n_ranks:
                raise ConfigError(f"eval.{key}={given} must be at least {ranks}: each rank plays some")
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
            name = kind_of("algo", self.algo)
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
        return self.sampler.adapted(own)

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

    def acting_at_once(self) -> Experiment:
        """Policies with weights of `init` act from the first step, where random_steps is left to be chosen."""
        own = self.agents.policies
        return self.with_algos(lambda algo, name: _acting(algo, (own[name].init if name else "") or self.init))

    def with_algos(self, change: Callable[[Any, str], Any]) -> Experiment:
        """With each algorithm as `change(algo, name)` makes it: the run's own, named "", and those of its policies."""
        own, algo = self.agents.policies, change(self.algo, "")
        policies = {name: chz.replace(each, algo=change(each.algo, name)) for name, each in own.items()}
        if algo is self.algo and not own:
            return self
        return chz.replace(self, algo=algo, agents=chz.replace(self.agents, policies=policies))

    def without_init(self) -> Experiment:
        """The experiment that starts from random weights, or from those of its own snapshot."""
        acting = self.acting_at_once()
        policies = {name: chz.replace(each, init="") for name, each in acting.agents.policies.items()}
        league = chz.replace(self.agents.league, members=())
        agents = chz.replace(self.agents, policies=policies, league=league)
        return chz.replace(acting, init="", init_with="networks", agents=agents)  # which takes nothing without init

    def on_ray(self) -> bool:
        """Whether a part of it is in actors of Ray."""
        replays = (value for _, value, key in values_of(self.algo) if key.part and key.part.package == OF_REPLAYS)
        return self.sampler.on_ray or any(each.on_ray for each in replays)

    def title(self) -> str:
        """`name`, or algorithm and environment; usable as the name of a directory."""
        algo = kind_of("algo", self.algo).rpartition("/")[2].rpartition(":")[2].removesuffix(".py")
        env = self.env.rpartition("/")[2].rpartition(":")[2].rpartition("<locals>.")[2]
        env = re.sub(r"[^\w.\-]", "", env)  # without () and <lambda>
        return self.name or f"{algo}_{env}"


def _acting(algo: Any, init: str) -> Any:
    chosen = getattr(algo, "random_steps", 0) == AUTO
    return chz.replace(algo, random_steps=0) if init and chosen else algo
