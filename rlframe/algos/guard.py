"""The guard of an optimizer: a step along what is not finite is not made, and nobody waits for a GPU to know."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlframe.algos.base import Progress, Refusal
from rlframe.core.struct import Tree


@dataclass(frozen=True)
class _Pending:
    """A step whose outcome is still on its way from the GPU."""

    numbers: Tensor  # loss and norm, in pinned memory
    arrived: torch.cuda.Event
    updates: int
    batch: Tree


class Guard:
    """Asked before every step of one optimizer. Refusals go to `progress`, for the runner to act on."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], progress: Progress) -> None:
        self.optimizer, self.parameters, self.progress = optimizer, parameters, progress
        self._skips = isinstance(optimizer, torch.optim.Adam)  # fused: where `found_inf` is 1 it changes nothing
        self._pending: list[_Pending] = []  # at most one

    def allows(self, loss: Tensor, norm: Tensor, batch: Tree) -> bool:
        """Whether the step may be made: loss and gradient norm, of all ranks, are finite.

        On a GPU the answer is yes, and Adam's kernel leaves parameters and moments alone by what it finds there; what
        it did is read one step later, when it has long arrived.
        """
        if norm.device.type == "cpu" or not self._skips:
            numbers = loss.item(), norm.item()
            finite = math.isfinite(numbers[0] + numbers[1])
            if not finite:
                wrong = [p for p in self.parameters if p.grad is not None and not bool(p.grad.isfinite().all())]
                self._refuse(*numbers, self.progress.updates, batch, wrong)
            return finite
        self.settle()
        self.optimizer.found_inf = (~(loss + norm).isfinite()).float()  # type: ignore[attr-defined]  # Adam looks for it
        numbers_there = torch.stack([loss.float(), norm.float()])
        here = torch.empty(2, pin_memory=True).copy_(numbers_there, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = [_Pending(here, arrived, self.progress.updates, batch)]
        return True

    def settle(self) -> None:
        """Learn what became of the step before, if that is not known yet."""
        for step in self._pending:
            step.arrived.synchronize()
            loss, norm = step.numbers.tolist()
            if not math.isfinite(loss + norm):
                self._refuse(loss, norm, step.updates, step.batch, [])
        self._pending = []

    def _refuse(self, loss: float, norm: float, updates: int, batch: Tree, wrong: list[nn.Parameter]) -> None:
        self.progress.refuse(Refusal(updates, batch, {"loss": loss, "grad_norm": norm}, list(wrong)))
