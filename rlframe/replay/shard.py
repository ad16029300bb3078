"""Shard: an actor of Ray with a ReplayBuffer of a part of the rows; and how its state gets to a snapshot and back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlframe.core.memory import available_memory
from rlframe.core.struct import as_numpy, map_tree
from rlframe.core.types import Samples
from rlframe.record.codec import ChunkedArray
from rlframe.record.rank_state import LARGE_BYTES
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.make import InMemory, ReplaySpec
from rlframe.system.cluster import imported


@dataclass(frozen=True)
class Reply:
    """What a shard sends for a batch: arrays, which may be read-only."""

    rows: tuple[Any, ...]  # a Transitions or Sequences of the rows drawn; empty if there are none
    probability: np.ndarray  # [n] float64 of each draw within the shard
    mass: float  # what the next draws from the shard are in proportion to


@dataclass(frozen=True)
class PendingBatch:
    """A batch on its way."""

    counts: list[int]  # rows of each shard
    share: np.ndarray  # [n_shards] probability of each shard
    generations: list[int]  # of the shards
    replies: list[list[Any]]  # a reference of each shard; none of one that died, or has not started


@dataclass(frozen=True)
class RemoteArray:
    """A large array of a state on its way between processes, without its rows."""

    number: int  # among those of its state
    dtype: np.dtype
    row: tuple[int, ...]
    counts: list[int]  # as in ChunkedArray
    digests: list[str]
    chunks: tuple[Any, ...] = ()  # references to the chunks, if they are with Ray

    def chunked(self, read: Callable[[int], np.ndarray]) -> ChunkedArray:
        """The array, whose chunks `read` gets."""
        return ChunkedArray(self.dtype, self.row, self.counts, read, list(self.digests))


def remote_array(number: int, array: ChunkedArray, chunks: Sequence[Any] = ()) -> RemoteArray:
    """The description of a large array."""
    return RemoteArray(number, array.dtype, array.row, array.counts, array.digests[: len(array.counts)], (*chunks,))


def stored(array: ChunkedArray) -> RemoteArray:
    """A large array whose different chunks are copied into Ray's store, which writes to disk what does not fit."""
    references: dict[str | int, Any] = {}
    keys = [array.digests[i] or i for i in range(len(array.counts))]
    for i, key in enumerate(keys):
        if key not in references:
            references[key] = imported().put(array.read(i))
    return remote_array(0, array, [references[key] for key in keys])


def map_objects(state: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """A state in which `by` has replaced each object of a class."""
    if isinstance(state, kind):
        return by(state)
    if isinstance(state, dict):
        return {key: map_objects(value, kind, by) for key, value in state.items()}
    return [map_objects(value, kind, by) for value in state] if isinstance(state, list) else state


class Shard:
    """Lives in an actor's process. Its replay exists after `start`; calls are made in the order of the learner's."""

    replay: ReplayBuffer[Any]

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._large: list[ChunkedArray] = []  # of the newest state, valid until the next `append`

    def place(self) -> tuple[str, int]:
        """The id of its node, and the bytes of memory available there."""
        return imported().get_runtime_context().get_node_id(), available_memory()

    def start(self, config: InMemory, spec: ReplaySpec[Any]) -> None:
        """Make the replay."""
        self.replay = config.make(spec)  # type: ignore[assignment]  # of a process without ranks

    def append(self, samples: Samples, highest: float) -> float:
        """Store a batch; new rows have the highest priority of all shards. Returns the mass."""
        self.replay.raise_highest(highest)
        self.replay.append(samples)
        return self.mass()

    def mass(self) -> float:
        """0 while it has too few rows for a batch: any number of rows of one may be drawn from it."""
        return self.replay.mass if self.replay.n_rows else 0.0

    def draw(self, n: int) -> Reply:
        """n rows, or none if there are too few to draw."""
        if not n or not self.mass():
            return Reply((), np.zeros(0), self.mass())
        batch, probability = self.replay.sample_with_probability(n)
        return Reply((map_tree(as_numpy, batch),), probability, self.mass())

    def update_priorities(self, index: np.ndarray, priority: np.ndarray) -> None:
        self.replay.update_priorities(index, priority)

    def newest(self) -> np.ndarray:
        return self.replay.newest()

    def read(self, index: np.ndarray) -> Any:
        return map_tree(as_numpy, self.replay.read(index))

    def layout(self, n: int) -> Any:
        """n rows whose values mean nothing."""
        return map_tree(as_numpy, self.replay.layout(n))

    def state_dict(self) -> Any:
        """The state, its large arrays as RemoteArrays with the hashes of all chunks."""
        self._large = []
        return map_objects(self.replay.state_dict(), ChunkedArray, self._kept)

    def _kept(self, array: ChunkedArray) -> np.ndarray | RemoteArray:
        if array.nbytes < LARGE_BYTES:
            return array.to_numpy()
        for i in range(len(array.counts)):
            if not array.digests[i]:
                array.digests[i] = hashlib.sha256(array.read(i).reshape(-1).view(np.uint8).data).hexdigest()
        self._large.append(array)
        return remote_array(len(self._large) - 1, array)

    def chunk(self, number: int, i: int) -> np.ndarray:
        """A chunk of a large array of the newest state."""
        return self._large[number].read(i)

    def load_state_dict(self, state: Any) -> str:
        """Restore a state whose RemoteArrays have chunks; returns the error of one that does not fit, or ""."""

        def read_from_ray(array: RemoteArray) -> ChunkedArray:
            return array.chunked(lambda i: imported().get(array.chunks[i]))

        try:
            self.replay.load_state_dict(map_objects(state, RemoteArray, read_from_ray))
        except ValueError as error:
            return str(error)
        return ""
