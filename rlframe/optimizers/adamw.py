"""AdamW: Decoupled Weight Decay Regularization. Loshchilov & Hutter, 2019. arXiv 1711.05101."""

from __future__ import annotations

from collections.abc import Sequence

import chz
from torch import nn

from rlframe.core.config import number
from rlframe.optimizers.adam import Adam
from rlframe.optimizers.base import OptimizerConfig, betas, epsilon


@chz.chz
class Config(OptimizerConfig):
    """Algorithm 2: θ <- θ - rate (m^ / (√v^ + ε) + λ θ)."""

    betas: tuple[float, ...] = betas()
    epsilon: float = epsilon()
    weight_decay: float = number(0.01, "lambda: times the learning rate, the part that parameters lose in a step")

    def make(self, parameters: Sequence[nn.Parameter]) -> Adam:
        return Adam(parameters, self.betas, self.epsilon, self.weight_decay, decoupled=True)
