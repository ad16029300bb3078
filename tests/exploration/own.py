"""Exploration of a user's own: the second-best action, and a constant push."""

from typing import Any

import numpy as np

from rlframe.exploration import ActionNoise, ExploreState, QExploration


class SecondBest(QExploration):
    """With probability `level` the action after the best one."""

    def __init__(self, n_actions: int, masked: bool, graded: bool = False, step: int = 1) -> None:
        super().__init__(n_actions, masked, graded)
        self.step = step

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Any:
        return rng.random(lead, dtype=np.float32)

    def choose(self, q: Any, inputs: Any, noise: Any, state: ExploreState, level: Any, xp: Any) -> Any:
        best = q.argmax(-1)
        return xp.where(noise > 1 - self.level_of(level, state, xp), (best + self.step) % self.n_actions, best), state


class Push(ActionNoise):
    """Pushes all actions by `level`."""

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Any:
        return np.ones((*lead, 1), np.float32)

    def perturb(self, action: Any, inputs: Any, noise: Any, state: ExploreState, level: Any, xp: Any) -> Any:
        return (action + self.level_of(level, state, xp).reshape(-1, 1) * noise).clip(-1, 1), state


class Unrelated:
    """No exploration."""
