"""The guard of an optimizer: a step along what is not finite is not made, and nobody waits for a GPU to know."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlframe.algos.base import Progress, Refusal
from rlframe.core.struct import Tree
from rlframe.ops.transfer import fetched


@dataclass(frozen=True)
class _Pending:
    """A step whose outcome is still on its way from the GPU."""

    numbers: Callable[[], Tensor]  # waits for loss and norm
    updates: int
    batch: Tree


class Guard:
    """Asked before every step of one optimizer. Refusals go to `progress`, for the runner to act on.

    Where the step may wait for loss and norm, `allows` looks at them. Where it may not, `mark` tells the optimizer's
    kernel, and `watch`, once the step was launched, the host: one step later, when the answer has long arrived.
    """

    def __init__(self, parameters: list[nn.Parameter], progress: Progress) -> None:
        self.parameters, self.progress = parameters, progress
        self._numbers = torch.zeros(2, device=parameters[0].device)  # loss and norm of the newest step, in one place
        self._pending: list[_Pending] = []  # at most one
        progress.settles.append(self.settle)

    def allows(self, loss: Tensor, norm: Tensor, batch: Tree) -> bool:
        """Whether the step may be made: loss and gradient norm, of all ranks, are finite."""
        numbers = loss.item(), norm.item()
        finite = math.isfinite(numbers[0] + numbers[1])
        if not finite:
            wrong = [p for p in self.parameters if p.grad is not None and not bool(p.grad.isfinite().all())]
            self._refuse(*numbers, self.progress.updates, batch, wrong)
        return finite

    def mark(self, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 where the step may not be made, else 0.0 [], on the device; a CUDA graph may hold this."""
        torch.stack([loss.float(), norm.float()], out=self._numbers)
        return (~(loss + norm).isfinite()).float()

    def watch(self, batch: Tree) -> None:
        """The step that was marked last is launched: look at the one before, and later at this one."""
        self.settle()
        self._pending = [_Pending(fetched(self._numbers), self.progress.updates, batch)]

    def settle(self) -> None:
        """Learn what became of the step before, if that is not known yet."""
        for step in self._pending:
            loss, norm = step.numbers().tolist()
            if not math.isfinite(loss + norm):
                self._refuse(loss, norm, step.updates, step.batch, [])
        self._pending = []

    def _refuse(self, loss: float, norm: float, updates: int, batch: Tree, wrong: list[nn.Parameter]) -> None:
        self.progress.refuse(Refusal(updates, batch, {"loss": loss, "grad_norm": norm}, list(wrong)))
