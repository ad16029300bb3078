"""Replay as a part: its kinds (memory, device, disk, or your own), and make_replay, which makes an algorithm's."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic

import chz
import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces

from rlframe.core import spaces
from rlframe.core.config import count, option
from rlframe.core.errors import ConfigError, naming, shortened
from rlframe.core.memory import available_memory
from rlframe.core.names import find_class, made_by
from rlframe.core.parts import Part, part
from rlframe.core.ranks import current_ranks
from rlframe.core.seeding import Role, generator
from rlframe.core.spaces import FrameStack
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.record import Run, current_run
from rlframe.replay.arrays import DeviceMemory, DiskMemory, HostMemory, Ring, StorageMemory
from rlframe.replay.base import Replay, StoredReplay
from rlframe.replay.buffer import Batch, DividedReplay, ReaderConfig, ReplayBuffer
from rlframe.replay.frames import CompressedFrames, Frames, WholeRows
from rlframe.replay.n_step import NStep
from rlframe.replay.select import Prioritized, Selector, Uniform
from rlframe.replay.storage import Storage

PACKAGE = "rlframe.replay"
_ROW_BYTES = 32  # at most, per row: flags, reward, return and eligibility
_PRIORITY_BYTES = 9  # per row of a sum tree
_COMPRESSION = 4  # compressed frames take at most a quarter
_FEW_BATCHES, _FEW_STEPS = 8, 2_000  # of each environment: enough for any reader, frames and sequences included
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ReplaySpec(Generic[Batch]):
    """What an algorithm asks of its replay. A class of your own gets it as its first argument."""

    size: int  # rows to store, over all environments of this rank
    observation_space: Space
    action_space: Space
    batch_spec: BatchSpec  # of the batches that `append` gets
    reader: ReaderConfig[Batch]  # NStep(discount, n) asks for Transitions, FixedSequence(length) for Sequences
    alpha: float = 0.0  # exponent α of prioritized replay; 0: uniform
    state: Tree = ()  # example [B, ...] of the agent's initial state; sequences start with the state stored there
    sampled: bool = False  # of data, whether actions are those before they were clipped, whose densities are known
    previous: bool = False  # whether the model reads prev_action, prev_reward and first; else they may be null
    device: torch.device = _CPU  # the learner's, where batches are wanted
    seed: int = 0  # the run's root seed
    unique: int = 0  # prioritized: most rows of a batch, none of them twice; 0: rows may repeat
    initial_priority: float = math.inf  # prioritized: of new rows; inf: the highest so far


@chz.chz
class ReplayConfig:
    """Base class of the kinds of replay: the field `replay` of an algorithm's Config."""

    has_data = False  # rows are there from the start
    on_ray = False  # whether it needs a cluster

    size: int = count(1_000_000, "rows stored, over all environments of this rank")

    def is_live(self) -> bool:
        """Whether it stores what the run's sampler collects."""
        return True

    def names(self) -> list[str]:
        """Ids or paths of the datasets whose rows it has."""
        return []

    def read_through(self) -> str:
        """The function, module:function, that changes their episodes as they are read; empty: none."""
        return ""

    def make(self, spec: ReplaySpec[Batch]) -> Replay[Batch]:
        """The replay that an algorithm asks for. Raises as `make_replay`."""
        raise NotImplementedError

    def for_trial(self, size: int) -> ReplayConfig:
        """One of so many rows, to measure updates with before a run starts."""
        return chz.replace(self, size=min(self.size, size))


@chz.chz
class Stored(ReplayConfig):
    """Base class of those that store rows in one way, in different places."""

    place: ClassVar[str]  # in messages

    selector: str = option("", "module:Class or ./file.py:Class, a subclass of rlframe.replay.Uniform: which rows")

    def compresses(self) -> bool:
        """Whether frames are compressed."""
        return False

    def memory(self, device: torch.device) -> StorageMemory:
        """Where arrays are."""
        raise NotImplementedError

    def make(self, spec: ReplaySpec[Batch]) -> StoredReplay[Batch]:
        return _stored(self, spec)


@chz.chz
class InMemory(Stored):
    """Rows in main memory."""

    place = "main memory"

    compress: bool = option(False, "lossless lz4 compression of frames: a tenth of the bytes, slower")

    def compresses(self) -> bool:
        return self.compress

    def memory(self, device: torch.device) -> StorageMemory:
        return HostMemory(device)


@chz.chz
class OnDevice(Stored):
    """Rows on the learner's device: only new ones are copied to a GPU."""

    place = "device"

    def memory(self, device: torch.device) -> StorageMemory:
        return DeviceMemory(device)


@chz.chz
class OnDisk(Stored):
    """Rows in a mapped file of the run's directory: for more than memory holds."""

    place = "disk"

    def memory(self, device: torch.device) -> StorageMemory:
        run = current_run()
        return DiskMemory(device, run.directory if isinstance(run, Run) else Path(tempfile.gettempdir()))


_VERBS = ("append", "sample", "update_priorities", "state_dict", "load_state_dict")


@chz.chz
class OwnReplay(ReplayConfig):
    """A class of your own that satisfies `Replay`; written algo.replay=module:Class for short."""

    name: str = option("", "module:Class or ./file.py:Class, with the methods of rlframe.replay.Replay")
    kwargs: Mapping[str, Any] = chz.field(default_factory=dict, doc="of the class: algo.replay.kwargs.name=value")

    @chz.validate
    def _check(self) -> None:
        if self.name:
            self.load()

    def load(self) -> Any:
        """The class.

        Raises:
            ConfigError: there is none of this name, or it lacks a method of `Replay`.
        """
        key, cls = f"algo.replay={self.name}", find_class(self.name, "algo.replay")
        if not isinstance(cls, type):
            raise ConfigError(f"{key} is not a class; give the class, which the run calls")
        if missing := [verb for verb in _VERBS if verb not in dir(cls)]:
            raise ConfigError(f"{key} lacks {', '.join(missing)}; rlframe.replay.Replay says what a replay has")
        if callable(inspect.getattr_static(cls, "n_rows", None)):
            raise ConfigError(f"{key}: n_rows is a method; make it a property")
        return cls

    def make(self, spec: ReplaySpec[Batch]) -> Replay[Batch]:
        check_not_divided(self.name)
        check_no_td(spec, self.name)
        cls = self.load()
        try:
            with suppress(ValueError):  # a builtin type does not say
                inspect.signature(cls).bind(spec, **self.kwargs)
        except TypeError as error:
            hint = "it is called with a ReplaySpec, and its other arguments are algo.replay.kwargs.name=value"
            raise ConfigError(f"algo.replay={self.name}: {shortened(str(error))}; {hint}") from None
        with naming(f"algo.replay={self.name} cannot be made"):
            made: Replay[Batch] = cls(spec, **self.kwargs)
        if "n_rows" not in dir(made):
            raise ConfigError(f"algo.replay={self.name} lacks n_rows; rlframe.replay.Replay says what a replay has")
        return made


def replay() -> Any:
    """A field of an algorithm's Config for its replay: a name or a Config."""
    return part(
        PACKAGE,
        "memory",
        "memory | device | disk | ray: where rows are stored; or own with a class of yours, module:Class",
        of=ReplayConfig,
        classes="a class with the methods of rlframe.replay.Replay",
    )


def check_no_td(spec: ReplaySpec[Any], name: str) -> None:
    """Raise ConfigError if rows begin with the errors of acting, which this replay, algo.replay=name, does not know."""
    if isinstance(spec.reader, NStep) and spec.reader.td_priorities:
        raise ConfigError(f"algo.initial_priority=td needs replay=memory, device, disk or ray, not {name}; or use max")


def check_not_divided(name: str) -> None:
    """Raise ConfigError if learners=N would divide a replay that cannot be; `name`: as in algo.replay=name."""
    ranks = current_ranks()
    if ranks.n_samplers < ranks.world_size:
        raise ConfigError(
            f"learners={ranks.world_size} divides a replay of memory, device or disk, which algo.replay={name} is not; "
            f"use learners=1 or world_size={ranks.world_size}"
        )


def small_size(batch_spec: BatchSpec) -> int:
    """Rows of a small replay of such batches that can be sampled."""
    return (_FEW_BATCHES * batch_spec.T + _FEW_STEPS) * batch_spec.n_envs


def make_replay(
    config: ReplayConfig | str,
    observation_space: Space,
    action_space: Space,
    batch_spec: BatchSpec,
    reader: ReaderConfig[Batch],
    **others: Any,
) -> Replay[Batch]:
    """A replay for the batches of a sampler, or this rank's part of one, as `config` or the name of a kind says.

    `others` are those of `ReplaySpec`.

    Raises:
        ValueError: it does not fit into memory, size is too small for the batches, frames and reader, or an interval
            of sequences does not fit the batches.
        ConfigError: compress without lz4, or without stacks of frames; a class of your own that cannot be made.
    """
    kind: ReplayConfig = Part(PACKAGE, config).make(config) if isinstance(config, str) else config
    return kind.make(ReplaySpec(kind.size, observation_space, action_space, batch_spec, reader, **others))


def _stored(config: Stored, spec: ReplaySpec[Batch]) -> StoredReplay[Batch]:
    """A ReplayBuffer, or a learner's share of one."""
    (T, B, n_streams), reader, ranks = spec.batch_spec, spec.reader, current_ranks()
    if ranks.rank >= ranks.n_samplers:  # it stores nothing here
        config = InMemory(size=min(config.size, small_size(spec.batch_spec)))
    memory, L = config.memory(spec.device), -(-config.size // (B * n_streams))
    example_state, spacing = map_tree(as_numpy, spec.state), reader.spacing(T)
    state_bytes = -(-sum(x.nbytes for x in leaves(example_state)) // (B * spacing))  # of a row, on average
    size, row_bytes = _checked_size(config, spec, L * B * n_streams, memory, state_bytes)
    zeros = spaces.zeros(spec.observation_space, (B,)), spaces.zeros(spec.action_space, (B,))
    example = AgentInputs(*zeros, np.zeros(B, np.float32), np.zeros(B, np.bool_))
    storages: list[Storage] = []
    for _ in range(n_streams):
        ring = Ring(L, B)
        observation = _observation_storage(config, spec.observation_space, ring, memory)
        storages.append(Storage(ring, memory, observation, example, spec.previous))
    readers = [reader.make_reader(storage, T, example_state, spec.alpha > 0) for storage in storages]
    rows_before = storages[0].rows_before
    least = max(T, spacing) + 2 * rows_before + readers[0].n_rows + 2
    if least > L:
        raise ValueError(
            f"algo.replay.size={config.size} holds {L} time steps of {B * n_streams} environments, but batches of {T} "
            f"time steps, {reader} and {rows_before} earlier rows need {least}; use "
            f"algo.replay.size={least * B * n_streams}"
        )
    rng, n_choices = generator(spec.seed, Role.REPLAY), readers[0].candidates.n_slots
    if 2 * spec.unique > n_choices * n_streams and ranks.rank < ranks.n_samplers:
        raise ValueError(
            f"algo.unique=true draws algo.batch_size={spec.unique} without repetition, and algo.replay.size="
            f"{config.size} holds about {n_choices * n_streams}, too few; use one for {2 * spec.unique} or more"
        )
    selector = _selector(config, spec, rng, n_choices, n_streams)
    replay = ReplayBuffer(storages, selector, readers, size, row_bytes)
    return DividedReplay(replay, ranks) if ranks.n_samplers < ranks.world_size else replay


def _selector(
    config: Stored, spec: ReplaySpec[Any], rng: np.random.Generator, n_choices: int, n_streams: int
) -> Selector:
    if config.selector and spec.alpha:
        raise ConfigError(
            f"algo.replay.selector={config.selector} and priorities both decide which rows are drawn; leave it out, or "
            f"set algo.prioritized=false"
        )
    if config.selector:
        return made_by(config.selector, "algo.replay.selector", Uniform, "rlframe.replay.Uniform", rng)
    if spec.alpha:
        return Prioritized(rng, spec.alpha, n_choices, n_streams, spec.unique, spec.initial_priority)
    return Uniform(rng)


def _observation_storage(config: Stored, space: Space, ring: Ring, memory: StorageMemory) -> Tree:
    """A tree of `ObservationStorage`: frames for stacks of frames, else whole rows."""
    match space:
        case gym_spaces.Dict():
            return {key: _observation_storage(config, sub, ring, memory) for key, sub in space.spaces.items()}
        case gym_spaces.Tuple():
            return tuple(_observation_storage(config, sub, ring, memory) for sub in space.spaces)
        case FrameStack():
            return (CompressedFrames if config.compresses() else Frames)(ring, memory, space)
        case _:
            return WholeRows(ring, memory, spaces.zeros(space))


def _checked_size(
    config: Stored, spec: ReplaySpec[Any], n: int, memory: StorageMemory, state_bytes: int
) -> tuple[str, int]:
    """The size of n rows as text, and the bytes of each.

    Raises:
        ValueError: they do not fit.    ConfigError: there are no frames to compress.
    """
    parts = [(part, spaces.zeros(part).nbytes) for _, part in spaces.action_parts(spec.observation_space)]
    stacks = [n_bytes // part.n_frames for part, n_bytes in parts if isinstance(part, FrameStack)]
    if config.compresses() and not stacks:
        raise ConfigError(f"algo.replay.compress=true needs stacks of frames, but {spec.observation_space} has none")
    rows = sum(n_bytes for part, n_bytes in parts if not isinstance(part, FrameStack))
    rows += sum(x.nbytes for x in leaves(spaces.zeros(spec.action_space)))
    in_arrays = rows + state_bytes + sum(stacks) // (_COMPRESSION if config.compresses() else 1)
    other = _ROW_BYTES + (_PRIORITY_BYTES if spec.alpha else 0)
    in_memory = isinstance(config, InMemory)
    size = gigabytes(n * (in_arrays + other))
    guess = " (if frames compress to a quarter)" if config.compresses() else ""
    _check_fits(config, n * (other + in_arrays * in_memory), available_memory(), "main memory")
    if not in_memory:
        _check_fits(config, n * in_arrays, memory.available(), config.place)
    return f"{n:,} rows of {in_arrays + other:,} bytes: {size}{guess}, in {config.place}", in_arrays + other


class TooLarge(ValueError):
    """A replay that does not fit; `needs`: how much, and of what, without a remedy."""

    def __init__(self, text: str, needs: str) -> None:
        super().__init__(text)
        self.needs = needs


def _check_fits(config: Stored, needed: int, available: int, where: str) -> None:
    if needed > available:
        less = int(config.size * available / needed)
        remedy = "" if isinstance(config, OnDisk) else ", or algo.replay=disk"
        needs = f"{gigabytes(needed)} ({needed:,} bytes) of {where}, but only {gigabytes(available)} are available"
        text = f"algo.replay.size={config.size} needs {needs}; use algo.replay.size={less} or less{remedy}"
        raise TooLarge(text, needs)


def gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
