"""A step that `unless` forbids is not made, whatever its loss is, and is no skipped one; recorded and as it is."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlframe.optimizers import AdamConfig
from rlframe.updates.compiled import CompileChoice, compiling, updates_of
from rlframe.updates.optimizer_step import make_optimizer_step
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules


class Learns:
    """Loss w x; above 1 no step is made."""

    def __init__(self) -> None:
        self.weight, self.progress = nn.Parameter(torch.ones(())), Progress()
        config = SimpleNamespace(optimizer=AdamConfig(epsilon=1e-8), learning_rate=0.1, max_grad_norm=0.5)
        schedules = Schedules(config, 100, self.progress)
        self.optimizer = make_optimizer_step([self.weight], schedules)
        self.learn = updates_of(self._learn, schedules, [self.optimizer])

    def _learn(self, inputs: tuple[Tensor]) -> Tensor:
        loss = self.weight * inputs[0]
        return self.optimizer.minimize(loss, unless=loss.detach() > 1)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_forbidden_step_with_an_infinite_loss_is_not_counted_as_skipped(compiles: bool, recorded: list[Any]) -> None:
    algo = Learns()
    with compiling(CompileChoice(compiles)):
        norms = [algo.learn((torch.tensor(x),)).item() for x in (0.1, math.inf, 0.2)]
    assert len(recorded) == compiles
    assert norms == pytest.approx([0.1, 0.0, 0.2])
    assert algo.weight.item() == pytest.approx(0.8, abs=0.02)
    assert algo.progress.skipped == 0
