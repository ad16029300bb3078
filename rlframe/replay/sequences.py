"""Replay of sequences: rows in a row, with the agent's state before the first, for algorithms that train a memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.core.types import Samples
from rlframe.replay.arrays import HostMemory, concatenate
from rlframe.replay.base import Sequences
from rlframe.replay.buffer import Reader, ReaderConfig
from rlframe.replay.select import Candidates
from rlframe.replay.storage import Storage


@dataclass(frozen=True)
class FixedSequence(ReaderConfig[Sequences]):
    """Sequences of `length` rows that start where a batch started, with the agent's state there.

    Of each environment one starts every `interval` time steps, a multiple of those of a batch; 0: at each batch.
    """

    length: int
    interval: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length} must be at least 1")

    def spacing(self, T: int) -> int:
        if self.interval % T:
            good = T * -(-self.interval // T)
            raise ValueError(
                f"algo.state_interval={self.interval} must be a multiple of sampler.batch_T={T}; use {good}"
            )
        return self.interval or T

    def data_T(self, T: int) -> int:
        """As many as between two starts; without an interval, of a sequence at most, and with batches of one step all.

        So no row is between two sequences, as there may be in the batches of a sampler.
        """
        return self.interval or (min(T, self.length) if T > 1 else self.length)

    def n_absent(self, T: int) -> int:
        return (self.length - 1) // T * T  # a sequence that starts at the last batch reaches over so many at most

    def make_reader(self, storage: Storage, T: int, state: Tree, prioritized: bool) -> Reader[Sequences]:
        return SequenceReader(storage, self, T, state)

    def join(self, parts: list[Sequences]) -> Sequences:
        state, weight, index = (
            map_tree(concatenate, *[getattr(part, name) for part in parts]) for name in ("state", "weight", "index")
        )
        times = [replace(part, state=()) for part in parts]  # weight and index [n] are joined above
        joined: Sequences = map_tree(lambda *x: concatenate(*x, axis=1) if x[0].ndim > 1 else x[0], *times)
        return replace(joined, state=state, weight=weight, index=index)


class SequenceReader(Reader[Sequences]):
    """Stores the agent's state at each batch where sequences start.

    Candidate i * B + b is environment b of the i-th of these batches.
    """

    def __init__(self, storage: Storage, config: FixedSequence, T: int, state: Tree) -> None:
        self._storage, self.config, self.n_rows, self._T = storage, config, config.length, T
        ring = storage.ring
        self._spacing = config.spacing(T)
        self._M = M = ring.L // self._spacing + 2  # more than the starts in the ring
        self.candidates = Candidates(M * ring.B, HostMemory(storage.memory.device))
        self._start = np.full(M, -1, np.int64)  # the time of a start
        self._unbroken = np.zeros(M, np.bool_)  # False if the batches after it do not continue it
        self._start_at = np.full(ring.L, -1, np.int64)  # the start that is at a time
        self._n_batches = self._n_starts = self._end = 0  # so far; the time after the newest batch
        self._state = map_tree(lambda x: storage.memory.array(M, ring.B, x.shape[1:], x.dtype), state)

    def append(self, samples: Samples, start: int) -> np.ndarray:
        storage, ring, B, M = self._storage, self._storage.ring, self._storage.ring.B, self._M
        if len(samples.valid) != self._T:
            raise ValueError(f"a batch has {len(samples.valid)} time steps, but this replay was made for {self._T}")
        i, lo, hi = self._n_starts, self.candidates.lo // B, self.candidates.hi // B
        if i and start != self._end:
            self._unbroken[np.arange(hi, i) % M] = False
        if self._n_batches * self._T % self._spacing == 0:
            self._start[i % M], self._unbroken[i % M], self._start_at[start % ring.L] = start, True, i
            map_tree(lambda array, x: array.write(i, x[None]), self._state, samples.state)
            self._n_starts = i + 1
        self._n_batches, self._end = self._n_batches + 1, ring.t
        while lo < self._n_starts and self._start[lo % M] < ring.oldest + storage.rows_before:
            lo += 1
        new = hi = max(lo, hi)
        while hi < self._n_starts and self._start[hi % M] + self.n_rows <= ring.t:
            hi += 1
        return self.candidates.advance(lo * B, hi * B, np.repeat(self._unbroken[np.arange(new, hi) % M], B))

    def read(self, numbers: np.ndarray, weight: Tensor) -> Sequences:
        storage, B = self._storage, self._storage.ring.B
        index = self.to_index(numbers)
        rows = index + np.arange(self.n_rows + 1)[:, None] * B  # [L+1, n]
        at = storage.locate(storage.memory.own(rows))
        state_at = storage.memory.own(numbers % self.candidates.n_slots)
        inputs, at = storage.inputs(at), at[:-1]
        return Sequences(
            inputs=inputs,
            action=storage.actions(at),
            reward=storage.values(storage.reward, at),
            terminated=storage.values(storage.terminated, at),
            truncated=storage.values(storage.truncated, at),
            valid=storage.values(storage.valid, at),
            state=map_tree(lambda array: array.take(state_at), self._state),
            weight=weight,
            index=index,
        )

    def to_index(self, numbers: np.ndarray) -> np.ndarray:
        B = self._storage.ring.B
        return self._start[numbers // B % self._M] * B + numbers % B

    def from_index(self, index: np.ndarray) -> np.ndarray:
        time, env = np.divmod(index, self._storage.ring.B)
        i = self._start_at[time % self._storage.ring.L]
        return np.where(self._start[i % self._M] == time, i * self._storage.ring.B + env, -1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "unbroken": self._unbroken,
            "start_at": self._start_at,
            "n_batches": self._n_batches,
            "n_starts": self._n_starts,
            "end": self._end,
            "state": [array.saved(self._M) for array in leaves(self._state)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start[...], self._unbroken[...] = state["start"], state["unbroken"]
        self._start_at[...] = state["start_at"]
        self._n_batches, self._n_starts, self._end = state["n_batches"], state["n_starts"], state["end"]
        for array, saved in zip(leaves(self._state), state["state"], strict=True):
            array.load(saved)
