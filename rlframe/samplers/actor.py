"""Acting for some columns of a batch: inputs to the agent's device, its answers back into the rows, its memory kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlframe.agents import Agent
from rlframe.agents.base import NoiseBuffer
from rlframe.core.struct import Tree, leaves, map_tree, write
from rlframe.core.types import AgentInputs
from rlframe.samplers.batch import Batch

# Rows are acted for in multiples of this, filled up with zeros: matrix products then give each row the same bits
# however the environments are split over workers, groups and threads (checked for 1 to 64 rows, dense, convolutional
# and recurrent; in other numbers they differ in the last bit).
_BLOCK = 4


def block_of(n_envs: int) -> int:
    """The multiple in which rows are acted for; a batch of a single environment is never split."""
    return _BLOCK if n_envs > 1 else 1


class Actor:
    """An agent and its recurrent state in columns lo to hi - 1 of a batch. Noise is drawn a batch at a time."""

    def __init__(
        self, agent: Agent, batch: Batch, lo: int, rngs: Sequence[np.random.Generator], explore: bool, block: int
    ) -> None:
        """Args:
        batch: the memory of these columns.    lo: index of the first environment among all.
        rngs: a noise generator for each environment.    explore: act with noise instead of zeros.
        """
        self.agent, self.batch, self.explore = agent, batch, explore
        self.device = next(agent.parameters()).device
        self.n = batch.rows.B
        self.n_rows = -(-self.n // block) * block
        self.noise = NoiseBuffer(agent, batch.rows.T, self.n_rows, rngs)
        env_ids = [lo + min(row, self.n - 1) for row in range(self.n_rows)]
        self.state: Tree = map_tree(lambda x: x.to(self.device), agent.initial_state(env_ids))
        self.has_state = bool(leaves(self.state))
        inputs = batch.inputs()
        self._inputs = [inputs[t] for t in range(batch.rows.T)]
        self._actions = batch.rows.actions()
        self._infos = [map_tree(lambda x, t=t: x[t], batch.answers.info) for t in range(batch.rows.T)]
        self._allocate(inputs)

    def _allocate(self, inputs: AgentInputs) -> None:
        """Where the rows are those of a block, the agent sees the batch itself."""
        self._direct = self.n == self.n_rows
        self._block = inputs[0].map(lambda x: np.zeros((self.n_rows, *x.shape[1:]), x.dtype))
        self._rows_of_block = self._block[: self.n]
        self._torch_block = self._block.torch()
        self._torch_inputs = [row.torch() for row in self._inputs] if self._direct else []
        self._on_cpu = self.device.type == "cpu"
        self._noises = self._noise_rows()

    def _noise_rows(self) -> list[Tree]:
        noise = map_tree(torch.from_numpy, self.noise.arrays)
        on_device = map_tree(lambda x: x.to(self.device), noise)
        return [map_tree(lambda x, t=t: x[t], on_device) for t in range(self.noise.T)]

    def draw(self) -> None:
        """Draw the noise of a batch."""
        if self.explore:
            self.noise.draw()
            if not self._on_cpu:
                self._noises = self._noise_rows()

    def begin(self) -> None:
        """Keep the state that a batch starts from."""
        if self.has_state:
            write(self.batch.answers.state, self._own(self.state))

    def act(self, t: int) -> None:
        """Write the actions and infos of step t."""
        if self._direct:
            inputs = self._torch_inputs[t]
        else:
            write(self._rows_of_block, self._inputs[t])
            inputs = self._torch_block
        step = self.agent.step(inputs if self._on_cpu else inputs.to(self.device), self.state, self._noises[t])
        self.state = step.state
        write(self._actions[t], self._own(step.action))
        write(self._infos[t], self._own(step.info))

    def _own(self, answer: Tree) -> Tree:
        """Without the rows that fill up the block."""
        return answer if self._direct else map_tree(lambda x: x[: self.n], answer)

    def end(self) -> None:
        """Keep the state that the next batch starts from."""
        if self.has_state:
            write(self.batch.answers.final_state, self._own(self.state))
