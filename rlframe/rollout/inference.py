"""Act for the environments of a batch: on the CPU, in NumPy if possible, or as one CUDA graph on a GPU.

And whether rows keep their bits on this machine, however many act together: all samplers then give the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from rlframe.agents import Agent
from rlframe.agents.base import NoiseBuffer
from rlframe.core.errors import ConfigError, naming, qualified_name
from rlframe.core.objects import is_own
from rlframe.core.spaces import zeros
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree, write, writer
from rlframe.core.types import AgentInputs, AgentStep
from rlframe.kernels.transfer import Packed
from rlframe.models import numpy_inference
from rlframe.models.base import has_own
from rlframe.models.numpy_inference import BLOCK
from rlframe.rollout.buffer import NOBODY, AgentOutputs, BatchBuffer, EnvRows, empty_rows
from rlframe.system.cuda_graph import WARM_UPS, CudaGraph
from rlframe.system.shared import Shared

_log = logging.getLogger("rlframe")


class PinnedMemory:
    """Registers shared memory with CUDA, so that copies to the GPU are asynchronous. Does nothing on the CPU.

    Call `synchronize` before writing into the memory again.
    """

    def __init__(self, memory: Shared, device: torch.device) -> None:
        self._device, self._address = device, 0
        if device.type == "cuda":
            address = min(array.ctypes.data for array in leaves(memory.tree))
            cudart: Any = torch.cuda.cudart()
            if int(cudart.cudaHostRegister(address, memory.n_bytes, 0)) == 0:
                self._address = address
            else:
                _log.warning(f"{memory.n_bytes / 1e6:,.1f} MB of batches could not be pinned; copies will be slower")

    def synchronize(self) -> None:
        """Wait for the copies that have been started."""
        if self._address:
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Unregister the memory. May be called twice."""
        if self._address:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self._address)
            self._address = 0


class CudaInference:
    """`agent.step` for a fixed number of rows, with inputs, noise, state and outputs in fixed memory on the device.

    A CUDA graph saves the launch of each kernel, and reads parameters where the learner updates them in place. An agent
    that cannot be captured, for example because it branches on values, runs without one. `device` may also be the CPU,
    so that the sequence can be tested without a GPU.
    """

    def __init__(self, agent: Agent, inputs: AgentInputs, state: Tree, noise: Tree) -> None:
        """Copies all arguments: `inputs` and `noise` in NumPy, `state` on the agent's device, each [n, ...]."""
        self.agent, self.device = agent, next(agent.parameters()).device
        self._on_gpu = self.device.type == "cuda"
        self._given = Packed((inputs, noise), self.device)
        given: tuple[AgentInputs, Tree] = map_tree(as_numpy, self._given.host)
        self.inputs, self._noise = given  # the caller writes the next rows to the first
        write(given, (inputs, noise))
        self._write_noise = writer(self._noise)
        self.state: Tree = map_tree(torch.clone, state)  # after the last step; overwritten by the next
        self._given.send()
        self._found = Packed(self._act(), self.device)
        self._output: tuple[Tree, Tree] = map_tree(as_numpy, self._found.host)
        self._graph = self._captured() if self._on_gpu else None
        _copy(self.state, state)

    def __call__(self, noise: Tree) -> tuple[Tree, Tree]:
        """Act on the rows in `inputs` with this noise, in NumPy; returns (action, info), valid until the next call."""
        self._write_noise(noise)
        self._given.send()
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
        self._found.fetch()
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        return self._output

    @torch.inference_mode()
    def _step(self) -> None:
        _copy(self._found.there, self._act())

    @torch.inference_mode()
    def _act(self) -> tuple[Tree, Tree]:
        """Action and info of one step, which updates the state."""
        inputs, noise = self._given.there
        step = self.agent.step(inputs, self.state, noise)
        _copy(self.state, step.state)
        return step.action, step.info

    def _captured(self) -> CudaGraph | None:
        """The step as a graph; None if it cannot be one."""
        graph = CudaGraph(self.device)
        for _ in range(WARM_UPS):
            graph.warm_up(self._step)
        try:
            graph.capture(self._step)
        except RuntimeError as error:
            _log.warning(f"acting without a CUDA graph, because the agent's step cannot be captured: {error}")
            return None
        return graph


def _copy(target: Tree, source: Tree) -> None:
    """Copy between tensors of two trees without waiting."""
    for to, from_ in zip(leaves(target), leaves(source), strict=True):
        to.copy_(from_, non_blocking=True)


def block_size(n_envs: int) -> int:
    """The multiple that rows are padded to with zeros: 1 for a single environment, which is never split.

    Matrix products then give each row the same bits however the environments are split over workers, groups and threads
    (checked with torch for 1 to 64 rows: dense, convolutional and recurrent); otherwise the last bit differs.
    """
    return numpy_inference.BLOCK if n_envs > 1 else 1


class BatchInference:
    """The agent and its recurrent state for some environments of a batch. Draws the noise of a whole batch at once."""

    def __init__(
        self, agent: Agent, batch: BatchBuffer, lo: int, rngs: Sequence[np.random.Generator], explore: bool, block: int
    ) -> None:
        """`lo` is the first environment's index over all ranks; without `explore`, the agent's noise is zero."""
        self.agent, self.batch, self.explore = agent, batch, explore
        self.n, T = batch.rows.B, batch.rows.T
        self.n_rows = -(-self.n // block) * block
        self.noise = NoiseBuffer(agent, T, self.n_rows, rngs)
        inputs = batch.inputs()
        self._inputs = [inputs[t] for t in range(T)]
        self._write_action = [writer(action) for action in batch.rows.actions()]
        self._write_info = [writer(map_tree(lambda x, t=t: x[t], batch.outputs.info)) for t in range(T)]
        env_ids = [lo + min(row, self.n - 1) for row in range(self.n_rows)]
        block_inputs = inputs[0].map(lambda x: np.zeros((self.n_rows, *x.shape[1:]), x.dtype))
        device = next(agent.parameters()).device
        self._step: CpuInference | CudaInference
        # For each step, if no padding is needed: a function that reads the inputs directly from the batch.
        self._direct: list[Callable[[Tree], tuple[Tree, Tree]]] = []
        if device.type == "cpu":
            self._step = step = CpuInference(agent, block_inputs, agent.initial_state(env_ids))
            if self.n == self.n_rows:
                self._direct = [partial(step.step_on, step.view(row)) for row in self._inputs]
            self._noises = self._noise_rows(step.view)
        else:
            state = map_tree(lambda x: x.to(device), agent.initial_state(env_ids))
            self._noises = self._noise_rows(lambda arrays: arrays)
            self._step = CudaInference(agent, block_inputs, state, self._noises[0])
        self._write_inputs = writer(self._step.inputs[: self.n])
        self.has_state = bool(leaves(self._step.state))

    def _noise_rows(self, view: Callable[[Tree], Tree]) -> list[Tree]:
        noise = view(self.noise.arrays)
        return [map_tree(lambda x, t=t: x[t], noise) for t in range(self.noise.T)]

    def load_state(self) -> None:
        """Start from the final state in the batch, which was loaded from a snapshot. Call it before the first step."""
        if self.has_state:
            write(self._real_rows(self._step.state), self.batch.outputs.final_state)

    def draw_noise(self) -> None:
        """Draw the noise of the next batch."""
        if self.explore:
            self.noise.draw()

    def save_initial_state(self) -> None:
        """Write the state before row 0 into the batch."""
        if self.has_state:
            write(self.batch.outputs.state, self._real_rows(self._step.state))

    def act(self, t: int, waits: np.ndarray = NOBODY) -> None:
        """Write the actions and infos of step t, and keep the state of environments that wait [n] bool, or [0]."""
        if self.has_state and np.count_nonzero(waits):
            before = map_tree(lambda x: x[: self.n][waits], self._step.state)
            self._act(t)
            with torch.inference_mode():
                for to, kept in zip(leaves(self._step.state), leaves(before), strict=True):
                    to[: self.n][waits] = kept
        else:
            self._act(t)

    def _act(self, t: int) -> None:
        if self._direct:
            action, info = self._direct[t](self._noises[t])
        else:
            self._write_inputs(self._inputs[t])
            action, info = self._step(self._noises[t])
        self._write_action[t](self._real_rows(action))
        self._write_info[t](self._real_rows(info))

    def _real_rows(self, output: Tree) -> Tree:
        """Without the padding."""
        return output if self.n == self.n_rows else map_tree(lambda x: x[: self.n], output)

    def save_final_state(self) -> None:
        """Write the state before row T into the batch."""
        if self.has_state:
            write(self.batch.outputs.final_state, self._real_rows(self._step.state))


class CpuInference:
    """`agent.step` on the CPU, in NumPy if the agent supports it."""

    def __init__(self, agent: Agent, inputs: AgentInputs, state: Tree) -> None:
        numpy_step = agent.numpy_step(len(inputs.first))
        self.uses_numpy = numpy_step is not None
        self.agent_step = numpy_step or agent.step
        self.inputs = inputs
        self.state = map_tree(lambda x: as_numpy(x).copy() if self.uses_numpy else x.clone(), state)
        self._view_of_inputs = self.view(inputs)

    def view(self, tree: Tree) -> Tree:
        """NumPy arrays as the agent expects them, sharing memory."""
        return tree if self.uses_numpy else map_tree(torch.from_numpy, tree)

    def __call__(self, noise: Tree) -> tuple[Tree, Tree]:
        """Act on the rows in `inputs`."""
        return self.step_on(self._view_of_inputs, noise)

    def step_on(self, inputs: AgentInputs, noise: Tree) -> tuple[Tree, Tree]:
        step = self.agent_step(inputs, self.state, noise)
        self.state = step.state
        return step.action, step.info


def empty_agent_outputs(agent: Agent, rows: EnvRows, env_ids: Sequence[int]) -> AgentOutputs:
    """Memory for an agent's outputs, with its initial state. Calls `agent.step` on one row to learn the shapes.

    Raises:
        PartError: a user's agent or network fails to act.    ConfigError: it returns what cannot be stored.
    """
    named = qualified_name(type(getattr(agent, "model", agent)))
    if wrong := [x.shape for x in leaves(agent.initial_state([*env_ids[:1]] * 2)) if x.shape[:1] != (2,)]:
        raise ConfigError(
            f"initial_state of {named} gives {list(wrong[0])} for two environments; its arrays are [n, ...], a row for "
            f"each of n"
        )
    is_users = is_own(agent) or has_own(getattr(agent, "model", agent))
    with naming(f"{named} failed to act on one row") if is_users else nullcontext():
        state, step = _one_step(agent, rows, env_ids)
    if is_users:
        _check_step(agent, step, rows)
    before, after = ([list(x.shape) for x in leaves(each)] for each in (state, step.state))
    if before != after:
        raise ConfigError(
            f"{named} begins with a state of {before or 'no array'} and returns one of {after or 'no array'} after a "
            f"row; return the next state in the form of initial_state"
        )
    initial = map_tree(lambda x: np.array(as_numpy(x)), agent.initial_state(env_ids))
    info = map_tree(lambda x: np.zeros((rows.T, rows.B, *x.shape[1:]), as_numpy(x).dtype), step.info)
    return AgentOutputs(info, map_tree(np.copy, initial), initial)


def _one_step(agent: Agent, rows: EnvRows, env_ids: Sequence[int]) -> tuple[Tree, AgentStep]:
    """The state before row 0 of the first environment, and the step from there, without noise."""
    device = next(agent.parameters()).device
    row = AgentInputs(rows.observation, rows.action, rows.reward, rows.first)[0, :1].torch().to(device)
    state = map_tree(lambda x: x.to(device), agent.initial_state(env_ids[:1]))
    noise = map_tree(torch.from_numpy, agent.no_noise((1,)))
    return state, agent.step(row, state, map_tree(lambda x: x.to(device), noise))


def _check_step(agent: Agent, step: AgentStep, rows: EnvRows) -> None:
    """Raise ConfigError if a step has no actions of the space, or noise is not drawn for each time step."""
    named = qualified_name(type(agent))
    if not isinstance(step, AgentStep):
        raise ConfigError(
            f"{named}.step returned {type(step).__name__}; return AgentStep(action=..., info=..., state=...), with () "
            f"for what there is not"
        )
    acted, wanted = ([list(x.shape) for x in leaves(each)] for each in (step.action, rows.action[0, :1]))
    if acted != wanted:
        raise ConfigError(f"{named}.step acts on one row by an action of shape {acted}; of this space it is {wanted}")
    drawn, two = (agent.noise(np.random.default_rng(0), lead) for lead in ((), (2,)))
    expected, found = [[2, *x.shape] for x in leaves(drawn)], [list(x.shape) for x in leaves(two)]
    if expected != found:
        raise ConfigError(
            f"{named}.noise(rng, (2,)) has arrays {found}, which must be {expected}: [*lead, ...], a draw for each "
            f"time step"
        )


def empty_batch(
    observation_space: Space, action_space: Space, agent: Agent, T: int, B: int, first: int = 0
) -> BatchBuffer:
    """Memory in this process for a batch of B environments; `first` is the first one's index over all ranks."""
    check_spaces(agent, observation_space, action_space)
    rows = empty_rows(observation_space, action_space, T, B)
    return BatchBuffer(rows, empty_agent_outputs(agent, rows, range(first, first + B)))


def check_spaces(agent: Agent, observation_space: Space, action_space: Space) -> None:
    """Raise ConfigError if the agent was made for other spaces than those of its environments."""
    for name, space in {"observation_space": observation_space, "action_space": action_space}.items():
        own = getattr(agent, name, space)
        if _form(own) != _form(space):
            raise ConfigError(f"the agent has {name}={own}, and the environments have {space}; make it from theirs")


def _form(space: Space) -> tuple[str, ...]:
    """Of which rows are: shape, numbers, and how many there are of discrete ones; a Dict or Tuple is one form."""
    if space.shape is None:
        return (type(space).__name__,)
    return str(space.shape), str(space.dtype), str(getattr(space, "n", getattr(space, "nvec", "")))


def noise_state(rngs: Sequence[np.random.Generator]) -> list[Any]:
    return [rng.bit_generator.state for rng in rngs]


def load_noise(rngs: Sequence[np.random.Generator], states: Sequence[Any]) -> None:
    for rng, saved in zip(rngs, states, strict=True):
        rng.bit_generator.state = saved


_MOST = 64  # rows that are tried


def rows_keep_their_bits(agent: Agent, observation_space: Space, action_space: Space, n: int) -> bool:
    """Whether an agent on the CPU acts for each of n rows with the same bits, however many of them act together.

    Tried with random observations, all at once and in blocks of 4 and of 8. Elsewhere the kernel of a product, or the
    part of a vector that an activation is evaluated in, depends on the number of rows.
    """
    n, rng = min(-(-n // BLOCK) * BLOCK, _MOST), np.random.default_rng(0)
    observation, action = _random(observation_space, n, rng), zeros(action_space, (n,))
    inputs = AgentInputs(observation, action, np.zeros(n, np.float32), np.zeros(n, bool))
    noise = agent.no_noise((n,))

    def acted(size: int) -> list[np.ndarray]:
        parts = []
        for rows in (slice(start, start + size) for start in range(0, n, size)):
            step = CpuInference(agent, inputs[rows], agent.initial_state(range(n)[rows]))
            parts.append(leaves(step(step.view(map_tree(lambda x, rows=rows: x[rows], noise)))))
        return [np.concatenate([as_numpy(x) for x in same]) for same in zip(*parts, strict=True)]

    whole, blocks = acted(n), [acted(size) for size in (BLOCK, 2 * BLOCK)]
    return all(np.array_equal(*pair, equal_nan=True) for each in blocks for pair in zip(whole, each, strict=True))


def _random(space: Space, n: int, rng: np.random.Generator) -> Tree:
    """Canonical observations [n, ...] in the space, not far from zero."""
    match space:
        case spaces.Dict():
            return {key: _random(part, n, rng) for key, part in space.items()}
        case spaces.Tuple():
            return tuple(_random(part, n, rng) for part in space)
        case spaces.Box(low=low, high=high, dtype=dtype):
            shape = (n, *space.shape)
            drawn = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(256, size=shape)
            return np.clip(drawn, low, high).astype(zeros(space).dtype)
        case _:
            return zeros(space, (n,))
