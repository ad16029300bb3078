"""MinibatchRlEval: MinibatchRl with an evaluator; `runner=minibatch_rl_eval`, the default."""

from __future__ import annotations

from collections.abc import Sequence

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.errors import ConfigError
from rlframe.runners.base import NO_LIMITS, Limits, RunnerConfig
from rlframe.runners.callbacks import Callback
from rlframe.runners.minibatch_rl import MinibatchRl
from rlframe.samplers import Evaluator, Sampler


class MinibatchRlEval(MinibatchRl):
    """Evaluates before training and at every row of the log; throughput excludes the time of evaluations."""

    def __init__(
        self,
        sampler: Sampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int,
        evaluator: Evaluator,
        limits: Limits = NO_LIMITS,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps, evaluator, limits, callbacks)


@chz.chz
class Config(RunnerConfig):
    """How long to train and how often to evaluate and log."""

    runner_class = MinibatchRlEval
    becomes_sync_rl = True

    def evaluates(self, n_episodes: int) -> bool:
        if n_episodes < 1:
            raise ConfigError(
                f"eval.n_episodes={n_episodes} must be at least 1 with runner=minibatch_rl_eval; "
                f"for no evaluation use runner=minibatch_rl"
            )
        return True
