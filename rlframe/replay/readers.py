"""Readers: turn sampled rows of the storage into n-step transitions, or into sequences with the agent's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import Samples
from rlframe.ops.returns import n_step_return
from rlframe.replay.base import Sequences, Transitions
from rlframe.replay.columns import Candidates, read_rows, spans, write_rows
from rlframe.replay.initial_priorities import InitialPriorities
from rlframe.replay.select import PRIORITY_EPSILON
from rlframe.replay.storage import Storage

Batch = TypeVar("Batch")  # Transitions or Sequences
_NONE = np.zeros(0, np.int64), np.zeros(0)


class Reader(ABC, Generic[Batch]):
    """Decides which rows of one storage may be sampled, its `candidates`, and builds the batch."""

    candidates: Candidates
    config: ReaderConfig[Batch]
    n_rows: int  # number of rows from the sampled one on that must be complete
    priorities: tuple[np.ndarray, np.ndarray] = _NONE  # newest candidates whose first priority is known, and that

    @abstractmethod
    def append(self, samples: Samples, start: int) -> np.ndarray:
        """Update the candidates after the storage appended a batch at time `start`; returns the slots removed."""

    @abstractmethod
    def read(self, numbers: np.ndarray, weight: Tensor) -> Batch:
        """The batch of these candidates [n]."""

    def to_index(self, numbers: np.ndarray) -> np.ndarray:
        """The row index [n] of candidates [n]; they are equal unless a reader overrides this."""
        return numbers

    def from_index(self, index: np.ndarray) -> np.ndarray:
        """The inverse of `to_index`; overwritten rows give numbers that are no candidates."""
        return index

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The reader's own arrays, as views."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of the same shapes."""


class ReaderConfig(ABC, Generic[Batch]):
    """What an algorithm wants to sample; `make_replay` makes the reader from it."""

    @abstractmethod
    def spacing(self, T: int) -> int:
        """Time steps from a candidate of an environment to its next, in batches of T; raises ValueError if unfit."""

    @abstractmethod
    def make_reader(self, storage: Storage, T: int, state: Tree) -> Reader[Batch]:
        """The reader of a storage of batches of T time steps; `state` [B]: NumPy example of the agent's state."""


@dataclass(frozen=True)
class NStep(ReaderConfig[Transitions]):
    """Transitions over up to n rewards. Every valid row is a candidate, except the newest n - 1 per environment.

    With `td_priorities` the newest n: of those after them, the Q-value of the bootstrap is known.
    """

    discount: float  # γ per env step
    n: int = 1
    td_priorities: bool = False  # new rows have the TD error of acting as priority (see InitialPriorities)

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1 or not 1 <= self.n <= 255:
            raise ValueError(f"discount={self.discount} must be from 0 to 1, and n={self.n} from 1 to 255")

    def spacing(self, T: int) -> int:
        return 1

    def make_reader(self, storage: Storage, T: int, state: Tree) -> Reader[Transitions]:
        return NStepReader(storage, self, T)


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

    def make_reader(self, storage: Storage, T: int, state: Tree) -> Reader[Sequences]:
        return SequenceReader(storage, self, T, state)


class NStepReader(Reader[Transitions]):
    """Computes a row's n-step return once, when its n steps are complete. The candidates are the row indices."""

    def __init__(self, storage: Storage, config: NStep, T: int) -> None:
        self._storage, self.config, self._discount, self._n = storage, config, config.discount, config.n
        self.n_rows = config.n + config.td_priorities
        ring = storage.ring
        held = T + self.n_rows + storage.rows_before + 2
        self._acting = [InitialPriorities(held, ring.B)] if config.td_priorities else []
        self.candidates = Candidates(ring.n_slots)
        self._bootstrap = np.zeros((ring.L, ring.B), np.float32)
        self._return, self._steps = storage.reward, np.ones((1, 1), np.uint8)
        if config.n > 1:
            self._return, self._steps = np.zeros_like(storage.reward), np.zeros((ring.L, ring.B), np.uint8)

    def append(self, samples: Samples, start: int) -> np.ndarray:
        storage, ring, B = self._storage, self._storage.ring, self._storage.ring.B
        lo = ring.oldest + storage.rows_before
        hi = max(lo, ring.t + 1 - self.n_rows)
        complete = max(lo, self.candidates.hi // B)
        self._compute_returns(complete, hi)
        valid = read_rows(storage.valid, complete, hi - complete).reshape(-1)
        removed = self.candidates.advance(lo * B, hi * B, valid)
        for acting in self._acting:
            acting.append(samples, start)
            self.priorities = self._priorities(acting, self.candidates.newest)
        return removed

    def _priorities(self, acting: InitialPriorities, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of the candidates [n] whose error is known, and their priorities."""
        (time, env), L = np.divmod(numbers, self._storage.ring.B), self._storage.ring.L
        steps = self._steps[time % L, env].astype(np.int64) if self._n > 1 else 1
        error = acting.of(time, env, steps, self._return[time % L, env], self._bootstrap[time % L, env])
        known = np.isfinite(error)
        return numbers[known], error[known] + PRIORITY_EPSILON

    def _compute_returns(self, start: int, stop: int) -> None:
        """Returns of the time steps from `start` to `stop` - 1."""
        storage, n = self._storage, self._storage.ring.t - start
        if n <= 0:
            return
        if self._n == 1:
            for places, _ in spans(start, n, storage.ring.L):
                self._bootstrap[places] = self._discount * ~storage.terminated[places]
            return
        reward, terminated, truncated, valid = (
            torch.from_numpy(read_rows(array, start, n))
            for array in (storage.reward, storage.terminated, storage.truncated, storage.valid)
        )
        return_, bootstrap, index = n_step_return(reward, terminated, truncated, valid, self._discount, self._n)
        done = slice(0, stop - start)
        write_rows(self._return, start, return_[done].numpy())
        write_rows(self._bootstrap, start, bootstrap[done].numpy())
        write_rows(self._steps, start, (index - torch.arange(len(index))[:, None])[done].numpy())

    def read(self, numbers: np.ndarray, weight: Tensor) -> Transitions:
        storage, B = self._storage, self._storage.ring.B
        at = storage.locate(numbers)
        if self._n == 1:
            inputs, next_inputs = storage.inputs_pair(at, storage.locate(numbers + B))
        else:
            steps = self._steps.reshape(-1).take(at.slots).astype(np.int64)
            inputs, next_inputs = storage.inputs(at), storage.inputs(storage.locate(numbers + steps * B))
        return Transitions(
            inputs=inputs,
            action=storage.actions(at),
            return_=storage.values(self._return, at),
            bootstrap=storage.values(self._bootstrap, at),
            next_inputs=next_inputs,
            weight=weight,
            index=numbers,
        )

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: array[: self._storage.ring.n_used] for name, array in self._arrays().items()}
        return {**arrays, "acting": [acting.state_dict() for acting in self._acting]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, array in self._arrays().items():
            array[: len(state[name])] = state[name]
        for acting, saved in zip(self._acting, state["acting"], strict=True):
            acting.load_state_dict(saved)

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"bootstrap": self._bootstrap}
        return arrays if self._n == 1 else {**arrays, "return": self._return, "steps": self._steps}


class SequenceReader(Reader[Sequences]):
    """Stores the agent's state at each batch where sequences start.

    Candidate i * B + b is environment b of the i-th of these batches.
    """

    def __init__(self, storage: Storage, config: FixedSequence, T: int, state: Tree) -> None:
        self._storage, self.config, self.n_rows, self._T = storage, config, config.length, T
        ring = storage.ring
        self._spacing = config.spacing(T)
        self._M = M = ring.L // self._spacing + 2  # more than the starts in the ring
        self.candidates = Candidates(M * ring.B)
        self._start = np.full(M, -1, np.int64)  # the time of a start
        self._unbroken = np.zeros(M, np.bool_)  # False if the batches after it do not continue it
        self._start_at = np.full(ring.L, -1, np.int64)  # the start that is at a time
        self._n_batches = self._n_starts = self._end = 0  # so far; the time after the newest batch
        self._state = map_tree(lambda x: storage.memory.column(M, ring.B, x.shape[1:], x.dtype), state)

    def append(self, samples: Samples, start: int) -> np.ndarray:
        storage, ring, B, M = self._storage, self._storage.ring, self._storage.ring.B, self._M
        if len(samples.valid) != self._T:
            raise ValueError(f"a batch has {len(samples.valid)} time steps, but this replay was made for {self._T}")
        i, lo, hi = self._n_starts, self.candidates.lo // B, self.candidates.hi // B
        if i and start != self._end:
            self._unbroken[np.arange(hi, i) % M] = False
        if self._n_batches * self._T % self._spacing == 0:
            self._start[i % M], self._unbroken[i % M], self._start_at[start % ring.L] = start, True, i
            map_tree(lambda column, x: column.write(i, as_numpy(x)[None]), self._state, samples.state)
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
        at = storage.locate(rows[:-1])
        state_at = storage.memory.locate(numbers % self.candidates.n_slots)
        return Sequences(
            inputs=storage.inputs(storage.locate(rows)),
            action=storage.actions(at),
            reward=storage.values(storage.reward, at),
            terminated=storage.values(storage.terminated, at),
            truncated=storage.values(storage.truncated, at),
            valid=storage.values(storage.valid, at),
            state=map_tree(lambda column: column.take(state_at), self._state),
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
            "state": [column.saved(self._M) for column in leaves(self._state)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start[...], self._unbroken[...] = state["start"], state["unbroken"]
        self._start_at[...] = state["start_at"]
        self._n_batches, self._n_starts, self._end = state["n_batches"], state["n_starts"], state["end"]
        for column, saved in zip(leaves(self._state), state["state"], strict=True):
            column.load(saved)
