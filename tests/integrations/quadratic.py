"""The toy problem of Jaderberg et al. 2017, fig. 2, as an algorithm that learns nothing from its environment."""

from __future__ import annotations

from typing import Any

import chz
import torch
from torch import nn

from rlframe.agents import PolicyAgent
from rlframe.algos import on_policy
from rlframe.algos.base import Algorithm
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec, Samples
from rlframe.updates.progress import Progress


@chz.chz
class Config(on_policy.OnPolicyConfig):
    """Maximise Q = 1.2 - θ0² - θ1² by ascending 1.2 - w θ0² - (1 - w) θ1².

    With w of 0 or 1 all along, one of θ = (0.9, 0.9) stays, and Q <= 0.39. With each for a while, Q comes to 1.2.
    """

    weight: Scheduled = scheduled(1.0, "w", high=1)

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> Quadratic:
        return Quadratic(self)


class Quadratic(Algorithm):
    """Gradient ascent with rate 0.05."""

    saved = ("progress", "theta")

    def __init__(self, config: Config) -> None:
        self.config, self.progress, self.due = config, Progress(), 0
        self.theta = nn.ParameterDict({"theta": nn.Parameter(torch.full((2,), 0.9))})

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.due += 1

    def updates_due(self) -> int:
        return self.due

    @torch.no_grad()
    def update(self) -> dict[str, Any]:
        w, theta = float(self.config.weight), self.theta["theta"]  # type: ignore[arg-type]
        theta -= 0.05 * 2 * torch.tensor([w, 1 - w]) * theta
        self.due -= 1
        self.progress.updates += 1
        return {"quality": 1.2 - float(theta.square().sum())}
