"""ReplayBuffer: what is stored, how rows are selected and what is read there; and one that fits a config."""

from __future__ import annotations

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
from rlframe.replay.frames import Frames, Kept, Rows
from rlframe.replay.readers import Drawn, Plan, Reader
from rlframe.replay.select import Prioritized, Selector, Uniform
from rlframe.replay.storage import Storage


class ReplayBuffer(Generic[Drawn]):
    """Owned by an algorithm, which appends every batch and samples as often as it likes."""

    def __init__(self, storage: Storage, selector: Selector, reader: Reader[Drawn], size: str = "") -> None:
        """`size`: how large it gets, in words, for the log."""
        self.size = size
        self._storage, self._selector, self._reader = storage, selector, reader
        self._ones = storage.memory.send(np.ones(0, np.float32))  # as many as were drawn last

    @property
    def n_rows(self) -> int:
        """Valid rows held."""
        return self._storage.n_rows

    @property
    def n_choices(self) -> int:
        """Rows that may be drawn."""
        return self._reader.choices.n

    def append(self, samples: Samples) -> None:
        """Copy a batch; the oldest rows give way.

        Raises:
            ValueError: see Storage.append.
        """
        start = self._storage.append(samples)
        gone = self._reader.follow(samples, start)
        self._selector.move(self._reader.choices, gone)

    def sample(self, n: int, beta: float = 0.0) -> Drawn:
        """n draws, with replacement: Transitions or Sequences, by the reader.

        Args:
            beta: β of the importance weights; 0: none.
        Raises:
            ValueError: there is nothing to draw yet.
        """
        choices = self._reader.choices
        if not choices.n:
            raise ValueError(
                f"replay cannot be sampled yet: it holds {self.n_rows} valid rows, none of them with all that follows; "
                f"append more, for example by a larger algo.learn_from"
            )
        drawn = self._selector.draw(choices, n)
        weight = self._selector.weight(choices, drawn, beta)
        return self._reader.read(drawn, self._equal(n) if weight is None else self._storage.memory.send(weight))

    def mark(self) -> Callable[[], None]:
        """What undoes all draws from here on: those that follow it are then the ones that follow now."""
        generator = self._selector.rng.bit_generator
        return partial(setattr, generator, "state", generator.state)

    def _equal(self, n: int) -> Tensor:
        if len(self._ones) != n:
            self._ones = self._storage.memory.send(np.ones(n, np.float32))
        return self._ones

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | Tensor) -> None:
        """Set the priorities [n] of rows by the `index` they were sampled with; overwritten rows are passed over.

        Raises:
            ValueError: a priority is negative, NaN or infinite, or their number differs.
        """
        values = as_numpy(priority)
        if values.shape != index.shape:
            raise ValueError(f"{index.shape} rows got {values.shape} priorities")
        self._selector.update(self._reader.choices, self._reader.choice(index), values)

    def read(self, index: np.ndarray) -> Drawn:
        """What is at the rows with these numbers, which may be drawn; its weights are 1."""
        return self._reader.read(self._reader.choice(index), self._equal(len(index)))

    def newest(self) -> np.ndarray:
        """Numbers of the rows that the last `append` has made ready to be drawn, with the highest priority so far."""
        return self._reader.number(self._reader.choices.newest)

    def state_dict(self) -> dict[str, Any]:
        """Everything; arrays are views where that is possible, valid until the next `append`."""
        return {
            "made_for": self._made_for(),
            "storage": self._storage.state_dict(),
            "selector": self._selector.state_dict(),
            "reader": self._reader.state_dict(),
            "choices": self._reader.choices.state_dict(),
        }

    def _made_for(self) -> str:
        storage, ring = self._storage, self._storage.ring
        rows = ", ".join(f"{x.dtype}{list(x.shape[1:])}" for x in leaves(storage.last))
        kept = ", ".join(type(x).__name__ for x in leaves(storage.observation))
        return f"{self._reader.plan} {self._selector} of {ring.L} x {ring.B} rows of {rows} as {kept}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: it is of another kind or size of replay.
        """
        if state["made_for"] != self._made_for():
            raise ValueError(f"the saved replay is a {state['made_for']}; this one is a {self._made_for()}")
        self._storage.load_state_dict(state["storage"])
        self._reader.load_state_dict(state["reader"])
        self._reader.choices.load_state_dict(state["choices"])
        self._selector.load_state_dict(state["selector"])


_BESIDE = 32  # bytes a row for flags, rewards, returns and the choice, at most
_TREE = 9  # bytes a row of a sum tree
_COMPRESSED = 4  # frames take at most a quarter
_CPU = torch.device("cpu")


@chz.chz
class ReplayConfig:
    """Sizes of replay: the field `replay` of an algorithm's Config."""

    size: int = count(1_000_000, "rows kept, over all environments of this rank")
    memory: str = choice("cpu", ("cpu", "device", "disk"), "main memory, the learner's device, or the run's directory")
    compress: bool = option(False, "frames compressed by lz4 without loss, in main memory: a tenth, for slower reads")

    @chz.validate
    def _check(self) -> None:
        if self.size < 1:
            raise ConfigError(f"algo.replay.size={self.size} must be at least 1")
        if self.compress and self.memory != "cpu":
            raise ConfigError(f"algo.replay.compress=true is for algo.replay.memory=cpu, not {self.memory}; use one")


def make_replay(
    config: ReplayConfig,
    observation_space: Space,
    action_space: Space,
    batch_spec: BatchSpec,
    reader: Plan[Drawn],
    *,
    alpha: float = 0.0,
    state: Tree = (),
    previous: bool = False,
    device: torch.device = _CPU,
    seed: int = 0,
) -> ReplayBuffer[Drawn]:
    """Replay of what a sampler of these spaces collects.

    Args:
        reader: NStep(discount, n) or Whole(length).    alpha: α of prioritized replay; 0: uniform.
        state: example [B, ...] of the agent's initial state, kept where batches begin.
        previous: whether the model wants the true prev_action, prev_reward and first; else they are null.
        device: the learner's.    seed: the run's root seed.
    Raises:
        ValueError: it cannot fit, or size is too small for batches, frames and reader.
        ConfigError: compress without lz4, or without frames.
    """
    T, B = batch_spec
    memory = _memory(config, device)
    ring = Ring(-(-config.size // B), B)
    size = _checked_size(config, observation_space, action_space, ring, memory, alpha)
    example = AgentInputs(
        spaces.zeros(observation_space, (B,)),
        spaces.zeros(action_space, (B,)),
        np.zeros(B, np.float32),
        np.zeros(B, np.bool_),
    )
    kept = _kept(config, observation_space, ring, memory)
    storage = Storage(ring, memory, kept, example, previous)
    least = T + 2 * storage.rows_before + reader.n_rows + 2
    if least > ring.L:
        raise ValueError(
            f"algo.replay.size={config.size} rows are {ring.L} time steps of {B} environments; batches of {T}, "
            f"{reader} and {storage.rows_before} rows before each need {least}; use algo.replay.size={least * B}"
        )
    live = reader.over(storage, T, map_tree(as_numpy, state))
    rng = generator(seed, Role.REPLAY)
    selector: Selector = Prioritized(rng, alpha, live.choices.n_slots) if alpha else Uniform(rng)
    return ReplayBuffer(storage, selector, live, size)


def _memory(config: ReplayConfig, device: torch.device) -> Memory:
    if config.memory == "disk":
        run = current_run()
        return DiskMemory(device, run.directory if isinstance(run, Run) else Path(tempfile.gettempdir()))
    return DeviceMemory(device) if config.memory == "device" else HostMemory(device)


def _kept(config: ReplayConfig, space: Space, ring: Ring, memory: Memory) -> Tree:
    """A tree of `Kept`: frames once each where they are stacks, all else as rows."""
    match space:
        case gym_spaces.Dict():
            return {key: _kept(config, sub, ring, memory) for key, sub in space.spaces.items()}
        case gym_spaces.Tuple():
            return tuple(_kept(config, sub, ring, memory) for sub in space.spaces)
        case FrameStack():
            return _compressed(ring, memory, space) if config.compress else Frames(ring, memory, space)
        case _:
            return Rows(ring, memory, spaces.zeros(space))


def _compressed(ring: Ring, memory: Memory, space: FrameStack) -> Kept:
    try:
        from rlframe.replay.compressed import CompressedFrames  # here: lz4 is optional
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lz4":
            raise
        raise ConfigError('algo.replay.compress=true needs lz4: pip install "rlframe[lz4]"') from None
    return CompressedFrames(ring, memory, space)


def _checked_size(
    config: ReplayConfig, observation_space: Space, action_space: Space, ring: Ring, memory: Memory, alpha: float
) -> str:
    """The size in words.

    Raises:
        ValueError: it does not fit.    ConfigError: nothing is there to compress.
    """
    parts = [(part, spaces.zeros(part).nbytes) for _, part in spaces.action_parts(observation_space)]
    stacks = [n_bytes // part.n_frames for part, n_bytes in parts if isinstance(part, FrameStack)]
    if config.compress and not stacks:
        raise ConfigError(f"algo.replay.compress=true compresses stacks of frames; {observation_space} has none")
    rows = sum(n_bytes for part, n_bytes in parts if not isinstance(part, FrameStack))
    rows += sum(x.nbytes for x in leaves(spaces.zeros(action_space)))
    in_columns = rows + sum(stacks) // (_COMPRESSED if config.compress else 1)
    beside = _BESIDE + (_TREE if alpha else 0)
    n, in_memory = ring.n_slots, config.memory == "cpu"
    size = _gigabytes(n * (in_columns + beside))
    guess = " (estimated: frames compressed to a quarter)" if config.compress else ""
    _check_fits(config, n * (beside + in_columns * in_memory), available_memory(), "main memory")
    if not in_memory:
        _check_fits(config, n * in_columns, memory.available(), config.memory)
    return f"{n:,} rows of {in_columns + beside:,} bytes are {size}{guess}, in {config.memory}"


def _check_fits(config: ReplayConfig, needed: int, available: int, where: str) -> None:
    if needed > available:
        less = int(config.size * available / needed)
        remedy = "" if config.memory == "disk" else ", or algo.replay.memory=disk"
        raise ValueError(
            f"algo.replay.size={config.size} needs {_gigabytes(needed)} ({needed:,} bytes) of {where}, where "
            f"{_gigabytes(available)} are available; use algo.replay.size={less} or less{remedy}"
        )


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
