"""Small environments of several agents for tests and debugging. They need pettingzoo."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from rlframe.core.config import check_one_of

_SAFE = 7.0
_RISKY = np.array([[0.0, 1.0], [1.0, 8.0]])  # of the actions of both agents


class TwoStepGame(ParallelEnv[str, Any, Any]):
    """Two agents choose a matrix game and play it (Rashid et al. 2018, arXiv 1803.11485, section 5 and table 1).

    The first agent's first action decides: 0 leads to a game that pays 7 whatever they do, 1 to one that pays
    [[0, 1], [1, 8]]. Each agent gets half, so that the team's return is the payoff. They observe which of the three
    states they are in, which is also the state of the environment.

    A best answer to an agent that acts at random gains 4.5 in the second game, so who counts on that prefers 7.

    With action="box" an action x in [-1, 1] is to choose 1 with the probability (x + 1) / 2; the second game pays its
    mean over what they would choose.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "two_step_game"}
    render_mode = None

    def __init__(self, action: str = "discrete") -> None:
        known: dict[str, spaces.Space[Any]] = {"discrete": spaces.Discrete(2), "box": spaces.Box(-1, 1, (1,))}
        check_one_of("env_kwargs.action", action, known)
        self.possible_agents = ["agent_0", "agent_1"]
        self.agents: list[str] = []
        self._action, self._is_box, self._state = known[action], action == "box", 0
        self.state_space = spaces.Discrete(3)
        self._rng = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(3)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action

    def state(self) -> Any:
        return self._state

    def _observations(self) -> dict[str, int]:
        return dict.fromkeys(self.possible_agents, self._state)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents, self._state = self.possible_agents[:], 0
        return self._observations(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        acted, over = self.agents, self._state > 0
        chosen = [actions[agent] for agent in acted]
        p, q = ((float(x[0]) + 1) / 2 if self._is_box else float(x) for x in chosen)
        payoff = 0.0
        if over:
            payoff = _SAFE if self._state == 1 else float(np.array([1 - p, p]) @ _RISKY @ np.array([1 - q, q]))
            self.agents = []
        else:
            self._state = 1 + (self._rng.random() < p)
        every, infos = dict.fromkeys, {agent: dict[str, Any]() for agent in acted}
        return self._observations(), every(acted, payoff / 2), every(acted, over), every(acted, False), infos
