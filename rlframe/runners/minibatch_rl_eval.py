"""MinibatchRlEval: MinibatchRl with an evaluator; `runner=minibatch_rl_eval`, the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.runners.callbacks import Callback
from rlframe.runners.config import NO_AFFINITY, NO_LIMITS, Limits, RunnerConfig
from rlframe.runners.minibatch_rl import MinibatchRl
from rlframe.samplers import Sampler
from rlframe.system.affinity import Affinity


class MinibatchRlEval(MinibatchRl):
    """Evaluates before training, every eval.interval_steps and at the end; their time does not count for steps/s."""

    def __init__(
        self,
        sampler: Sampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int,
        evaluator: BaseEvaluator,
        limits: Limits = NO_LIMITS,
        callbacks: Sequence[Callback] = (),
        affinity: Affinity | Mapping[str, Any] = NO_AFFINITY,
    ) -> None:
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps, evaluator, limits, callbacks, affinity)


@chz.chz
class Config(RunnerConfig):
    """How long to train and how often to evaluate and log."""

    runner_class = MinibatchRlEval
    becomes_sync_rl = True
