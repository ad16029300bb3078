"""MinibatchRl: sample, learn, repeat, in one process; reports training episodes."""

from __future__ import annotations

from collections.abc import Callable

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.config import count
from rlframe.runners.base import Runner
from rlframe.samplers import Evaluator, Sampler


@chz.chz
class Config:
    """How long to train and how often to report."""

    n_steps: int = count(1_000_000, "env_steps to train, over all ranks")
    log_interval_steps: int = count(10_000, "env_steps between rows of the log, and between snapshots")

    def make_runner(
        self, sampler: Sampler, agent: Agent, algo: Algorithm, make_evaluator: Callable[[], Evaluator]
    ) -> MinibatchRl:
        return MinibatchRl(sampler, agent, algo, self.n_steps, self.log_interval_steps)


class MinibatchRl(Runner):
    """Trains without evaluation: the score is the mean return of the last 100 training episodes."""

    score_name = "episode/return_mean"

    def evaluate(self) -> dict[str, float]:
        """Nothing: there is no evaluator."""
        return {}

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()
