"""Acting for some columns of a batch: the rows to the agent, its answers back into them, its recurrent state kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlframe.agents import Agent
from rlframe.agents.base import NoiseBuffer
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree, write, writer
from rlframe.core.types import AgentInputs
from rlframe.models import on_numpy
from rlframe.samplers.batch import Batch
from rlframe.samplers.device import DeviceStep

# Rows are acted for in multiples of this, filled up with zeros: matrix products then give each row the same bits
# however the environments are split over workers, groups and threads (torch's too: checked for 1 to 64 rows, dense,
# convolutional and recurrent; in other numbers they differ in the last bit).
_BLOCK = on_numpy.BLOCK


def block_of(n_envs: int) -> int:
    """The multiple in which rows are acted for; a batch of a single environment is never split."""
    return _BLOCK if n_envs > 1 else 1


class Actor:
    """An agent and its recurrent state in columns lo to hi - 1 of a batch. Noise is drawn a batch at a time."""

    def __init__(
        self, agent: Agent, batch: Batch, lo: int, rngs: Sequence[np.random.Generator], explore: bool, block: int
    ) -> None:
        """Args:
        batch: the memory of these columns.    lo: index of the first environment among all, over all ranks.
        rngs: a noise generator for each environment.    explore: act with noise instead of zeros.
        """
        self.agent, self.batch, self.explore = agent, batch, explore
        self.n, T = batch.rows.B, batch.rows.T
        self.n_rows = -(-self.n // block) * block
        self.noise = NoiseBuffer(agent, T, self.n_rows, rngs)
        inputs = batch.inputs()
        self._inputs = [inputs[t] for t in range(T)]
        self._write_action = [writer(action) for action in batch.rows.actions()]
        self._write_info = [writer(map_tree(lambda x, t=t: x[t], batch.answers.info)) for t in range(T)]
        env_ids = [lo + min(row, self.n - 1) for row in range(self.n_rows)]
        block_inputs = inputs[0].map(lambda x: np.zeros((self.n_rows, *x.shape[1:]), x.dtype))
        self._device = device = next(agent.parameters()).device
        self._step: _HostStep | DeviceStep
        # Of each step, where the agent can see the batch itself, which then has no gaps to fill:
        self._direct: list[Callable[[Tree], tuple[Tree, Tree]]] = []
        if device.type == "cpu":
            self._step = step = _HostStep(agent, block_inputs, agent.initial_state(env_ids))
            if self.n == self.n_rows:
                self._direct = [partial(step.on, step.seen(row)) for row in self._inputs]
            self._noises = self._noise_rows(step.seen)
        else:
            state = map_tree(lambda x: x.to(device), agent.initial_state(env_ids))
            self._noises = self._noise_rows(self._on_device)
            self._step = DeviceStep(agent, block_inputs, state, self._noises[0])
        self._write_inputs = writer(self._step.inputs[: self.n])
        self.has_state = bool(leaves(self._step.state))

    def _noise_rows(self, seen: Callable[[Tree], Tree]) -> list[Tree]:
        noise = seen(self.noise.arrays)
        return [map_tree(lambda x, t=t: x[t], noise) for t in range(self.noise.T)]

    def _on_device(self, tree: Tree) -> Tree:
        return map_tree(lambda x: torch.from_numpy(x).to(self._device), tree)

    def resume(self) -> None:
        """Take on the state that the next batch starts from, which somebody has written into the batch."""
        if self.has_state:
            state = map_tree(_copied, self._step.state)
            write(self._own(state), self.batch.answers.final_state)
            self._step.state = state

    def draw(self) -> None:
        """Draw the noise of a batch."""
        if self.explore:
            self.noise.draw()
            if self._device.type != "cpu":
                self._noises = self._noise_rows(self._on_device)

    def begin(self) -> None:
        """Keep the state that a batch starts from."""
        if self.has_state:
            write(self.batch.answers.state, self._own(self._step.state))

    def act(self, t: int) -> None:
        """Write the actions and infos of step t."""
        if self._direct:  # the agent sees the batch itself
            action, info = self._direct[t](self._noises[t])
        else:
            self._write_inputs(self._inputs[t])
            action, info = self._step(self._noises[t])
        self._write_action[t](self._own(action))
        self._write_info[t](self._own(info))

    def _own(self, answer: Tree) -> Tree:
        """Without the rows that fill up the block."""
        return answer if self.n == self.n_rows else map_tree(lambda x: x[: self.n], answer)

    def end(self) -> None:
        """Keep the state that the next batch starts from."""
        if self.has_state:
            write(self.batch.answers.final_state, self._own(self._step.state))


def _copied(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


class _HostStep:
    """The agent's step on the CPU, in NumPy if it can; the counterpart of DeviceStep."""

    def __init__(self, agent: Agent, inputs: AgentInputs, state: Tree) -> None:
        in_numpy = agent.numpy_step(len(inputs.first))
        self.on_numpy = in_numpy is not None
        self.agent_step = in_numpy or agent.step
        self.inputs, self.state = inputs, map_tree(as_numpy, state) if self.on_numpy else state
        self._seen_inputs = self.seen(inputs)

    def seen(self, tree: Tree) -> Tree:
        """NumPy arrays as the agent takes them: the same memory."""
        return tree if self.on_numpy else map_tree(torch.from_numpy, tree)

    def __call__(self, noise: Tree) -> tuple[Tree, Tree]:
        """Act on what was written into `inputs`."""
        return self.on(self._seen_inputs, noise)

    def on(self, inputs: AgentInputs, noise: Tree) -> tuple[Tree, Tree]:
        """Act on these."""
        step = self.agent_step(inputs, self.state, noise)
        self.state = step.state
        return step.action, step.info
