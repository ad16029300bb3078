"""Acting on a GPU: observations through pinned memory, the whole step as one CUDA graph, one wait for its answers;
and pinning memory that other processes write."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from rlframe.agents import Agent
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, AgentStep
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
