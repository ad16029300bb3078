"""Environments of several agents for tests: agents that come and die at random, and agents that take turns."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

N_ACTIONS = 5


class Crowd(ParallelEnv[str, Any, Any]):
    """Agents come and die at random. An agent observes its number, its step and the episode's; its action is rewarded.

    An episode has at most 20 steps. What has an even number is terminated when it dies, the others are truncated.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "crowd"}
    render_mode = None

    def __init__(self, n: int = 4, kinds: int = 1, death: float = 0.2) -> None:
        """With two `kinds`, agents of an odd number observe one number more."""
        names = [f"{'odd' if kinds == 2 and i % 2 else 'even'}_{i}" for i in range(n)]
        self.possible_agents, self._death = names, death
        self._rng = np.random.default_rng(0)

    def _number(self, agent: str) -> int:
        return int(agent.rpartition("_")[2])

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-1, 100, (4 if agent.startswith("odd") else 3,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(N_ACTIONS)

    def _observations(self, agents: list[str]) -> dict[str, np.ndarray]:
        found = {}
        for agent in agents:
            own = [self._number(agent), self._ages[agent], self._t, 7.0]
            found[agent] = np.array(own[: self.observation_space(agent).shape[0]], np.float32)
        return found

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self._rng = np.random.default_rng(seed)
        self._t = 0
        self._ages = dict.fromkeys(self.possible_agents, 0)
        self.agents = [agent for agent in self.possible_agents if self._rng.random() < 0.7] or self.possible_agents[:1]
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        assert sorted(actions) == sorted(self.agents)
        self._t += 1
        acted, last = list(self.agents), self._t == 20
        dead = [agent for agent in acted if self._rng.random() < self._death]
        for agent in acted:
            self._ages[agent] += 1
        come = [a for a in self.possible_agents if a not in acted and self._rng.random() < 0.3 and not last]
        for agent in come:
            self._ages[agent] = 0
        rewards = {agent: float(actions[agent]) for agent in acted}
        terminated = {agent: agent in dead and self._number(agent) % 2 == 0 for agent in acted}
        truncated = {agent: last or (agent in dead and not terminated[agent]) for agent in acted}
        self.agents = (
            [agent for agent in self.possible_agents if agent in {*acted, *come} - {*dead}] if not last else []
        )
        if not self.agents and not last:  # nobody is left before anybody comes
            return self._observations(acted), rewards, terminated, truncated, {agent: {} for agent in acted}
        return self._observations([*acted, *come]), rewards, terminated, truncated, {a: {} for a in acted}


class Turns(AECEnv[str, Any, Any]):
    """Three players take turns; one that acts gets its action as reward, and the others 10 each.

    Player 2 leaves after its second turn, by termination; the others play until the step `length`. A player observes
    its number and the steps so far. Action 0 is forbidden at even steps.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "turns", "is_parallelizable": False}
    render_mode = None

    def __init__(self, length: int = 11) -> None:
        super().__init__()
        self.possible_agents = ["player_0", "player_1", "player_2"]
        self._length = length

    def observation_space(self, agent: str) -> spaces.Dict:
        own = {"observation": spaces.Box(-1, 100, (2,), np.float32)}
        return spaces.Dict({**own, "action_mask": spaces.Box(0, 1, (N_ACTIONS,), np.int8)})

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(N_ACTIONS)

    def observe(self, agent: str) -> dict[str, np.ndarray]:
        mask = np.ones(N_ACTIONS, np.int8)
        mask[0] = self._t % 2
        return {"observation": np.array([int(agent[-1]), self._t], np.float32), "action_mask": mask}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents = self.possible_agents[:]
        self._t, self._turns = 0, dict.fromkeys(self.agents, 0)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action or (action is not None and self._t % 2), "a forbidden action"
        self._t += 1
        self._turns[agent] += 1
        self.rewards = {each: float(action) if each == agent else 10.0 for each in self.agents}
        if agent == "player_2" and self._turns[agent] == 2:
            self.terminations[agent] = True
        if self._t == self._length:
            self.truncations = dict.fromkeys(self.agents, True)
        order = [each for each in self.agents if not self.terminations[each] or each == agent]
        self.agent_selection = order[(order.index(agent) + 1) % len(order)]
        if self.terminations[agent]:
            self._deads_step_first()

    def state(self) -> np.ndarray:
        return np.array([self._t], np.float32)
