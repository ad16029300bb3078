"""Stochastic gradient descent, with momentum (Polyak 1964) or Nesterov's (Sutskever et al. 2013, ICML)."""

from __future__ import annotations

from collections.abc import Sequence

import chz
import torch
from torch import Tensor, nn

from rlframe.core.config import below_one, number, option
from rlframe.core.errors import ConfigError
from rlframe.optimizers.base import Moments, OptimizerConfig


@chz.chz
class Config(OptimizerConfig):
    """As in torch.optim."""

    momentum: float = below_one(0.0, "mu: decay of the sum of gradients that steps follow")
    nesterov: bool = option(False, "the gradient is that after the momentum's part of the step")
    weight_decay: float = number(0.0, "times the parameters, is added to the gradients")

    @chz.validate
    def _check(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError("algo.optimizer.nesterov=true needs algo.optimizer.momentum above 0, such as 0.9")

    def make(self, parameters: Sequence[nn.Parameter]) -> SGD:
        return SGD(parameters, self)


class SGD(Moments):
    """b <- μ b + g,  θ <- θ - rate b; with `nesterov` θ <- θ - rate (g + μ b), and without momentum b = g."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: Config) -> None:
        super().__init__(parameters, ("momentum_buffer",) if config.momentum else ())
        self.config = config

    def _move(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> None:
        parameters, gradients, _, *buffers = lists
        torch._fused_sgd_(
            parameters,
            gradients,
            buffers[0] if buffers else [],
            weight_decay=self.config.weight_decay,
            momentum=self.config.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=self.config.nesterov,
            maximize=False,
            is_first_step=False,  # buffers begin as zeros, which gives the same
            found_inf=skipped,
        )
