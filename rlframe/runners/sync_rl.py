"""SyncRl: MinibatchRl in several ranks; gradients are averaged, parameters stay equal; `runner=sync_rl`."""

from __future__ import annotations

import chz

from rlframe.runners.config import RunnerConfig
from rlframe.runners.minibatch_rl import MinibatchRl


class SyncRl(MinibatchRl):
    """Every rank has its own sampler and a copy of everything learned; construct and train it inside `join`.

    Batch sizes are per rank; env_steps and schedules count over all ranks. With an evaluator, each rank plays a part of
    the episodes. At every row of the log the ranks check that they have learned the same.
    """


@chz.chz
class SyncRlConfig(RunnerConfig):
    """SyncRl: MinibatchRl in several ranks; gradients are averaged, parameters stay equal.

    eval.n_episodes=0: no evaluation.
    """

    runner_class = SyncRl
    trains_in_ranks = True
