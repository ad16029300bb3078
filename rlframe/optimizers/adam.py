"""Adam: A Method for Stochastic Optimization. Kingma & Ba, 2015. arXiv 1412.6980."""

from __future__ import annotations

from collections.abc import Sequence

import chz
import torch
from torch import Tensor, nn

from rlframe.core.config import number
from rlframe.optimizers.base import Moments, OptimizerConfig, betas, epsilon

_LEAST_EPSILON = 1e-12  # with which denormals may be zero


@chz.chz
class Config(OptimizerConfig):
    """Algorithm 1."""

    betas: tuple[float, ...] = betas()
    epsilon: float = epsilon()
    weight_decay: float = number(0.0, "times the parameters, is added to the gradients; adamw decays them apart")

    def make(self, parameters: Sequence[nn.Parameter]) -> Adam:
        return Adam(parameters, self.betas, self.epsilon, self.weight_decay)


class Adam(Moments):
    """m <- β₁ m + (1 - β₁) g,  v <- β₂ v + (1 - β₂) g²,  θ <- θ - rate m^ / (√v^ + ε), as one kernel.

    m^ = m / (1 - β₁^t) and v^ = v / (1 - β₂^t).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        betas: tuple[float, ...],
        epsilon: float,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        """`decoupled`: weight decay does not pass through the moments (AdamW)."""
        super().__init__(parameters, ("exp_avg", "exp_avg_sq"))
        (self.beta1, self.beta2), self.epsilon, self.weight_decay = betas, epsilon, weight_decay
        # The moments of dead units decay to denormals, with which a step takes up to 1.7 times as long. Zeros instead
        # change a step by less than 1.2e-38 / ε of the rate, and a root of at most 1.1e-19 vanishes beside ε.
        self.flushes = epsilon >= _LEAST_EPSILON
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def _move(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> None:
        parameters, gradients, steps, means, squares = lists
        self._kernel(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )
