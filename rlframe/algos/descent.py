"""Gradient steps of algorithms that descend several losses an update, each with parameters of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlframe.algos.base import Progress
from rlframe.core.schedule import Linear


class Descent:
    """Adam on what one loss teaches: scheduled rate, and gradients clipped by their norm if asked."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: Linear, max_grad_norm: float, progress: Progress
    ) -> None:
        self.parameters = list(parameters)
        self.learning_rate, self.max_grad_norm, self.progress = learning_rate, max_grad_norm, progress
        self.optimizer = torch.optim.Adam(self.parameters, learning_rate.initial, fused=True)

    def step(self) -> None:
        """One step along the gradients that the parameters have."""
        if math.isfinite(self.max_grad_norm):
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.step()

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
