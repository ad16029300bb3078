"""One gradient step on a loss: backward, mean over ranks, clipping, scheduled rate; skipped if not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlframe.core.config import key_of
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import Curve, Scheduled, curve, read_scheduled
from rlframe.core.struct import Tree
from rlframe.kernels.device import flushing_denormals, held, is_recording
from rlframe.kernels.transfer import Fetched
from rlframe.models.network import NO_UNITS, Units
from rlframe.optimizers import Optimizer
from rlframe.updates.progress import SkippedUpdate
from rlframe.updates.schedules import Schedules

_run_backward = torch.autograd.Variable._execution_engine.run_backward


def flushing_for(steps: Iterable[OptimizerStep]) -> AbstractContextManager[None]:
    """Context for an update that makes these steps: without denormals, where each optimizer's step does without."""
    return flushing_denormals() if all(step.optimizer.flushes for step in steps) else nullcontext()


def _what_is_wrong(loss: Tensor) -> str:
    if loss.dim():
        return f"a loss has shape {list(loss.shape)} and must be one number []: return a weighted mean over the rows"
    return "a loss depends on no parameter: something detached it, or was computed without gradients"


class OptimizerStep:
    """One optimizer over all parameters that learn together; the only place where ranks average gradients.

    The gradient is the mean over ranks before it is clipped, so that parameters that begin equal stay equal. A step
    whose loss or gradient is NaN or Inf is skipped on every rank and goes to `progress`, for the runner to act on.

    On a CPU the step waits for loss and norm. On a GPU it is launched without waiting, and may be part of a CUDA graph
    (see graphed): the optimizer's kernel changes nothing where the step is not finite, and the host learns of it one
    step later, when the numbers have long arrived.
    """

    def __init__(
        self, optimizer: Optimizer, schedules: Schedules, rate: str = "learning_rate", units: Units = NO_UNITS
    ) -> None:
        """Args:
        schedules: of a config with `max_grad_norm`, the global norm at which gradients are clipped (inf: never), and
            the learning rate `rate`.
        units: what is brought back to unit length after each step.
        """
        self.units = units
        self.optimizer, self.parameters, progress = optimizer, optimizer.parameters, schedules.progress
        self.rate_key = key_of(schedules.config, rate)
        progress.learned += self.parameters
        progress.rates += [self.rate_key] * len(self.parameters)
        progress.checks.append(self.check)
        self.learning_rate, self.max_grad_norm = schedules.of(rate), schedules.of("max_grad_norm")
        self.progress, self.n_steps = progress, schedules.n_steps
        self.clips = max(self.max_grad_norm.values) < math.inf
        self.device = device = self.parameters[0].device
        self.waits = device.type != "cuda" or not optimizer.on_device
        self.is_captured = False  # into a graph now: the host's part is then done around it
        self.launched = False  # since a record or a capture began
        self._one = torch.ones((), device=device)
        self._rate = torch.zeros((), device=device)  # where the kernel reads it, if nothing waits
        self._launched_rate = 0.0  # that is there now
        self._max_norm = torch.full((), self.max_grad_norm.values[0], device=device)  # the same
        self._numbers = torch.zeros(2, device=device)  # loss and norm of the newest step
        self._fetched = Fetched(self._numbers)
        self._pending: list[tuple[int, Tree]] = []  # updates and batch of the step, if one's outcome is on its way
        self._is_first = True
        self._kept_rate = ""  # in place of the config's, as text; empty: that of the config

    def minimize(
        self, loss: Tensor, batch: Tree = (), valid: Tensor | None = None, unless: Tensor | None = None
    ) -> Tensor:
        """Add the gradient of `loss` to the `.grad` of these parameters, make one step along it, and clear it.

        Parameters of other OptimizerSteps, through which the loss may go, get none of it. Returns the gradient's norm
        before clipping. The caller counts its updates, which may be several steps each.

        Args:
            loss: [], checked for NaN and Inf.    batch: what the loss was of, kept on disk if the step is skipped.
            valid: marks the rows that the loss is a mean over, where ranks may have more or fewer of them: the gradient
                is then the mean over the rows of all ranks.
            unless: [] bool, equal on all ranks; where it holds no step is made, and the norm is 0.
        Raises:
            ConfigError: the loss is no single number, or depends on no parameter, or on none of these.
        """
        if loss.dim() or not loss.requires_grad:
            raise ConfigError(_what_is_wrong(loss))
        if unless is not None and self.waits and not self.is_captured and bool(unless):
            return torch.zeros_like(loss)
        # As loss.backward(inputs=own), without the 30 us that its checks take in the update of a small network.
        alone = len(self.progress.learned) == len(self.parameters)  # to name them costs PPO on CartPole 2.4 %
        own = () if alone else tuple([parameter for parameter in self.parameters if parameter.requires_grad])
        _run_backward((loss,), (self._one,), False, False, own, allow_unreachable=True, accumulate_grad=True)
        if self.parameters[0].grad is None and not gradients_of(self.parameters):
            raise ConfigError("a loss reaches no parameter of its optimizer, which has those of other networks")
        return self._apply(loss.detach(), batch, valid, unless)

    @torch.no_grad()
    def _apply(self, loss: Tensor, batch: Tree, valid: Tensor | None, unless: Tensor | None) -> Tensor:
        loss = self._average(loss, valid)
        if self._is_first:
            self._is_first = False
            self.progress.unreached += [p for p in self.parameters if p.requires_grad and p.grad is None]
        waits = self.waits and not self.is_captured
        norm = self._step(loss, batch) if waits else self._launch(loss, batch, unless)
        for parameter in self.parameters:
            parameter.grad = None
        if not self.is_captured:
            self.progress.between_steps()
        return norm

    def _average(self, loss: Tensor, valid: Tensor | None) -> Tensor:
        """Over ranks, all parameters and the loss at once.

        A parameter that the rows of some ranks do not need has a gradient of 0 there. One that no rank needs has none;
        on a GPU, where the host would have to wait to know that, it has one of 0.
        """
        if self.progress.ranks.world_size == 1:
            return loss
        own = [parameter for parameter in self.parameters if parameter.requires_grad]
        without = [i for i, parameter in enumerate(own) if parameter.grad is None]
        needed = torch.ones(len(own), device=self.device)
        for i in without:
            own[i].grad = torch.zeros_like(own[i])
            needed[i] = 0.0
        loss, weight = loss.clone(), 1.0 if valid is None else valid.sum()  # the caller's loss stays its own
        self.progress.ranks.average([*gradients_of(own), needed, loss], weight)
        if is_recording():  # whatever the rows, a recorded update needs the same
            unneeded = without
        else:
            shares = needed.tolist() if self.waits else []
            unneeded = [i for i, share in enumerate(shares) if not share] if any(shares) else []
        for i in unneeded:
            own[i].grad = None
        return loss

    def _step(self, loss: Tensor, batch: Tree) -> Tensor:
        gradients = gradients_of(self.parameters)
        norm = gradient_norm(gradients)
        numbers = loss.item(), norm.item()
        if math.isfinite(numbers[0] + numbers[1]):
            if self.clips:
                clip_gradient(gradients, norm, self.max_grad_norm(self.progress.scheduled))
            with flushing_for([self]):
                self.optimizer.step(self.rate)
            self.units.project()
        else:
            learned = [p for p in self.parameters if p.grad is not None]
            wrong = list[Tensor](p for p, x in zip(learned, gradients, strict=True) if not bool(x.isfinite().all()))
            self._skip(*numbers, self.progress.updates, batch, wrong)
        return norm

    def _launch(self, loss: Tensor, batch: Tree, unless: Tensor | None) -> Tensor:
        """`_step` without a look at any value."""
        self.launched = True
        if not self.is_captured:
            self.before_launch()
        gradients = gradients_of(self.parameters)
        norm = gradient_norm(gradients)
        skipped = (~(loss + norm).isfinite()).float()
        if unless is not None:  # then they may be anything, and no step is missed
            skipped, norm = torch.where(unless, 1.0, skipped), torch.where(unless, 0.0, norm)
            loss = torch.where(unless, 0.0, loss)
        self._numbers.copy_(torch.stack([loss.float(), norm.float()]))
        if is_recording():
            skipped = held(skipped[None])[0]
        if self.clips:
            clip_gradient_on_device(gradients, norm, self._max_norm)
        self.optimizer.step(self._rate, skipped)
        self.units.project(skipped)
        if not self.is_captured:
            self.after_launch(batch)
        return norm

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which a step may become part of a graph; `launched` says whether it did."""
        self.is_captured, self.launched = True, False
        try:
            yield
        finally:
            self.is_captured = False
            for parameter in self.parameters:
                parameter.grad = None

    def before_launch(self) -> None:
        """Write the current rate, and norm if it changes, to where the kernels read them."""
        if (rate := self.rate) != self._launched_rate:
            self._rate.fill_(rate)
            self._launched_rate = rate
        if len(self.max_grad_norm.values) > 1:
            self._max_norm.fill_(self.max_grad_norm(self.progress.scheduled))

    def after_launch(self, batch: Tree) -> None:
        """Look at the outcome of the step before, and fetch that of this one, which learned from `batch`.

        On a CPU look at that of this one.
        """
        self.check()
        if self._numbers.is_cpu:
            self._judge(self._numbers, self.progress.updates, batch)
        else:
            self._fetched.start()
            self._pending = [(self.progress.updates, batch)]

    def check(self) -> None:
        """Look at the outcome of the newest step, if that is not known yet."""
        for updates, batch in self._pending:
            self._judge(self._fetched.wait(), updates, batch)
        self._pending = []

    def _judge(self, numbers: Tensor, updates: int, batch: Tree) -> None:
        loss, norm = numbers.tolist()
        if not math.isfinite(loss + norm):
            self._skip(loss, norm, updates, batch, None)

    def _skip(self, loss: float, norm: float, updates: int, batch: Tree, wrong: list[Tensor] | None) -> None:
        facts = {"loss": loss, "grad_norm": norm}
        self.progress.skip(SkippedUpdate(updates, batch, facts, wrong, self.rate_key))

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return self.learning_rate(self.progress.scheduled)

    def keep_rate(self, rate: Scheduled) -> None:
        """Use this learning rate or schedule from now on, in place of the config's.

        Raises:
            ValueError: it is negative or not finite, or text that is no schedule.
        """
        kept = curve(read_scheduled(rate), self.n_steps)
        if not all(0 <= value < math.inf for value in kept.values):
            raise ValueError(f"learning_rate={rate} must be at least 0 and finite")
        self._kept_rate, self.learning_rate = str(rate), kept

    def use_rate(self, rate: Curve) -> None:
        """Use this learning rate from now on, as that of the config: it is not saved."""
        self._kept_rate, self.learning_rate = "", rate

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and the rate of `keep_rate`."""
        kept = {"kept_rate": self._kept_rate} if self._kept_rate else {}
        return {**self.optimizer.state_dict(), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        own = dict(state)
        kept = own.pop("kept_rate", "")
        self.optimizer.load_state_dict(own)
        if kept:
            self.keep_rate(kept)


def make_optimizer_step(
    parameters: Iterable[nn.Parameter],
    schedules: Schedules,
    rate: str = "learning_rate",
    units: Units = NO_UNITS,
    decays: bool = True,
) -> OptimizerStep:
    """A step of these parameters with the optimizer and the learning rate `rate` of the schedules' config.

    `decays`: with its weight decay, if it has one; that is for networks, and would draw a weight of a loss towards 1.
    """
    config = schedules.config.optimizer
    make = config.make if decays else config.make_without_decay
    return OptimizerStep(make(list(parameters)), schedules, rate, units)


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients of those that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Their global norm []."""
    if is_recording():
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    if len(gradients) == 1:
        return torch.linalg.vector_norm(gradients[0])
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def clip_gradient(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose global norm is `norm` so that it is at most `max_norm`.

    As nn.utils.clip_grad_norm_, whose grouping by devices takes longer than the sums of a small network.
    """
    if (scale := max_norm / (norm.item() + 1e-6)) < 1:
        torch._foreach_mul_(gradients, scale)


def clip_gradient_on_device(gradients: list[Tensor], norm: Tensor, max_norm: Tensor) -> None:
    """The same with tensors [] of the device, without waiting for it."""
    scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    torch._foreach_mul_(gradients, held(scale[None])[0] if is_recording() else scale)
