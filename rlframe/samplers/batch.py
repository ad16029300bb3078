"""The memory of one batch, allocated once, private or shared, and the `Samples` that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.struct import Struct, Tree, as_numpy, leaves, map_tree, zeros_like
from rlframe.core.types import AgentInputs, Samples
from rlframe.envs.rows import Rows, empty_rows


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


def empty_answers(agent: Agent, rows: Rows, env_ids: Sequence[int]) -> Answers:
    """Zeros for what `agent` answers to such rows; its state is that of the episodes' beginning."""
    device = next(agent.parameters()).device
    row = AgentInputs(rows.observation, rows.action, rows.reward, rows.first)[0].torch().to(device)
    state = agent.initial_state(env_ids)
    noise = map_tree(torch.from_numpy, zeros_like(agent.noise(np.random.default_rng(0), ()), (rows.B,)))
    step = agent.step(row, map_tree(lambda x: x.to(device), state), map_tree(lambda x: x.to(device), noise))
    initial = map_tree(lambda x: np.array(as_numpy(x)), state)
    info = map_tree(lambda x: np.zeros((rows.T, *x.shape), as_numpy(x).dtype), step.info)
    return Answers(info, map_tree(np.copy, initial), initial)


def empty_batch(observation_space: Space, action_space: Space, agent: Agent, T: int, B: int) -> Batch:
    """Private memory for a batch of all environments."""
    rows = empty_rows(observation_space, action_space, T, B)
    return Batch(rows, empty_answers(agent, rows, range(B)))
