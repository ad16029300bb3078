"""The memory of a batch as environments see it: what they read and write at each of its T time steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import Space

from rlframe.core import spaces
from rlframe.core.struct import Struct, Tree, map_tree
from rlframe.envs.base import EnvStep


@dataclass(frozen=True, eq=False)
class Rows(Struct):
    """NumPy arrays. Step t reads `action[t + 1]`, writes row t + 1 of the first group and row t of the second."""

    action: Tree  # [T+1, B]; row t + 1 is the action of step t, and so the previous action at row t + 1
    observation: Tree  # [T+1, B]
    first: np.ndarray  # [T+1, B] bool
    reward: np.ndarray  # [T+1, B] float32; row t + 1 is the reward of step t

    terminated: np.ndarray  # [T, B] bool
    truncated: np.ndarray  # [T, B] bool
    valid: np.ndarray  # [T, B] bool
    score: np.ndarray  # [T, B] float32: the environment's own reward
    ended: np.ndarray  # [T, B] bool: the episode really ended

    @property
    def T(self) -> int:
        return len(self.valid)

    @property
    def B(self) -> int:
        return self.valid.shape[1]

    def columns(self, lo: int, hi: int) -> Rows:
        """Views of the environments lo to hi - 1."""
        return self.map(lambda x: x[:, lo:hi])

    def actions(self) -> list[Tree]:
        """The actions of each step."""
        return [map_tree(lambda x, t=t: x[t + 1], self.action) for t in range(self.T)]

    def steps(self) -> list[EnvStep]:
        """Where each step writes."""
        return [self._step(t) for t in range(self.T)]

    def _step(self, t: int) -> EnvStep:
        return EnvStep(
            observation=map_tree(lambda x: x[t + 1], self.observation),
            first=self.first[t + 1],
            reward=self.reward[t + 1],
            terminated=self.terminated[t],
            truncated=self.truncated[t],
            valid=self.valid[t],
            score=self.score[t],
            ended=self.ended[t],
        )


def empty_rows(observation_space: Space, action_space: Space, T: int, B: int) -> Rows:
    """Zeros, canonical (see core.spaces)."""
    return Rows(
        action=spaces.zeros(action_space, (T + 1, B)),
        observation=spaces.zeros(observation_space, (T + 1, B)),
        first=np.zeros((T + 1, B), bool),
        reward=np.zeros((T + 1, B), np.float32),
        terminated=np.zeros((T, B), bool),
        truncated=np.zeros((T, B), bool),
        valid=np.zeros((T, B), bool),
        score=np.zeros((T, B), np.float32),
        ended=np.zeros((T, B), bool),
    )
