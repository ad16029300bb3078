"""Evaluator: plays an agent's episodes on separate environments, with a fixed number of episodes on each."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import chz
import numpy as np

from rlframe.agents import Agent
from rlframe.core.arguments import checked
from rlframe.core.config import AUTO, check_one_of, count, count_or_auto, names, number, option
from rlframe.core.errors import ConfigError, warn_once
from rlframe.core.ranks import current_ranks
from rlframe.core.seeding import Role, distinct_seeds, generator, generators
from rlframe.core.types import Samples, Trajectory
from rlframe.envs import EnvConfig, EnvError, Envs, make_envs
from rlframe.evaluation.estimate import METHODS
from rlframe.evaluation.film import FilmConfig, Films
from rlframe.evaluation.report import evaluated
from rlframe.rollout.collector import local_collector, worker_collector
from rlframe.rollout.worker_pool import WorkerPool, split
from rlframe.system.service import Supervision

_CHUNK = 16  # time steps between checks for finished episodes
_LONG = 10_000  # env steps of an episode after which a line says how it is cut


class EvaluationStopped(Exception):
    """The `stop` function of an evaluation returned True; there is no result."""


_logger = logging.getLogger("rlframe")


@chz.chz
class EvalConfig:
    """How agents are evaluated."""

    n_envs: int = count(8, "environments, which step together")
    n_episodes: int = count(
        20, "episodes per evaluation, split evenly over n_envs; 0: none (sync_rl, async_rl)", low=0, high=10**7
    )
    interval_steps: float = number(
        0.0, "env_steps between evaluations; 0: one at every row of the log; inf: at the end only", infinite=True
    )
    asynchronous: bool = option(False, "evaluate in a process of its own, on a copy of the agent, while it learns")
    env: str = option("", "environment of evaluation; default: that of training")
    env_kwargs: Mapping[str, Any] = chz.field(default_factory=dict, doc="overrides env_kwargs in evaluation")
    n_workers: int = count_or_auto("worker processes; 0: none; auto: as many as the sampler has")
    explore: bool = option(False, "act with noise as in training, instead of greedily")
    epsilon: float = number(
        math.nan, "with explore=true, the rate of random actions instead of training's; nan: training's"
    )
    max_length: int = count(200_000, "env steps after which an episode counts as it is, and its environment stops")
    env_steps: int = count(
        0, "env steps to play, in whole episodes, instead of n_episodes; 0: n_episodes decides", high=10**10
    )
    video_every: int = count(0, "film an episode after every n-th evaluation, into RUN_DIR/videos; 0: none")
    estimate: tuple[str, ...] = names(
        (), "[wis,fqe] and others: estimates from a dataset (docs/guides/estimates.md); no episodes are played"
    )
    dataset: str = option(
        "", "whose estimates, or eval/normalized_score, are logged; default: the one that is learned from"
    )
    function: str = option("", "module:function or ./file.py:function of (policy, make_env): its metrics, no episodes")
    opponents: tuple[str, ...] = names(
        (), "[random,module:function]: in an environment of several agents, n_episodes games against each of these"
    )

    @chz.validate
    def _check(self) -> None:
        if self.epsilon > 1:
            raise ConfigError(f"eval.epsilon={self.epsilon:g} must be from 0 to 1")
        if not math.isnan(self.epsilon) and not self.explore:
            raise ConfigError(f"eval.epsilon={self.epsilon:g} needs eval.explore=true: without, acting is greedy")
        for method in self.estimate:
            check_one_of("eval.estimate", method, METHODS)
        if len(both := self._replacements()) > 1:
            raise ConfigError(f"{' and '.join(both)} both replace episodes; choose one of them")

    @property
    def replacement(self) -> str:
        """What evaluates in the place of episodes, as a setting: eval.function=..., eval.opponents=[...]; or empty."""
        return "".join(self._replacements())

    def _replacements(self) -> list[str]:
        given = {"function": self.function, "opponents": self.opponents, "estimate": self.estimate}
        words = {key: x if isinstance(x, str) else f"[{','.join(x)}]" for key, x in given.items() if x}
        return [f"eval.{key}={word:.100}" for key, word in words.items()]


Stop = Callable[[], bool]
Result = tuple[int, dict[str, float]]  # env_steps of the agent, and its metrics


def never() -> bool:
    return False


def ignore(samples: Samples) -> None:
    """The batches of an evaluation that nobody records."""


class BaseEvaluator(ABC):
    """What a runner asks of its evaluator."""

    interval_steps: float  # see EvalConfig
    config: EvalConfig | None = None  # to be recorded, with `env`
    env: EnvConfig | None = None

    @abstractmethod
    def evaluate(self, number: int, stop: Stop = never) -> dict[str, float]:
        """The metrics of the current agent; `number`, its env_steps, decides the seeds. Empty if they come later.

        Raises:
            EvaluationStopped: `stop()` returned True on some rank.
        """

    def plays(self, agent: Agent) -> bool:
        """Whether it plays this agent, as far as it says."""
        return True

    def finished(self, wait: bool, stop: Stop = never) -> list[Result]:
        """The results that came later, since the last call; with `wait`, also that of a running evaluation.

        Unless `stop()` becomes true first; then it is still `busy`.
        """
        return []

    def evaluate_now(self, number: int) -> dict[str, float]:
        """The metrics of the current agent, however long they take."""
        return self.evaluate(number)

    @property
    def busy(self) -> bool:
        """Whether the next evaluation cannot start yet."""
        return False

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:  # noqa: B027  # most have none
        """Increment `heartbeat[0]` during an evaluation, so that another process can detect one that hangs."""

    def film_in(self, folder: str) -> None:  # noqa: B027  # most film nothing
        """Write films into `folder`, which need not exist yet; empty: film nothing."""

    def close(self) -> None:  # noqa: B027  # some have nothing open
        """May be called twice."""


class NoEvaluator(BaseEvaluator):
    """Of a rank that leaves evaluation to another one."""

    def __init__(self, interval_steps: float) -> None:
        self.interval_steps = interval_steps

    def evaluate(self, number: int, stop: Stop = never) -> dict[str, float]:
        return {}


class Evaluator(BaseEvaluator):
    """The number of episodes of each environment is fixed beforehand, so that short episodes get no extra weight.

    With `env_steps`, an environment starts another episode until it has played its share, env_steps / n_envs, and every
    episode that it starts is played to its end and counts, so that long episodes are not left out.
    Its seeds are never used in training. Greedy acting is acting with zero noise. Ranks share the environments, and
    together play the same episodes as one rank would. Rank 0 films its own episode after every n-th evaluation.
    """

    config: EvalConfig

    @checked
    def __init__(
        self,
        env: EnvConfig,
        agent: Agent,
        config: EvalConfig,
        seed: int = 0,
        cpus: Sequence[Sequence[int]] = (),
        supervision: Supervision | None = None,
    ) -> None:
        """`cpus` and `supervision` are for the worker processes, if there are any."""
        self.env = env = replace(env, mode="eval")
        self.config, self.ranks, self.interval_steps = config, current_ranks(), config.interval_steps
        rank, world_size = self.ranks.rank, self.ranks.world_size
        for key, given in {"n_episodes": config.n_episodes, "n_envs": config.n_envs}.items():
            if given < world_size:
                ranks = ", one for each rank" if world_size > 1 else ""
                raise ConfigError(f"eval.{key}={given} must be at least {world_size}{ranks}")
        n = config.n_envs if config.env_steps else min(config.n_envs, config.n_episodes)
        self.lo, hi = split(n, world_size)[rank]
        self.share = math.ceil(config.env_steps / n)  # env steps
        self.quota = [config.n_episodes // n + (env < config.n_episodes % n) for env in range(self.lo, hi)]
        seeds, n = distinct_seeds(seed, Role.EVAL_ENV, n)[self.lo : hi], hi - self.lo
        self.seed, self.rngs = seed, generators(seed, Role.EVAL_NOISE, n, self.lo)
        self.agent = agent
        self.on_batch: Callable[[Samples], None] = ignore  # called with each batch, before its episodes are counted
        with agent.exploring_at(config.epsilon):  # an agent without epsilon is an error now
            film = FilmConfig(1, seed, config.explore, config.max_length)
            self.films = Films(0 if rank else config.video_every, self.env, agent, film)
        self.envs: Envs | WorkerPool
        self._tells_of_long = config.max_length > _LONG
        if config.n_workers in (AUTO, 0):
            self.envs = make_envs(env, n, seeds, self.lo)
            self.collector = local_collector(self.envs, agent, _CHUNK, self.rngs, config.explore, self.lo)
        else:
            n_workers = min(n, config.n_workers)
            pinned = [cpus[worker % len(cpus)] for worker in range(n_workers)] if cpus else ()
            self.envs = pool = WorkerPool(env, n, seeds, n_workers, pinned, supervision, first=self.lo)
            self.collector = worker_collector(pool, agent, _CHUNK, self.rngs, config.explore, 1, self.lo)

    def plays(self, agent: Agent) -> bool:
        return self.agent.holds(agent)

    def play(
        self, number: int = 0, stop: Stop = never, on_episode: Callable[[Trajectory], None] = lambda _: None
    ) -> list[Trajectory]:
        """Play the episodes with the current agent; returns those of all ranks, by environment, then by time.

        The seeds depend on `number` only, not on earlier evaluations. An episode longer than `max_length` counts as
        it is then, and its environment plays no other. Raises EnvError if an environment fails, EvaluationStopped if
        `stop()` returns True on some rank. `on_episode` is called with each of this rank's episodes at its end.
        """
        with self.agent.exploring_at(self.config.epsilon):
            own, complete = self._play(number, stop, on_episode)
        if not self.ranks.all(complete):
            raise EvaluationStopped
        return [Trajectory(*row) for rows in self.ranks.gather([*map(astuple, own)]) for row in rows]

    def _play(self, number: int, stop: Stop, on_episode: Callable[[Trajectory], None]) -> tuple[list[Trajectory], bool]:
        """This rank's episodes, and whether they are complete."""
        self.collector.reset(number)
        for env, rng in enumerate(self.rngs):
            rng.bit_generator.state = generator(self.seed, Role.EVAL_NOISE, self.lo + env, number).bit_generator.state
        done: list[list[Trajectory]] = [[] for _ in self.quota]
        plays, cut, tracker = [True] * len(done), list[int](), self.collector.tracker

        def add(episode: Trajectory) -> None:
            done[episode.env].append(episode)
            plays[episode.env] = self._starts_another(done[episode.env], self.quota[episode.env])
            on_episode(episode)

        while any(plays):
            if stop():
                return [], False
            try:
                self.on_batch(self.collector.collect())
            except EnvError as error:
                raise EnvError(f"in evaluation, {error}") from error.__cause__
            for trajectory in tracker.pop():
                if plays[trajectory.env]:
                    add(trajectory)
            self._tell_of_long(tracker.length)
            for env in np.flatnonzero(tracker.length > self.config.max_length).tolist():
                if plays[env]:
                    cut.append(env)
                    add(Trajectory(float(tracker.return_[env]), int(tracker.length[env]), False, env))
                    plays[env] = False
        if cut:
            warn_once(
                f"in evaluation, episodes of {len(cut)} of {len(done)} environments had no end after eval.max_length="
                f"{self.config.max_length:,} env steps: they count as they are, and are the last there; set a time "
                f"limit (env.max_episode_steps=...) or another eval.max_length"
            )
        return [replace(trajectory, env=self.lo + trajectory.env) for found in done for trajectory in found], True

    def _tell_of_long(self, lengths: np.ndarray) -> None:
        """Tell once of a long episode: its environment may have no end, and the first evaluation takes very long."""
        if self._tells_of_long and lengths.max() > _LONG:
            self._tells_of_long = False
            _logger.info(
                f"evaluation: an episode has run {_LONG:,} steps; without an end it is cut after eval.max_length="
                f"{self.config.max_length:,}, or give env.max_episode_steps"
            )

    def _starts_another(self, played: Sequence[Trajectory], quota: int) -> bool:
        """Whether an environment that has played these episodes starts another."""
        return sum(t.length for t in played) < self.share if self.share else len(played) < quota

    def evaluate(self, number: int = 0, stop: Stop = never) -> dict[str, float]:
        """Play; returns metrics: mean and spread of the returns, length and number of episodes, and `counters`."""
        trajectories = self.play(number, stop)
        with self.agent.exploring_at(self.config.epsilon):
            self.films.evaluated(number, stop)
        return {**evaluated(trajectories), "eval/n_episodes": len(trajectories), **self.counters()}

    def film_in(self, folder: str) -> None:
        self.films.folder = folder

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self.films.heartbeat = heartbeat
        for stepper in self.collector.steppers:
            stepper.set_heartbeat(heartbeat)

    def counters(self) -> dict[str, float]:
        """The number of worker processes replaced since the start, if there are workers."""
        found = self.envs.counters()
        return {"eval/restarts": found["sampler/restarts"]} if "sampler/restarts" in found else {}

    def close(self) -> None:
        self.envs.close()
