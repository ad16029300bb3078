"""The interface of samplers, which fill [T, B] batches by stepping environments with an agent; shared parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import chz
import numpy as np

from rlframe.agents import Agent
from rlframe.core.config import AUTO, choice, count, count_or_auto, names, number, option, positive
from rlframe.core.errors import ConfigError
from rlframe.core.names import find_attribute, find_maker, made_by
from rlframe.core.objects import ObjectName, name_of
from rlframe.core.ranks import first_env_of_rank
from rlframe.core.seeding import Role, env_seeds, new_round
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.rollout.collector import Collector
from rlframe.rollout.episodes import EpisodeStatistic
from rlframe.rollout.inference import load_noise, noise_state
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.system.process import START_METHODS
from rlframe.system.service import Supervision

NOT_SAVED = "the snapshot holds no environments"  # reason for restarting episodes
_STATISTIC = "rlframe.rollout.EpisodeStatistic"


class Source(ABC):
    """Where a runner's samples come from. One of your own needs `collect`, `trajectories`, `refresh` and `close`."""

    batch_spec: BatchSpec
    backend: str  # how environments are stepped, for the log
    config: Any = None  # a SamplerConfig that describes it; with `env` and `seed`, it is recorded; None: is not known
    env: EnvConfig | None = None
    seed = 0
    collects_ahead = False  # True: a batch may be of older parameters than those of the last `refresh`

    @abstractmethod
    def collect(self) -> Samples | Mapping[str, Samples]:
        """The next batch; for several learners, one each by name. Valid until the next call."""

    @abstractmethod
    def trajectories(self) -> list[Trajectory]:
        """The episodes that ended since the last call, ordered by their end, then by environment."""

    @abstractmethod
    def refresh(self, agent: Agent) -> None:
        """Act with these parameters from the next `collect` on; called with the agent of each learner."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments. May be called twice."""

    def acts_with(self, agent: Agent) -> bool:
        """Whether it acts with this agent itself or, as far as it says, with a copy that follows it."""
        return True

    def env_seeds(self, seed: int) -> Sequence[int]:
        """The seed of each environment, from the run's, for episodes.csv; () if others decide its episodes too."""
        return env_seeds(seed, Role.ENV, self.batch_spec.n_envs)

    def counters(self) -> dict[str, float]:
        """The sampler's own metrics, `sampler/<name>`, counted since its start."""
        return {}

    def follow_episodes(self, discount: float, statistics: Sequence[Callable[[], EpisodeStatistic]]) -> None:  # noqa: B027
        """Follow episodes with this discount and these statistics, from the first `collect` on.

        Does nothing where another process follows them.
        """

    def made_with(self) -> dict[str, Any]:
        """Options of its runner's Config that it was made with, to be recorded."""
        return {}

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:  # noqa: B027
        """Optional: increment `heartbeat[0]` every step, by which BackgroundProcess detects a sampler that hangs.

        Without it, a batch must take less than runner.sampler_timeout_s there.
        """

    def state_dict(self) -> dict[str, Any]:
        """Optional: all besides the agent that determines the next batches: noise, environments, running episodes.

        Only the noise generators if the last batch was interrupted; all episodes then restart.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from the state of any sampler with as many environments. Call it before the first `collect`.

        Returns for each environment why its episode was restarted, or "". Raises EnvError if one cannot be reset.
        """
        return [NOT_SAVED] * self.batch_spec.n_envs


class SourceAhead(Source, ABC):
    """A source whose batches are collected elsewhere, ahead of the learner, with the parameters it was last sent."""

    collects_ahead = True
    version: int  # of the parameters that sampled the last batch
    posted_version: int  # of those of the last `refresh`

    @property
    @abstractmethod
    def n_ready(self) -> int:
        """Batches that are ready: if there are any, `collect` does not wait."""

    def wait(self) -> bool:
        """Optional: wait a moment for a batch, and return False if there is none yet; the last one may be overwritten.

        It is called until it returns True, then `collect`. A run can be stopped between calls, not during one.
        """
        return True

    def check(self) -> None:
        """Optional: look after what collects, such as a process that may have died. Called before every update."""


class Sampler(Source, ABC):
    """The source of one agent's samples, which steps environments of its own.

    Its `Samples` are allocated once: each `collect` overwrites them. For one seed, all samplers of rlframe give the
    same samples, array for array, however environments are split over workers.
    """

    @abstractmethod
    def collect(self) -> Samples:
        """Step every environment T times with the agent of the last `refresh`. Raises EnvError and WorkersFailed."""


@chz.chz
class SamplerConfig:
    """Base of every sampler's Config: the sizes of a batch."""

    undecided = False  # the hardware decides which sampler it is (sampler=auto)
    in_process = False  # environments and agent are in the sampler's process
    acts_in_workers = False  # worker processes act, with copies of the agent; else the sampler's process acts
    acts_on_device = False  # in a process of its own, the sampler acts on the learner's device; else on the CPU
    collects_ahead = False  # `make_ahead` returns a SourceAhead, which async_rl takes as it is
    on_ray = False  # it has actors of Ray, to which the run connects

    batch_T: int = count(128, "time steps per batch and environment")
    batch_B: int = count(8, "environments")
    decorrelation_steps: int = count(
        0, "most random steps of an environment before training; each has its own number", high=10**7
    )
    complete_episodes: bool = option(False, "batches of whole episodes, of at most batch_T env steps each")
    env_restarts: int = count(0, "times that an environment which raises is made again, before the run fails")
    statistics: tuple[str, ...] = names((), "[module:Class]: your subclasses of rlframe.rollout.EpisodeStatistic")
    collector: str = option("", "module:Class: your subclass of rlframe.rollout.collector.Collector")
    discount: float = number(math.nan, "of episode/discounted_return_mean; nan: the algorithm's", high=1)
    device: str = option(
        "", "cpu or cuda:1: where async_rl's sampler acts; default: with sampler=gpu the learner's device, else the CPU"
    )

    @chz.validate
    def _check_episodes(self) -> None:
        if self.complete_episodes and self.decorrelation_steps:
            raise ConfigError(
                f"sampler.complete_episodes=true leaves nothing to sampler.decorrelation_steps="
                f"{self.decorrelation_steps}: episodes end at different times in the batch anyway; leave one out"
            )

    def adapted(self, env: EnvConfig) -> EnvConfig:
        """What the environments of this sampler are made from."""
        whole, restarts = env.whole_episodes or self.complete_episodes, max(env.restarts, self.env_restarts)
        return replace(env, whole_episodes=whole, restarts=restarts)

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> Any:
        """What the sampler steps, with its `observation_space`, `action_space`, `backend` and `close`.

        Here environments of this process. A sampler that finds spaces elsewhere may return `Spaces`.
        """
        seeds, first = env_seeds(seed, Role.ENV, self.batch_B), first_env_of_rank(self.batch_B)
        return make_envs(self.adapted(env), self.batch_B, seeds, first)

    def make_sampler(self, envs: Any, agent: Agent, seed: int) -> Any:
        """The Sampler, or other Source, of what `make_envs` returned."""
        raise ConfigError(f"{type(self).__name__} needs make_sampler(envs, agent, seed), which returns the sampler")

    def make_ahead(self, envs: Any, agent: Agent, seed: int, n_slots: int) -> Any:
        """The SourceAhead of what `make_envs` returned, at most `n_slots` batches ahead, if it collects ahead."""
        return self.make_sampler(envs, agent, seed)

    def worker_count(self) -> int:
        """Worker processes: their number, 0 without any, or AUTO."""
        return 0

    def with_workers(self, n_workers: int) -> Self:
        """This config with so many workers, if it has workers."""
        return self

    def divided(self, n: int, key: str) -> Self:
        """One of `n` equal parts of its environments and workers.

        Args:
            key: what asks for the parts, for the message.
        Raises:
            ConfigError: they cannot be divided.
        """
        if self.batch_B % n:
            raise ConfigError(f"{key}={n} must divide sampler.batch_B={self.batch_B}: each steps a part")
        n_workers, n_groups = self.worker_count(), getattr(self, "n_groups", 1)
        if n_workers > 0 and (n_workers % n or n_workers // n < n_groups):
            raise ConfigError(
                f"{key}={n} must divide sampler.n_workers={n_workers}, and leave one for each of "
                f"sampler.n_groups={n_groups}; or use sampler.n_workers=auto"
            )
        return chz.replace(self.with_workers(n_workers // n) if n_workers > 0 else self, batch_B=self.batch_B // n)

    def supervision(self) -> Supervision:
        """What happens to workers that die or hang."""
        return Supervision()

    def collector_class(self) -> type[Collector]:
        """What fills batches. Raises ConfigError if `collector` does not exist or is no subclass of Collector."""
        if not self.collector:
            return Collector
        found = find_attribute(self.collector, "sampler.collector")
        if not (isinstance(found, type) and issubclass(found, Collector)):
            raise ConfigError(
                f"sampler.collector={self.collector} is not a subclass of rlframe.rollout.collector.Collector"
            )
        return found

    def find_statistics(self) -> list[Callable[[], EpisodeStatistic]]:
        """What makes those of each environment. Raises ConfigError if one is no EpisodeStatistic."""
        return [find_maker(name, "sampler.statistics", EpisodeStatistic, _STATISTIC) for name in self.statistics]

    def follow_episodes(self, sampler: Source) -> None:
        """Make a sampler of this config follow its episodes with these statistics and this discount.

        Raises:
            ConfigError: a statistic does not exist or is not an EpisodeStatistic; `make_sampler` gave no Source.
        """
        found = self.find_statistics()
        for name in self.statistics:
            made_by(name, "sampler.statistics", EpisodeStatistic, _STATISTIC)
        _check_source(sampler, self)
        sampler.follow_episodes(1.0 if math.isnan(self.discount) else self.discount, found)


def _check_source(made: Any, config: Any) -> None:
    """Raise ConfigError unless `make_sampler` of this config made a Source with what every Source has."""
    where = f"make_sampler of {type(config).__name__}"
    if not isinstance(made, Source):
        raise ConfigError(f"{where} gave a {type(made).__name__}; return the sampler, a rlframe.samplers.Source")
    if missing := [name for name in ("batch_spec", "backend") if not hasattr(made, name)]:
        raise ConfigError(f"{where} gave a {type(made).__name__} without {missing[0]}; set it in __init__")


def name_of_collector(collector: type[Collector]) -> str:
    """The class as a value of `SamplerConfig.collector`; it brings the class, also to other processes."""
    return "" if collector is Collector else ObjectName(name_of(collector), collector, "sampler.collector")


class LocalInferenceSampler(Sampler, ABC):
    """Base of samplers that act in the learner's process with its agent, so always with the newest parameters."""

    def __init__(
        self, envs: Envs | WorkerPool, collector: Collector, rngs: Sequence[np.random.Generator], backend: str
    ) -> None:
        self.envs, self.collector, self.rngs, self.backend = envs, collector, rngs, backend
        self.env, self.agent = envs.env, collector.inferences[0].agent
        self.batch_spec = BatchSpec(collector.batch.rows.T, envs.n)

    def collect(self) -> Samples:
        return self.collector.collect()

    def trajectories(self) -> list[Trajectory]:
        return self.collector.tracker.pop()

    def follow_episodes(self, discount: float, statistics: Sequence[Callable[[], EpisodeStatistic]]) -> None:
        self.collector.tracker.follow(discount, statistics)

    def refresh(self, agent: Agent) -> None:
        """Does nothing: the agent is shared with the learner."""

    def acts_with(self, agent: Agent) -> bool:
        return self.agent.holds(agent)

    def counters(self) -> dict[str, float]:
        return {**self.envs.counters(), **self.collector.bounds.counters()}

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        for stepper in self.collector.steppers:
            stepper.set_heartbeat(heartbeat)

    def state_dict(self) -> dict[str, Any]:
        return {"noise": noise_state(self.rngs), **(self.collector.state() if self.collector.complete else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        load_noise(self.rngs, state["noise"])
        if "envs" in state:
            return self.collector.load_state(state)
        self.collector.reset(new_round(self.rngs))
        return [NOT_SAVED] * self.envs.n

    def close(self) -> None:
        self.envs.close()


@chz.chz
class WorkersConfig(SamplerConfig):
    """Settings of samplers whose environments run in worker processes."""

    n_workers: int = count_or_auto("worker processes, or auto: one per core, at most one per environment")
    timeout_s: float = positive(60.0, "seconds without a finished step after which a worker is killed and replaced")
    max_restarts: int = count(100, "workers that may be replaced within an hour before the run fails", low=0)
    start_method: str = choice("forkserver", START_METHODS, "how worker processes start")

    @chz.validate
    def _check_workers(self) -> None:
        if self.n_workers != AUTO and not 1 <= self.n_workers <= self.batch_B:
            raise ConfigError(
                f"sampler.n_workers={self.n_workers} must be from 1 to sampler.batch_B={self.batch_B}, or auto"
            )

    def worker_count(self) -> int:
        return self.n_workers

    def with_workers(self, n_workers: int) -> Self:
        return chz.replace(self, n_workers=n_workers)

    def supervision(self) -> Supervision:
        return Supervision(self.timeout_s, self.max_restarts, self.start_method)

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> WorkerPool:
        seeds = env_seeds(seed, Role.ENV, self.batch_B)
        n_workers = len(cpus) if self.n_workers == AUTO else self.n_workers
        first = first_env_of_rank(self.batch_B)
        return WorkerPool(
            self.adapted(env), self.batch_B, seeds, n_workers, cpus, self.supervision(), self.preload(), first
        )

    def preload(self) -> tuple[str, ...]:
        """Modules that forkserver imports once for all workers."""
        return ()
