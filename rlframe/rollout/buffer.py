"""The memory of one batch in NumPy: `EnvRows` for the environments, `AgentOutputs` for the agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from gymnasium import Space

from rlframe.core import spaces
from rlframe.core.struct import Struct, Tree, leaves, map_tree, write
from rlframe.core.types import AgentInputs, Samples
from rlframe.envs.base import EnvStep

NOBODY = np.zeros(0, bool)  # environments that wait, where none ever does


@dataclass(frozen=True, eq=False)
class EnvRows(Struct):
    """Step t reads `action[t + 1]` and writes row t + 1 of the first four fields and row t of the others."""

    action: Tree  # [T+1, B]; row t + 1 is the action of step t, and the previous action at row t + 1
    observation: Tree  # [T+1, B]
    first: np.ndarray  # [T+1, B] bool
    reward: np.ndarray  # [T+1, B] float32; row t + 1 is the reward of step t
    terminated: np.ndarray  # [T, B] bool
    truncated: np.ndarray  # [T, B] bool
    valid: np.ndarray  # [T, B] bool
    raw_reward: np.ndarray  # [T, B] float32: the environment's own reward
    ended: np.ndarray  # [T, B] bool: the real episode ended (see EnvStep)

    @property
    def T(self) -> int:
        return len(self.valid)

    @property
    def B(self) -> int:
        return self.valid.shape[1]

    def columns(self, lo: int, hi: int) -> EnvRows:
        """Views of environments lo to hi - 1."""
        return self.map(lambda x: x[:, lo:hi])

    def actions(self) -> list[Tree]:
        """The actions of each step."""
        return [map_tree(lambda x, t=t: x[t + 1], self.action) for t in range(self.T)]

    def steps(self) -> list[EnvStep]:
        """The arrays that each step writes."""
        return [
            EnvStep(
                observation=map_tree(lambda x, t=t: x[t + 1], self.observation),
                first=self.first[t + 1],
                reward=self.reward[t + 1],
                terminated=self.terminated[t],
                truncated=self.truncated[t],
                valid=self.valid[t],
                raw_reward=self.raw_reward[t],
                ended=self.ended[t],
            )
            for t in range(self.T)
        ]


def empty_rows(observation_space: Space, action_space: Space, T: int, B: int) -> EnvRows:
    """Zeros for canonical observations and actions (see core.spaces)."""
    return EnvRows(
        action=spaces.zeros(action_space, (T + 1, B)),
        observation=spaces.zeros(observation_space, (T + 1, B)),
        first=np.zeros((T + 1, B), bool),
        reward=np.zeros((T + 1, B), np.float32),
        terminated=np.zeros((T, B), bool),
        truncated=np.zeros((T, B), bool),
        valid=np.zeros((T, B), bool),
        raw_reward=np.zeros((T, B), np.float32),
        ended=np.zeros((T, B), bool),
    )


@dataclass(frozen=True, eq=False)
class AgentOutputs(Struct):
    """What the agent computes for a batch besides its actions."""

    info: Tree  # [T, B]
    state: Tree  # [B] before row 0
    final_state: Tree  # [B] before row T


@dataclass(frozen=True, eq=False)
class BatchBuffer(Struct):
    """T time steps of B environments."""

    rows: EnvRows
    outputs: AgentOutputs

    def copy(self, samples: Samples) -> None:
        """Copy a batch of this size, of tensors or arrays."""
        rows = self.rows
        write(self.inputs(), samples.inputs)
        write((rows.terminated, rows.truncated, rows.valid), (samples.terminated, samples.truncated, samples.valid))
        write(self.outputs, AgentOutputs(samples.info, samples.state, samples.final_state))

    def columns(self, lo: int, hi: int) -> BatchBuffer:
        """Views of environments lo to hi - 1."""
        info = map_tree(lambda x: x[:, lo:hi], self.outputs.info)
        state, final_state = map_tree(lambda x: x[lo:hi], (self.outputs.state, self.outputs.final_state))
        return BatchBuffer(self.rows.columns(lo, hi), AgentOutputs(info, state, final_state))

    def inputs(self) -> AgentInputs:
        """The agent's inputs [T+1, B]; `prev_action[t+1]` is the same memory as the action of row t."""
        rows = self.rows
        return AgentInputs(rows.observation, rows.action, rows.reward, rows.first)

    def last_row(self) -> list[np.ndarray]:
        """Row T and the agent's state before it, where the next batch starts."""
        return leaves((self.inputs()[-1], self.outputs.final_state))

    def load_last_row(self, saved: Sequence[np.ndarray]) -> None:
        """Load a copy of what `last_row` returned."""
        for leaf, value in zip(self.last_row(), saved, strict=True):
            leaf[...] = value

    def samples(self) -> Samples:
        """Torch views of the same memory; `numbered` says which batch it holds."""
        rows, outputs = self.rows, self.outputs
        samples = Samples(
            inputs=self.inputs(),
            action=map_tree(lambda x: x[1:], rows.action),
            reward=rows.reward[1:],
            terminated=rows.terminated,
            truncated=rows.truncated,
            valid=rows.valid,
            info=outputs.info,
            state=outputs.state,
            final_state=outputs.final_state,
            n_env_steps=0,
            start=0,
        )
        return samples.torch()


def numbered(samples: Samples, rows: EnvRows, start: int) -> Samples:
    """The samples of a batch whose row 0 has this time in its stream, with its env steps counted."""
    return replace(samples, start=start, n_env_steps=int(np.count_nonzero(rows.valid)))
