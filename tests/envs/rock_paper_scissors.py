"""Rock, paper, scissors in several rounds, as an environment of two agents."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

_NONE = 3  # no move yet


class RockPaperScissors(ParallelEnv):
    """Both see the other's last move; paper (1) beats rock (0), scissors (2) beat paper, rock beats scissors."""

    metadata: ClassVar = {"name": "rock_paper_scissors"}

    def __init__(self, rounds: int = 4, n_seen: int = 4) -> None:
        self.possible_agents, self.agents = ["left", "right"], []
        self._rounds, self._n_seen, self._round = rounds, n_seen, 0

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 1, (self._n_seen,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents, self._round = list(self.possible_agents), 0
        return {agent: self._seen(_NONE) for agent in self.agents}, {agent: {} for agent in self.agents}

    def _seen(self, move: int) -> np.ndarray:
        return np.eye(self._n_seen, dtype=np.float32)[move]

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        self._round += 1
        left, right = int(actions["left"]), int(actions["right"])
        outcome = (0.0, 1.0, -1.0)[(left - right) % 3]
        over = self._round >= self._rounds
        each = list(self.agents)
        found = (
            {"left": self._seen(right), "right": self._seen(left)},
            {"left": outcome, "right": -outcome},
            dict.fromkeys(each, over),
            dict.fromkeys(each, False),
            {agent: {} for agent in each},
        )
        self.agents = [] if over else each
        return found


def always_paper(observation: Any, action_space: spaces.Discrete, rng: np.random.Generator) -> int:
    return 1


def always_rock(observation: Any, action_space: spaces.Discrete, rng: np.random.Generator) -> int:
    return 0
