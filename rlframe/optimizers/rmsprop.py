"""RMSProp. Tieleman & Hinton, 2012, lecture 6.5 of Neural Networks for Machine Learning; Mnih et al., 2016."""

from __future__ import annotations

from collections.abc import Sequence

import chz
import torch
from torch import Tensor, nn

from rlframe.core.config import below_one, number
from rlframe.optimizers.base import Moments, OptimizerConfig, epsilon


@chz.chz
class Config(OptimizerConfig):
    """As in torch.optim: ε is outside of the root."""

    decay: float = below_one(0.99, "alpha: of the mean of squared gradients")
    epsilon: float = epsilon()
    momentum: float = below_one(0.0, "mu: the part of a step that the next one repeats")
    weight_decay: float = number(0.0, "times the parameters, is added to the gradients")

    def make(self, parameters: Sequence[nn.Parameter]) -> RMSProp:
        return RMSProp(parameters, self)


class RMSProp(Moments):
    """s <- α s + (1 - α) g²,  u <- μ u + g / (√s + ε),  θ <- θ - rate u."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: Config) -> None:
        super().__init__(parameters, ("square_avg", "momentum_buffer") if config.momentum else ("square_avg",))
        self.config = config

    def _move(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> None:
        parameters, gradients, _, squares, *buffers = lists
        c, keep = self.config, 1.0 if skipped is None else 1 - skipped
        if skipped is not None:
            gradients = [torch.where(skipped > 0, 0.0, gradient) for gradient in gradients]  # NaN times 0 is NaN
        if c.weight_decay:
            gradients = list(torch._foreach_add(gradients, torch._foreach_mul(parameters, c.weight_decay * keep)))
        share = (1 - c.decay) * keep
        torch._foreach_mul_(squares, 1 - share)
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(gradients, gradients), share))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, c.epsilon)
        steps = torch._foreach_div(gradients, roots)
        if buffers:
            torch._foreach_mul_(buffers[0], 1 - (1 - c.momentum) * keep)
            torch._foreach_add_(buffers[0], steps)
            steps = torch._foreach_mul(buffers[0], keep)
        torch._foreach_sub_(parameters, torch._foreach_mul(steps, rate))
