"""From a config and spaces to a replay buffer that fits: what is kept how, where, and how large it gets."""

from __future__ import annotations

import tempfile
from pathlib import Path

import chz
import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces

from rlframe.core import spaces
from rlframe.core.config import choice, count, option
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, generator
from rlframe.core.spaces import FrameStack
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.record import Run, current_run
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.memory import DeviceMemory, DiskMemory, HostMemory, Memory, available_memory
from rlframe.replay.observations import Frames, Kept, Rows
from rlframe.replay.read import Drawn, Plan
from rlframe.replay.ring import Ring
from rlframe.replay.select import Prioritized, Selector, Uniform
from rlframe.replay.storage import Storage

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
