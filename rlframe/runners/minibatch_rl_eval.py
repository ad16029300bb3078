"""MinibatchRlEval: sample, learn, repeat, and score the agent on environments of its own at every report."""

from __future__ import annotations

from collections.abc import Callable

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.runners.base import NO_LIMITS, Limits, Runner, RunnerConfig
from rlframe.samplers import Evaluator, Sampler


@chz.chz
class Config(RunnerConfig):
    """How long to train and how often to evaluate and report."""

    def make_runner(
        self, sampler: Sampler, agent: Agent, algo: Algorithm, make_evaluator: Callable[[], Evaluator]
    ) -> MinibatchRlEval:
        return MinibatchRlEval(
            sampler, agent, algo, self.n_steps, self.log_interval_steps, make_evaluator(), self.limits()
        )


class MinibatchRlEval(Runner):
    """Evaluates before training and at every report; evaluation time counts in no throughput."""

    score_name = "eval/return_mean"

    def __init__(
        self,
        sampler: Sampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int,
        evaluator: Evaluator,
        limits: Limits = NO_LIMITS,
    ) -> None:
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps, limits)
        self.evaluator = evaluator

    def evaluate(self) -> dict[str, float]:
        """Mean return, its spread and the episodes' length."""
        return self.evaluator.score(self.env_steps, self.stop.__bool__)

    def close(self) -> None:
        """Close the sampler and the evaluator."""
        self.sampler.close()
        self.evaluator.close()
