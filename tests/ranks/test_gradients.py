"""A gradient step of several ranks whose rows need different parameters."""

from __future__ import annotations

import math

import torch
from torch import nn

from rlframe.algos import a2c
from rlframe.core.ranks import Ranks, SingleRank, use_ranks
from rlframe.updates.optimizer_step import make_optimizer_step
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules
from tests.system.test_shared_ranks import on_each


def test_what_the_rows_of_one_rank_alone_need_learns_on_all_ranks() -> None:
    def work(ranks: Ranks) -> list[list[float]]:
        with use_ranks(ranks):
            one, two, unused = (nn.Parameter(torch.zeros(n)) for n in (1, 2, 1))
            config = a2c.Config(optimizer="adam", learning_rate=1.0, max_grad_norm=math.inf)
            step = make_optimizer_step([one, two, unused], Schedules(config, 10**9, Progress()))
            of_rows, after = [one.sum(), 2 * two.sum()], []
            first = of_rows[ranks.rank] if ranks.world_size > 1 else sum(of_rows) / 2
            for loss in (first, one.sum()):  # in the second step no rank needs `two`, so it stays
                step.minimize(loss)
                after.append([*one.tolist(), *two.tolist(), *unused.tolist()])
            assert [parameter is unused for parameter in step.progress.unreached] == [True]
        return after

    alone = work(SingleRank())
    assert alone[0][1] == alone[1][1] < 0
    assert on_each(2, work) == [alone] * 2
