"""MinibatchRl: sample, learn, repeat, in one process; reports training episodes."""

from __future__ import annotations

from collections.abc import Callable

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.runners.base import Runner, RunnerConfig
from rlframe.samplers import Evaluator, Sampler


@chz.chz
class Config(RunnerConfig):
    """How long to train and how often to report."""

    def make_runner(
        self, sampler: Sampler, agent: Agent, algo: Algorithm, make_evaluator: Callable[[], Evaluator]
    ) -> MinibatchRl:
        return MinibatchRl(sampler, agent, algo, self.n_steps, self.log_interval_steps, self.limits())


class MinibatchRl(Runner):
    """Trains without evaluation: the score is the mean return of the last 100 training episodes."""

    score_name = "episode/return_mean"

    def evaluate(self) -> dict[str, float]:
        """Nothing: there is no evaluator."""
        return {}

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()
