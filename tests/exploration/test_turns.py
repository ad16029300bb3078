"""Exploration with a state, in an environment whose agents take turns."""

from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

import rlframe

AECEnv = pytest.importorskip("pettingzoo").AECEnv
SLOW = pytest.mark.slow
N_ACTIONS, N_TURNS = 50, 200
PLAYED: list[int] = []  # by player 0


class Alternating(AECEnv):  # type: ignore[misc, valid-type]
    """Players act one after another, and get nothing."""

    metadata: ClassVar[dict[str, Any]] = {"name": "alternating", "is_parallelizable": False}
    render_mode = None

    def __init__(self, n: int) -> None:
        super().__init__()
        self.possible_agents = [f"player_{i}" for i in range(n)]

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(N_ACTIONS)

    def observe(self, agent: str) -> np.ndarray:
        return np.zeros(2, np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self._n = [*self.possible_agents], 0
        self.agent_selection = self.agents[0]
        self.rewards, self._cumulative_rewards = (dict.fromkeys(self.agents, 0.0) for _ in range(2))
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        if self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            return
        if self.agent_selection == "player_0":
            PLAYED.append(int(action))
        self._n += 1
        self.truncations = {agent: self._n >= N_TURNS * len(self.possible_agents) for agent in self.agents}
        self.agent_selection = self.agents[self._n % len(self.agents)]


@pytest.mark.parametrize("n", [pytest.param(1, marks=SLOW), 2, pytest.param(4, marks=SLOW)])
def test_an_action_is_held_for_as_many_turns_of_its_agent_however_many_others_play(tmp_path: Path, n: int) -> None:
    PLAYED.clear()
    settings = {
        "env": Alternating,
        "env_kwargs.n": n,
        "algo": "dqn",
        "explore": "noise_hold",
        "explore.epsilon": 1.0,
        "explore.mu": 0.01,
        "explore.longest": 10,
        "runner.n_steps": 1000 * n,
        "algo.learning_starts": 900 * n,
        "algo.replay_ratio": 1,
        "algo.batch_size": 8,
        "model.hidden": [8],
        "sampler.batch_B": 1,
        "sampler.batch_T": 20,
        "sampler": "serial",
        "eval.n_episodes": 0,
        "affinity": "none",
        "log_dir": tmp_path,
    }
    rlframe.train(**settings)
    held = [len(list(same)) for _, same in groupby(PLAYED[: 4 * N_TURNS])]
    assert np.mean(held) == pytest.approx(5.5, abs=0.8)  # of 1 to 10, nearly uniform; waiting turns once counted too
