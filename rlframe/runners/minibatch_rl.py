"""MinibatchRl: collect a batch, learn from it, repeat, in one process; `runner=minibatch_rl`, without evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.runners import sync_rl
from rlframe.runners.base import Runner, RunnerConfig
from rlframe.runners.callbacks import Callback
from rlframe.samplers import Evaluator, Sampler


@chz.chz
class Config(RunnerConfig):
    """How long to train and how often to log; the score is the mean return of the last 100 training episodes."""

    def evaluates(self, n_episodes: int) -> bool:
        return False

    def for_ranks(self) -> RunnerConfig:
        return sync_rl.with_options_of(self)

    def make_runner(
        self,
        sampler: Sampler,
        agent: Agent,
        algo: Algorithm,
        evaluator: Evaluator | None,
        callbacks: Sequence[Callback],
    ) -> MinibatchRl:
        steps = self.n_steps, self.log_interval_steps
        return MinibatchRl(sampler, agent, algo, *steps, evaluator, self.limits(), callbacks)


class MinibatchRl(Runner):
    """The loop of `Runner`, with or without an evaluator."""
