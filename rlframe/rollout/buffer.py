"""The memory of one batch: what environments read and write at each time step, and what the agent answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.core import spaces
from rlframe.core.struct import Struct, Tree, leaves, map_tree
from rlframe.core.types import AgentInputs, Samples
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


@dataclass(frozen=True, eq=False)
class Answers(Struct):
    """What the agent writes of a batch beside its actions."""

    info: Tree  # [T, B]
    state: Tree  # [B] before row 0
    final_state: Tree  # [B] before row T

    def columns(self, lo: int, hi: int) -> Answers:
        """Views of the environments lo to hi - 1."""
        return Answers(
            map_tree(lambda x: x[:, lo:hi], self.info),
            map_tree(lambda x: x[lo:hi], self.state),
            map_tree(lambda x: x[lo:hi], self.final_state),
        )


@dataclass(frozen=True, eq=False)
class Batch(Struct):
    """NumPy arrays for T time steps of B environments."""

    rows: Rows
    answers: Answers

    def columns(self, lo: int, hi: int) -> Batch:
        """Views of the environments lo to hi - 1."""
        return Batch(self.rows.columns(lo, hi), self.answers.columns(lo, hi))

    def inputs(self) -> AgentInputs:
        """What the agent sees [T+1, B]: row t+1 of actions and rewards is action[t], and prev_action[t+1]."""
        rows = self.rows
        return AgentInputs(rows.observation, rows.action, rows.reward, rows.first)

    def last_row(self) -> dict[str, Any]:
        """Row T and the agent's state before it, where the next batch starts: copies, as a snapshot can hold them."""
        row, state = self.inputs()[-1], self.answers.final_state
        return {"inputs": [np.copy(x) for x in leaves(row)], "state": [np.copy(x) for x in leaves(state)]}

    def load_last_row(self, saved: Mapping[str, Any]) -> None:
        """Write what `last_row` gave."""
        for name, target in (("inputs", self.inputs()[-1]), ("state", self.answers.final_state)):
            for leaf, value in zip(leaves(target), saved[name], strict=True):
                leaf[...] = value

    def samples(self) -> Samples:
        """Torch views."""
        rows, answers = self.rows, self.answers
        samples = Samples(
            inputs=self.inputs(),
            action=map_tree(lambda x: x[1:], rows.action),
            reward=rows.reward[1:],
            terminated=rows.terminated,
            truncated=rows.truncated,
            valid=rows.valid,
            info=answers.info,
            state=answers.state,
            final_state=answers.final_state,
        )
        return samples.torch()
