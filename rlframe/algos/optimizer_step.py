"""The optimizer step: scheduled rate, clipped gradient, mean over ranks; a step that is not finite is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlframe.algos.base import Progress, Refusal
from rlframe.core.schedule import Linear
from rlframe.core.struct import Tree
from rlframe.kernels.optimizers import make_optimizer
from rlframe.kernels.transfer import fetched


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


class Updater:
    """One optimizer over all that learns together: scheduled rate, clipped gradient, the one place to average ranks.

    The gradient is the mean over ranks before it is clipped, so that parameters that begin equal stay equal. Where loss
    or gradient are not finite no step is made, on any rank (see guard.Guard).

    On a GPU a step is launched and not waited for, and may be part of a CUDA graph (see graphed).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: str,
        learning_rate: Linear,
        max_grad_norm: float,
        progress: Progress,
        epsilon: float = 1e-5,  # of Adam as in Schulman et al.'s code, of RMSProp as in Mnih et al. 2016
    ) -> None:
        self.parameters = list(parameters)
        progress.learned += self.parameters
        self.learning_rate, self.max_grad_norm, self.progress = learning_rate, max_grad_norm, progress
        self.optimizer = make_optimizer(optimizer, self.parameters, epsilon)
        self.guard = Guard(self.parameters, progress)
        device = self.parameters[0].device
        self.waits = device.type != "cuda"  # for loss and norm, before the step is made
        self.is_captured = False  # now, into a CUDA graph: what the host does for a step is then done around that
        self._rate = torch.zeros((), device=device)  # where the kernel reads it, if nothing waits

    def step(self, loss: Tensor, batch: Tree = (), valid: Tensor | None = None) -> Tensor:
        """One update along the gradient of `loss`, by autograd, counted; see `follow`."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        norm = self.follow(loss, batch, valid)
        self.progress.updates += 1
        return norm

    def follow(self, loss: Tensor, batch: Tree = (), valid: Tensor | None = None) -> Tensor:
        """One step along the gradients that the parameters have, if these and the loss are finite.

        Returns the gradient's norm before clipping. The caller counts its updates, which may be several steps each.

        Args:
            batch: what is learned from, to be kept if that gives no finite gradient.
            valid: marks the rows that the loss is a mean over, where ranks may have more or fewer of them: the gradient
                is then the mean over the rows of all ranks.
        """
        loss = self._average(loss.detach(), valid)
        return self._descend(loss, batch) if self.waits else self._launch(loss, batch)

    def _average(self, loss: Tensor, valid: Tensor | None) -> Tensor:
        """Over ranks, all parameters and the loss at once; those without a gradient have none on any rank."""
        if self.progress.ranks.world_size == 1:
            return loss
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        loss = loss.clone()  # the caller's stays its own
        self.progress.ranks.average([*gradients, loss], 1.0 if valid is None else valid.sum())
        return loss

    @torch.no_grad()
    def _descend(self, loss: Tensor, batch: Tree) -> Tensor:
        norm = gradient_norm(self.parameters)
        if self.guard.allows(loss, norm, batch):
            if math.isfinite(self.max_grad_norm):
                clip_gradient(self.parameters, norm, self.max_grad_norm)
            self.optimizer.advance(self.rate)
        return norm

    @torch.no_grad()
    def _launch(self, loss: Tensor, batch: Tree) -> Tensor:
        """`_descend` without a look at anything: the optimizer changes nothing where the guard marks the step."""
        if not self.is_captured:
            self.begin()
        norm = gradient_norm(self.parameters)
        refused = self.guard.mark(loss, norm)
        if math.isfinite(self.max_grad_norm):
            clip_gradient(self.parameters, norm, self.max_grad_norm, waits=False)
        self.optimizer.advance(self._rate, refused)
        if not self.is_captured:
            self.end(batch)
        return norm

    def begin(self) -> None:
        """Before a step is launched: put the rate of now to where the kernel reads it."""
        self._rate.fill_(self.rate)

    def end(self, batch: Tree) -> None:
        """After a step was launched, along what `batch` gave: see to it that its outcome becomes known."""
        self.guard.watch(batch)

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return self.learning_rate(self.progress.scheduled)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.optimizer.load_state_dict(state)


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The global norm of their gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def clip_gradient(parameters: list[nn.Parameter], norm: Tensor, max_norm: float, waits: bool = True) -> None:
    """Scale gradients whose global norm is `norm` so that it is at most `max_norm`, perhaps without a look at `norm`.

    As nn.utils.clip_grad_norm_, whose grouping by devices takes longer than the sums of a small network.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not waits:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
    elif (scale := max_norm / (norm.item() + 1e-6)) < 1:
        torch._foreach_mul_(gradients, scale)
