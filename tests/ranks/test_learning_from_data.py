"""Two ranks, each with half of a batch, make the update that one rank makes with the whole of it."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rlframe.algos import cql, iql, marwil, td3_bc
from rlframe.core.ranks import Ranks, SingleRank, use_ranks
from rlframe.optimizers import SGDConfig
from rlframe.replay import Transitions
from tests.algos.learners import LEVEL, OneBatch, learner, transitions
from tests.system.test_shared_ranks import on_each

SGD: dict[str, Any] = {"optimizer": SGDConfig()}  # whose steps have the size of the gradients
CASES: dict[str, tuple[Any, spaces.Space, dict[str, Any]]] = {
    "cql": (cql, spaces.Discrete(2), {"learn_conservative_weight": True, "target_gap": 0.1}),
    "iql": (iql, LEVEL, {}),
    "marwil": (marwil, LEVEL, {}),
    "td3_bc": (td3_bc, LEVEL, {"target_noise": 0.0, "policy_interval": 1}),
}


def part_of(ranks: Ranks, is_choice: bool) -> Transitions:
    """The rows of a rank, two of four; all for one."""
    action = [0, 1, 1, 0] if is_choice else [0.5, -1.0, 0.25, 0.0]
    columns: tuple[Any, ...] = [1.0, 2.0, -3.0, 0.5], action, [1.0, -2.0, 9.0, 0.0], [0.9, 0.0, 0.5, 0.9], [2.0] * 4
    own = slice(2 * ranks.rank, 2 * ranks.rank + 2) if ranks.world_size > 1 else slice(None)
    return transitions(*[column[own] for column in columns])


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_from_halves_what_one_does_from_the_whole(name: str) -> None:
    (module, action_space, settings), model, one_at_a_time = CASES[name], {"hidden": (3,)}, Lock()

    def work(ranks: Ranks) -> list[torch.Tensor]:
        with use_ranks(ranks):
            with one_at_a_time:  # ranks are threads here, and weights come from one generator of the process
                algo = learner(module, action_space=action_space, model=model, learning_rate=0.01, **SGD | settings)
            algo.replay = OneBatch(part_of(ranks, isinstance(action_space, spaces.Discrete)))
            for _ in range(3):
                algo.update()
        return [parameter.detach().clone() for parameter in algo.progress.learned]

    alone = work(SingleRank())
    for of_rank in on_each(2, work):
        torch.testing.assert_close(of_rank, alone, rtol=0.0, atol=1e-6)
