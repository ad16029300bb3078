"""OfflineRl: learn from data alone, without a sampler; n_steps and all intervals are in updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.core.arguments import checked
from rlframe.core.config import count
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec
from rlframe.envs import EnvConfig
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.rewards.base import UnchangedRewards
from rlframe.runners.base import Runner
from rlframe.runners.callbacks import Callback, Clock
from rlframe.runners.config import NO_AFFINITY, RunnerConfig
from rlframe.runners.learner import Learner
from rlframe.samplers import Source
from rlframe.samplers.no_sampler import NoSamplerConfig, NoSource
from rlframe.system.affinity import Affinity


class OfflineRl(Runner):
    """Makes one update of each learner, from data that it has, and repeats; schedules go over updates too."""

    clock = Clock.UPDATES

    @checked
    def __init__(
        self,
        learners: Learner | Mapping[str, Learner],
        options: RunnerConfig,
        evaluator: BaseEvaluator | None = None,
        callbacks: Sequence[Callback] = (),
        stop: str = "",
        affinity: Affinity | Mapping[str, Any] = NO_AFFINITY,
    ) -> None:
        super().__init__(NoSource(), learners, options, evaluator, callbacks, stop, affinity)

    def prepare(self) -> None:
        """Raises:
        ConfigError: an algorithm has no rows to learn from, or a learner changes rewards.
        """
        for learner in self.learners.values():
            if not isinstance(learner.rewards, UnchangedRewards):
                raise ConfigError(
                    f"OfflineRl learns from the rewards in replay as they are, and the learner{learner.of} has "
                    f"{type(learner.rewards).__name__}, which changes those of a sampler; leave it out"
                )
            if not learner.algo.n_rows():
                raise ConfigError(
                    f"{type(learner.algo).__name__} has no rows to learn from: OfflineRl is for algorithms "
                    f"with replay, such as DQN and SAC, that is filled before (algo.replay.append; for MARWIL by "
                    f"episodes that have ended)"
                )
            learner.algo.observe_data()

    def iterate(self) -> None:
        with self.log.timers("learning"):
            for learner in self.learners.values():
                self.update(learner)
        self.record_episodes()


@chz.chz
class OfflineRlConfig(RunnerConfig):
    """OfflineRl: learn from data alone, without a sampler; n_steps and all intervals are in updates."""

    runner_class = OfflineRl
    learns_from_data = True

    def make_envs(self, sampler: Any, env: EnvConfig, seed: int, affinity: Affinity) -> Any:
        return NoSamplerConfig().make_envs(env, seed, affinity.workers)

    def make_sampler(
        self, sampler: Any, algo: Any, envs: Any, agent: Agent, seed: int, devices: Sequence[str] = ("cpu",)
    ) -> Source:
        return NoSource(BatchSpec(sampler.batch_T, sampler.batch_B))

    def make_runner(
        self,
        sampler: Source,
        learners: Learner | Mapping[str, Learner],
        evaluator: BaseEvaluator | None,
        callbacks: Sequence[Callback],
        stop: str = "",
    ) -> OfflineRl:
        return OfflineRl(learners, self, evaluator, callbacks, stop)

    n_steps: int = count(1_000_000, "updates to make")
    log_interval_steps: int = count(10_000, "updates between rows of the log, evaluations and snapshots")
