"""ReplayBuffer, the replay that algorithms use: storage, selector and reader; `make_replay` builds it from a config."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic

import chz
import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from torch import Tensor

from rlframe.core import spaces
from rlframe.core.config import choice, count, option
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, generator
from rlframe.core.spaces import FrameStack
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.record import Run, current_run
from rlframe.replay.columns import DeviceMemory, DiskMemory, HostMemory, Memory, Ring, available_memory
from rlframe.replay.frames import CompressedFrames, Frames, Rows
from rlframe.replay.readers import Batch, Reader, ReaderConfig
from rlframe.replay.select import Prioritized, Selector, Uniform
from rlframe.replay.storage import Storage

_ROW_BYTES = 32  # at most, per row: flags, reward, return and eligibility
_PRIORITY_BYTES = 9  # per row of a sum tree
_COMPRESSION = 4  # compressed frames take at most a quarter
_CPU = torch.device("cpu")


class ReplayBuffer(Generic[Batch]):
    """A replay (see `Replay`) of transitions or sequences, made by `make_replay` and owned by an algorithm."""

    def __init__(self, storage: Storage, selector: Selector, reader: Reader[Batch], size: str) -> None:
        self.size = size  # as text, for the log
        self._storage, self._selector, self._reader = storage, selector, reader
        self._ones = storage.memory.send(np.ones(0, np.float32))  # the weights of the last uniform batch

    def __str__(self) -> str:
        return self.size

    @property
    def n_rows(self) -> int:
        """Number of valid rows stored; 0 while none can be sampled."""
        return self._storage.n_rows if self.n_choices else 0

    @property
    def n_choices(self) -> int:
        """Number of rows, or of sequences, that can be sampled."""
        return self._reader.candidates.n

    def append(self, samples: Samples) -> None:
        """Copy a batch, overwriting the oldest rows; raises ValueError as `Storage.append` does."""
        start = self._storage.append(samples)
        removed = self._reader.append(samples, start)
        self._selector.update_candidates(self._reader.candidates, removed)

    def sample(self, n: int, beta: float = 0.0) -> Batch:
        """Sample n transitions or sequences (see `Replay.sample`); raises ValueError if there are none yet."""
        candidates = self._reader.candidates
        if not candidates.n:
            raise ValueError(
                f"replay cannot be sampled yet: none of its {self._storage.n_rows} valid rows has all rows that must "
                f"follow it; append more rows, for example with a larger algo.learn_from"
            )
        numbers = self._selector.draw(candidates, n)
        weight = self._selector.weights(candidates, numbers, beta)
        return self._reader.read(numbers, self._ones_of(n) if weight is None else self._storage.memory.send(weight))

    def mark(self) -> Callable[[], None]:
        """Remember the state of the generator; the returned function restores it, which undoes later samples."""
        bits = self._selector.rng.bit_generator
        return partial(setattr, bits, "state", bits.state)

    def _ones_of(self, n: int) -> Tensor:
        if len(self._ones) != n:
            self._ones = self._storage.memory.send(np.ones(n, np.float32))
        return self._ones

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | Tensor) -> None:
        """See `Replay`; raises ValueError for a wrong shape, or a priority that is negative, NaN or infinite."""
        values = as_numpy(priority)
        if values.shape != index.shape:
            raise ValueError(f"priorities {list(values.shape)} must have the shape {list(index.shape)} of the index")
        self._selector.set_priorities(self._reader.candidates, self._reader.from_index(index), values)

    def read(self, index: np.ndarray) -> Batch:
        """The rows with this `index` [n], which must still be stored; weights are 1."""
        return self._reader.read(self._reader.from_index(index), self._ones_of(len(index)))

    def newest(self) -> np.ndarray:
        """The index [n] of the rows that the last `append` made available; they have the highest priority so far."""
        return self._reader.to_index(self._reader.candidates.newest)

    def state_dict(self) -> dict[str, Any]:
        """Rows, priorities and generator; arrays are views where possible, valid until the next `append`."""
        return {
            "made_for": self._made_for(),
            "storage": self._storage.state_dict(),
            "selector": self._selector.state_dict(),
            "reader": self._reader.state_dict(),
            "choices": self._reader.candidates.state_dict(),
        }

    def _made_for(self) -> str:
        storage, ring = self._storage, self._storage.ring
        rows = ", ".join(f"{x.dtype}{list(x.shape[1:])}" for x in leaves(storage.last))
        kinds = ", ".join(type(x).__name__ for x in leaves(storage.observation))
        return f"{self._reader.config} {self._selector} of {ring.L} x {ring.B} rows of {rows} as {kinds}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; raises ValueError if that replay has another layout or size."""
        if state["made_for"] != self._made_for():
            raise ValueError(f"the saved replay is {state['made_for']}, not {self._made_for()}; use its config")
        self._storage.load_state_dict(state["storage"])
        self._reader.load_state_dict(state["reader"])
        self._reader.candidates.load_state_dict(state["choices"])
        self._selector.load_state_dict(state["selector"])


@chz.chz
class ReplayConfig:
    """Size and memory of replay: the field `replay` of an algorithm's Config."""

    size: int = count(1_000_000, "rows stored, over all environments of this rank")
    memory: str = choice("cpu", ("cpu", "device", "disk"), "main memory, the learner's device, or the run's directory")
    compress: bool = option(False, "lossless lz4 compression of frames in main memory: a tenth of the bytes, slower")

    @chz.validate
    def _check(self) -> None:
        if self.compress and self.memory != "cpu":
            raise ConfigError(f"algo.replay.compress=true needs algo.replay.memory=cpu, not {self.memory}")


def make_replay(
    config: ReplayConfig,
    observation_space: Space,
    action_space: Space,
    batch_spec: BatchSpec,
    reader: ReaderConfig[Batch],
    *,
    alpha: float = 0.0,
    state: Tree = (),
    previous: bool = False,
    device: torch.device = _CPU,
    seed: int = 0,
) -> ReplayBuffer[Batch]:
    """A replay buffer for the batches of a sampler.

    Args:
        reader: NStep(discount, n) for transitions, FixedSequence(length) for sequences.
        alpha: α of prioritized replay; 0 is uniform.
        state: example [B, ...] of the agent's initial state; sequences start with the state stored there.
        previous: whether the model reads prev_action, prev_reward and first; else they are null.
        device: the learner's device.    seed: the run's root seed.
    Raises:
        ValueError: it does not fit into memory, or size is too small for the batches, frames and reader.
        ConfigError: compress without lz4, or without stacks of frames.
    """
    T, B = batch_spec
    memory: Memory
    if config.memory == "disk":
        run = current_run()
        memory = DiskMemory(device, run.directory if isinstance(run, Run) else Path(tempfile.gettempdir()))
    else:
        memory = DeviceMemory(device) if config.memory == "device" else HostMemory(device)
    ring = Ring(-(-config.size // B), B)
    size = _checked_size(config, observation_space, action_space, ring, memory, alpha)
    zeros = spaces.zeros(observation_space, (B,)), spaces.zeros(action_space, (B,))
    example = AgentInputs(*zeros, np.zeros(B, np.float32), np.zeros(B, np.bool_))
    observation = _observation_storage(config, observation_space, ring, memory)
    storage = Storage(ring, memory, observation, example, previous)
    live_reader = reader.make_reader(storage, T, map_tree(as_numpy, state))
    least = T + 2 * storage.rows_before + live_reader.n_rows + 2
    if least > ring.L:
        raise ValueError(
            f"algo.replay.size={config.size} holds {ring.L} time steps of {B} environments, but batches of {T} time "
            f"steps, {reader} and {storage.rows_before} earlier rows need {least}; use algo.replay.size={least * B}"
        )
    rng = generator(seed, Role.REPLAY)
    selector: Selector = Prioritized(rng, alpha, live_reader.candidates.n_slots) if alpha else Uniform(rng)
    return ReplayBuffer(storage, selector, live_reader, size)


def _observation_storage(config: ReplayConfig, space: Space, ring: Ring, memory: Memory) -> Tree:
    """A tree of `ObservationStorage`: frames for stacks of frames, else whole rows."""
    match space:
        case gym_spaces.Dict():
            return {key: _observation_storage(config, sub, ring, memory) for key, sub in space.spaces.items()}
        case gym_spaces.Tuple():
            return tuple(_observation_storage(config, sub, ring, memory) for sub in space.spaces)
        case FrameStack():
            return (CompressedFrames if config.compress else Frames)(ring, memory, space)
        case _:
            return Rows(ring, memory, spaces.zeros(space))


def _checked_size(
    config: ReplayConfig, observation_space: Space, action_space: Space, ring: Ring, memory: Memory, alpha: float
) -> str:
    """The size as text; raises ValueError if it does not fit, ConfigError if there are no frames to compress."""
    parts = [(part, spaces.zeros(part).nbytes) for _, part in spaces.action_parts(observation_space)]
    stacks = [n_bytes // part.n_frames for part, n_bytes in parts if isinstance(part, FrameStack)]
    if config.compress and not stacks:
        raise ConfigError(f"algo.replay.compress=true needs stacks of frames, but {observation_space} has none")
    rows = sum(n_bytes for part, n_bytes in parts if not isinstance(part, FrameStack))
    rows += sum(x.nbytes for x in leaves(spaces.zeros(action_space)))
    in_columns = rows + sum(stacks) // (_COMPRESSION if config.compress else 1)
    other = _ROW_BYTES + (_PRIORITY_BYTES if alpha else 0)
    n, in_memory = ring.n_slots, config.memory == "cpu"
    size = _gigabytes(n * (in_columns + other))
    guess = " (if frames compress to a quarter)" if config.compress else ""
    _check_fits(config, n * (other + in_columns * in_memory), available_memory(), "main memory")
    if not in_memory:
        _check_fits(config, n * in_columns, memory.available(), config.memory)
    return f"{n:,} rows of {in_columns + other:,} bytes: {size}{guess}, memory={config.memory}"


def _check_fits(config: ReplayConfig, needed: int, available: int, where: str) -> None:
    if needed > available:
        less = int(config.size * available / needed)
        remedy = "" if config.memory == "disk" else ", or algo.replay.memory=disk"
        raise ValueError(
            f"algo.replay.size={config.size} needs {_gigabytes(needed)} ({needed:,} bytes) of {where}, but only "
            f"{_gigabytes(available)} are available; use algo.replay.size={less} or less{remedy}"
        )


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
