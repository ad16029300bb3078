"""Acting for some columns of a batch, on the CPU or as one CUDA graph on a GPU; the recurrent state is kept here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import Agent
from rlframe.agents.base import NoiseBuffer
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree, write, writer, zeros_like
from rlframe.core.types import AgentInputs, AgentStep
from rlframe.models import numpy_inference
from rlframe.rollout.buffer import Answers, Batch, Rows, empty_rows
from rlframe.system.shared import Shared

_WARM_UPS = 3  # steps before capture, in which libraries choose their kernels and allocate

_log = logging.getLogger("rlframe")


class Pinned:
    """Memory that a GPU copies from by itself, while we go on: whoever reuses it waits by `settle` first.

    Where `device` is no GPU, or the memory cannot be pinned, copies are complete when they return, and nothing is done.
    """

    def __init__(self, memory: Shared, device: torch.device) -> None:
        self._device, self._address = device, 0
        if device.type == "cuda":
            address = min(array.ctypes.data for array in leaves(memory.tree))
            if int(torch.cuda.cudart().cudaHostRegister(address, memory.n_bytes, 0)) == 0:
                self._address = address
            else:
                _log.warning(f"{memory.n_bytes / 1e6:,.1f} MB of batches could not be pinned; copies to the GPU wait")

    def settle(self) -> None:
        """Wait for the copies that were begun."""
        if self._address:
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Let it be ordinary memory again. May be called twice."""
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = 0


class DeviceStep:
    """`agent.step` for a fixed number of rows. Inputs, noise, state and answers have fixed places on the device.

    Replaying a graph spares the launch of each kernel; parameters and statistics are read where the learner updates
    them, in place. A model that cannot be captured (one that looks at values to decide what to do) runs as it is.
    `device` may be the CPU, where nothing is pinned or captured: so the sequence is tested without a GPU.
    """

    def __init__(self, agent: Agent, inputs: AgentInputs, state: Tree, noise: Tree) -> None:
        """Args:
        inputs: NumPy rows [n] as an example.    state, noise: rows [n] on the agent's device, to begin with.
        """
        self.agent, self.device = agent, next(agent.parameters()).device
        self._on_gpu = self.device.type == "cuda"
        self._host_inputs = inputs.map(lambda x: self._host(torch.from_numpy(x)))
        self.inputs: AgentInputs = self._host_inputs.map(as_numpy)  # where to write the next rows
        self._inputs = self._host_inputs.map(lambda x: x.to(self.device, copy=True))
        self._noise, self._state = map_tree(torch.clone, noise), map_tree(torch.clone, state)
        self._graph: Any = None
        self._step = self._captured() if self._on_gpu else self._eager()
        self._answer = map_tree(self._host, (self._step.action, self._step.info))
        _copy(self._state, state)

    def _host(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._on_gpu)

    @property
    def state(self) -> Tree:
        """The agent's state after the last step, on the device; changes with each."""
        return self._state

    @state.setter
    def state(self, value: Tree) -> None:
        _copy(self._state, value)

    def __call__(self, noise: Tree) -> tuple[Tree, Tree]:
        """Act on what was written into `inputs`: NumPy (action, info), valid until the next call."""
        _copy(self._inputs, self._host_inputs)
        _copy(self._noise, noise)
        if self._graph is None:
            self._step = self._eager()
        else:
            self._graph.replay()
        _copy(self._answer, (self._step.action, self._step.info))
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        return map_tree(as_numpy, self._answer)

    @torch.inference_mode()
    def _eager(self) -> AgentStep:
        """One step, whose state takes the place of the one before."""
        step = self.agent.step(self._inputs, self._state, self._noise)
        _copy(self._state, step.state)
        return step

    def _captured(self) -> AgentStep:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step = self._eager()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # The stream twice: where a capture fails, graph() leaves its own the current one.
            with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
                step = self._eager()
        except RuntimeError as error:
            _log.warning(f"acting runs without a CUDA graph, for the agent's step cannot be captured: {error}")
            torch.cuda.synchronize(self.device)
            return self._eager()
        self._graph = graph
        return step


def _copy(target: Tree, source: Tree) -> None:
    """Between tensors in the same places, without waiting."""
    for to, from_ in zip(leaves(target), leaves(source), strict=True):
        to.copy_(from_, non_blocking=True)


# Rows are acted for in multiples of this, filled up with zeros: matrix products then give each row the same bits
# however the environments are split over workers, groups and threads (torch's too: checked for 1 to 64 rows, dense,
# convolutional and recurrent; in other numbers they differ in the last bit).
_BLOCK = numpy_inference.BLOCK


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


def noise_state(rngs: Sequence[np.random.Generator]) -> list[Any]:
    """The states of noise generators."""
    return [rng.bit_generator.state for rng in rngs]


def load_noise(rngs: Sequence[np.random.Generator], states: Sequence[Any]) -> None:
    """Set noise generators to saved states."""
    for rng, saved in zip(rngs, states, strict=True):
        rng.bit_generator.state = saved
