"""make_replay: the replay of an algorithm from its ReplayConfig, checked against the memory that there is."""

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
from rlframe.core.ranks import current_ranks
from rlframe.core.seeding import Role, generator
from rlframe.core.spaces import FrameStack
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.record import Run, current_run
from rlframe.replay.base import StoredReplay
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.columns import DeviceMemory, DiskMemory, HostMemory, Memory, Ring, available_memory
from rlframe.replay.divided import DividedReplay
from rlframe.replay.frames import CompressedFrames, Frames, Rows
from rlframe.replay.readers import Batch, ReaderConfig
from rlframe.replay.select import Prioritized, Selector, Uniform
from rlframe.replay.storage import Storage

_ROW_BYTES = 32  # at most, per row: flags, reward, return and eligibility
_PRIORITY_BYTES = 9  # per row of a sum tree
_COMPRESSION = 4  # compressed frames take at most a quarter
_FEW_BATCHES, _FEW_STEPS = 8, 2_000  # of each environment: enough for any reader, frames and sequences included
_CPU = torch.device("cpu")


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


def small_size(batch_spec: BatchSpec) -> int:
    """Rows of a small replay of such batches that can be sampled."""
    return (_FEW_BATCHES * batch_spec.T + _FEW_STEPS) * batch_spec.B


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
) -> StoredReplay[Batch]:
    """A replay for the batches of a sampler, or this rank's part of one.

    Args:
        reader: NStep(discount, n) for transitions, FixedSequence(length) for sequences.
        alpha: α of prioritized replay; 0 is uniform.
        state: example [B, ...] of the agent's initial state; sequences start with the state stored there.
        previous: whether the model reads prev_action, prev_reward and first; else they are null.
        device: the learner's device.    seed: the run's root seed.
    Raises:
        ValueError: it does not fit into memory, size is too small for the batches, frames and reader, or an interval
            of sequences does not fit the batches.
        ConfigError: compress without lz4, or without stacks of frames.
    """
    (T, B), ranks = batch_spec, current_ranks()
    if ranks.rank >= ranks.n_samplers:  # it stores nothing here
        config = ReplayConfig(size=min(config.size, small_size(batch_spec)))
    memory = _memory(config, device)
    ring = Ring(-(-config.size // B), B)
    example_state, spacing = map_tree(as_numpy, state), reader.spacing(T)
    state_bytes = -(-sum(x.nbytes for x in leaves(example_state)) // (B * spacing))  # of a row, on average
    size = _checked_size(config, observation_space, action_space, ring, memory, alpha, state_bytes)
    zeros = spaces.zeros(observation_space, (B,)), spaces.zeros(action_space, (B,))
    example = AgentInputs(*zeros, np.zeros(B, np.float32), np.zeros(B, np.bool_))
    observation = _observation_storage(config, observation_space, ring, memory)
    storage = Storage(ring, memory, observation, example, previous)
    live_reader = reader.make_reader(storage, T, example_state)
    least = max(T, spacing) + 2 * storage.rows_before + live_reader.n_rows + 2
    if least > ring.L:
        raise ValueError(
            f"algo.replay.size={config.size} holds {ring.L} time steps of {B} environments, but batches of {T} time "
            f"steps, {reader} and {storage.rows_before} earlier rows need {least}; use algo.replay.size={least * B}"
        )
    rng = generator(seed, Role.REPLAY)
    selector: Selector = Prioritized(rng, alpha, live_reader.candidates.n_slots) if alpha else Uniform(rng)
    replay = ReplayBuffer(storage, selector, live_reader, size)
    return DividedReplay(replay, ranks) if ranks.n_samplers < ranks.world_size else replay


def _memory(config: ReplayConfig, device: torch.device) -> Memory:
    if config.memory == "disk":
        run = current_run()
        return DiskMemory(device, run.directory if isinstance(run, Run) else Path(tempfile.gettempdir()))
    return DeviceMemory(device) if config.memory == "device" else HostMemory(device)


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
    config: ReplayConfig,
    observation_space: Space,
    action_space: Space,
    ring: Ring,
    memory: Memory,
    alpha: float,
    state_bytes: int,
) -> str:
    """The size as text; raises ValueError if it does not fit, ConfigError if there are no frames to compress."""
    parts = [(part, spaces.zeros(part).nbytes) for _, part in spaces.action_parts(observation_space)]
    stacks = [n_bytes // part.n_frames for part, n_bytes in parts if isinstance(part, FrameStack)]
    if config.compress and not stacks:
        raise ConfigError(f"algo.replay.compress=true needs stacks of frames, but {observation_space} has none")
    rows = sum(n_bytes for part, n_bytes in parts if not isinstance(part, FrameStack))
    rows += sum(x.nbytes for x in leaves(spaces.zeros(action_space)))
    in_columns = rows + state_bytes + sum(stacks) // (_COMPRESSION if config.compress else 1)
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
