"""An algorithm whose best schedule is known, after the toy of Jaderberg et al. 2017 (arXiv 1711.09846, figure 2).

It maximises Q = 1.2 - x² - y² from x = y = 0.9, but x falls only while h > 0.7, and y only while h < 0.3. With a
constant h, Q stays at most 1.2 - 0.81 = 0.39. With any schedule that is above 0.7 and below 0.3 for long enough it
comes to 1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chz
import gymnasium

from rlframe.agents import PolicyAgent, make_policy_agent
from rlframe.algos.base import Algorithm
from rlframe.core.config import fraction
from rlframe.core.schedule import Scheduled, curve, scheduled
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.updates.progress import Progress

START, BEST, BEST_CONSTANT = 0.9, 1.2, 0.39


class Switching(Algorithm):
    saved = ("progress",)

    def __init__(self, config: Config, n_steps: int) -> None:
        self.config, self.progress, self.h = config, Progress(), curve(config.h, n_steps)
        self.place, self.n_due = [START, START], 0

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.n_due = 1

    def updates_due(self) -> int:
        return self.n_due

    def update(self) -> dict[str, float]:
        h, self.n_due = self.h(self.progress.scheduled), 0
        falls = (h > 0.7, h < 0.3)
        self.place = [x * (1 - self.config.rate * moves) for x, moves in zip(self.place, falls, strict=True)]
        self.progress.updates += 1
        return {"q": BEST - sum(x**2 for x in self.place), "h": h}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "place": list(self.place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.place = list(state["place"])


@chz.chz
class Config:
    h: Scheduled = scheduled(0.5, "which of x and y falls", high=1)
    rate: float = fraction(0.25, "part that is lost in an update")

    def make_agent(
        self, observation_space: gymnasium.Space, action_space: gymnasium.Space, model: ModelConfig, seed: int
    ) -> PolicyAgent:
        return make_policy_agent(observation_space, action_space, model, seed)

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> Switching:
        return Switching(self, n_steps)
