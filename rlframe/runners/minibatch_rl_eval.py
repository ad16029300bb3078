"""MinibatchRlEval: sample, learn, repeat, and score the agent on environments of its own at every report."""

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
    """How long to train and how often to evaluate and report."""

    n_steps: int = count(1_000_000, "env_steps to train, over all ranks")
    log_interval_steps: int = count(10_000, "env_steps between evaluations, rows of the log, and snapshots")

    def make_runner(
        self, sampler: Sampler, agent: Agent, algo: Algorithm, make_evaluator: Callable[[], Evaluator]
    ) -> MinibatchRlEval:
        return MinibatchRlEval(sampler, agent, algo, self.n_steps, self.log_interval_steps, make_evaluator())


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
    ) -> None:
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps)
        self.evaluator = evaluator

    def evaluate(self) -> dict[str, float]:
        """Mean return, its spread and the episodes' length."""
        return self.evaluator.score(self.env_steps)

    def close(self) -> None:
        """Close the sampler and the evaluator."""
        self.sampler.close()
        self.evaluator.close()
