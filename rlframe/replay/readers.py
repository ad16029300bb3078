"""What is read where a row was drawn: transitions of n steps, or whole sequences with the agent's state before them."""

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
from rlframe.replay.columns import Choices, read_rows, spans, write_rows
from rlframe.replay.storage import Storage

Drawn = TypeVar("Drawn")  # Transitions or Sequences


class Reader(ABC, Generic[Drawn]):
    """Decides which rows may be drawn, its `choices`, and builds the result; made for one storage by its plan."""

    choices: Choices
    plan: Plan[Drawn]

    @abstractmethod
    def follow(self, samples: Samples, start: int) -> np.ndarray:
        """The storage has taken in a batch, its row 0 at time `start`; returns slots no longer to be drawn."""

    @abstractmethod
    def read(self, drawn: np.ndarray, weight: Tensor) -> Drawn:
        """What is at the choices `drawn` [n]."""

    @abstractmethod
    def number(self, choices: np.ndarray) -> np.ndarray:
        """Row numbers of choices [n]."""

    @abstractmethod
    def choice(self, numbers: np.ndarray) -> np.ndarray:
        """The inverse of `number`; -1 where there is none any more."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it keeps beside the storage; arrays are views."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same shapes."""


class Plan(ABC, Generic[Drawn]):
    """What an algorithm asks for: the values that a reader is made from."""

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """From the row drawn to the one after the last that must be complete."""

    @abstractmethod
    def over(self, storage: Storage, T: int, state: Tree) -> Reader[Drawn]:
        """The reader for a storage of batches of T time steps; `state` [B]: NumPy example of the agent's."""


@dataclass(frozen=True)
class NStep(Plan[Transitions]):
    """Transitions over up to n rewards. Every valid row may be drawn, except the newest n - 1 of each environment."""

    discount: float  # γ per env step
    n: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1 or not 1 <= self.n <= 255:
            raise ValueError(f"discount={self.discount} must be from 0 to 1, and n={self.n} from 1 to 255")

    @property
    def n_rows(self) -> int:
        return self.n

    def over(self, storage: Storage, T: int, state: Tree) -> Reader[Transitions]:
        return NStepReader(storage, self)


@dataclass(frozen=True)
class Whole(Plan[Sequences]):
    """Sequences of `length` rows from where a batch began, with the agent's state there."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length} must be at least 1")

    @property
    def n_rows(self) -> int:
        return self.length

    def over(self, storage: Storage, T: int, state: Tree) -> Reader[Sequences]:
        return WholeReader(storage, self, T, state)


class NStepReader(Reader[Transitions]):
    """Sums rewards once, when a row's n steps are complete: rows are drawn several times each. A choice is a row."""

    def __init__(self, storage: Storage, plan: NStep) -> None:
        self._storage, self.plan, self._discount, self._n = storage, plan, plan.discount, plan.n
        ring = storage.ring
        self.choices = Choices(ring.n_slots)
        lead = (ring.L, ring.B)
        self._return = np.zeros(lead, np.float32) if plan.n > 1 else storage.reward
        self._steps = np.zeros(lead, np.uint8) if plan.n > 1 else np.ones((1, 1), np.uint8)
        self._bootstrap = np.zeros(lead, np.float32)

    def follow(self, samples: Samples, start: int) -> np.ndarray:
        storage, ring, B = self._storage, self._storage.ring, self._storage.ring.B
        lo = ring.oldest + storage.rows_before
        hi = max(lo, ring.t + 1 - self._n)
        complete = max(lo, self.choices.hi // B)
        self._sum(complete, hi)
        return self.choices.move(lo * B, hi * B, read_rows(storage.valid, complete, hi - complete).reshape(-1))

    def _sum(self, complete: int, hi: int) -> None:
        """Returns of the times from `complete` to hi - 1."""
        storage, n = self._storage, self._storage.ring.t - complete
        if n <= 0:
            return
        if self._n == 1:
            for places, _ in spans(complete, n, storage.ring.L):
                self._bootstrap[places] = self._discount * ~storage.terminated[places]
            return
        reward, terminated, truncated, valid = (
            torch.from_numpy(read_rows(array, complete, n))
            for array in (storage.reward, storage.terminated, storage.truncated, storage.valid)
        )
        return_, bootstrap, index = n_step_return(reward, terminated, truncated, valid, self._discount, self._n)
        done = slice(0, hi - complete)
        write_rows(self._return, complete, return_[done].numpy())
        write_rows(self._bootstrap, complete, bootstrap[done].numpy())
        write_rows(self._steps, complete, (index - torch.arange(len(index))[:, None])[done].numpy())

    def read(self, drawn: np.ndarray, weight: Tensor) -> Transitions:
        storage, B = self._storage, self._storage.ring.B
        at = storage.at(drawn)
        if self._n == 1:
            inputs, next_inputs = storage.inputs_pair(at, storage.at(drawn + B))
        else:
            steps = self._steps.reshape(-1).take(at.slots).astype(np.int64)
            inputs, next_inputs = storage.inputs(at), storage.inputs(storage.at(drawn + steps * B))
        return Transitions(
            inputs=inputs,
            action=storage.actions(at),
            return_=storage.flags(self._return, at),
            bootstrap=storage.flags(self._bootstrap, at),
            next_inputs=next_inputs,
            weight=weight,
            index=drawn,
        )

    def number(self, choices: np.ndarray) -> np.ndarray:
        return choices

    def choice(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def state_dict(self) -> dict[str, Any]:
        return {name: array[: self._storage.ring.n_used] for name, array in self._own().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, array in self._own().items():
            array[: len(state[name])] = state[name]

    def _own(self) -> dict[str, np.ndarray]:
        own = {"bootstrap": self._bootstrap}
        return own if self._n == 1 else {**own, "return": self._return, "steps": self._steps}


class WholeReader(Reader[Sequences]):
    """Keeps the agent's states by batch. Choice i * B + b is environment b of batch i since the beginning."""

    def __init__(self, storage: Storage, plan: Whole, T: int, state: Tree) -> None:
        self._storage, self.plan, self._length, self._T = storage, plan, plan.length, T
        ring = storage.ring
        self._M = M = ring.L // T + 2  # more batches than begin in the ring
        self.choices = Choices(M * ring.B)
        self._start = np.full(M, -1, np.int64)  # time at which a batch began
        self._whole = np.zeros(M, np.bool_)  # false where the rows after it do not go on
        self._batch = np.full(ring.L, -1, np.int64)  # the batch that began at a time
        self._n_batches = self._end = 0  # batches there were; the time after the newest
        self._state = map_tree(lambda x: storage.memory.column(M, ring.B, x.shape[1:], x.dtype), state)

    def follow(self, samples: Samples, start: int) -> np.ndarray:
        storage, ring, B, M = self._storage, self._storage.ring, self._storage.ring.B, self._M
        if len(samples.valid) != self._T:
            raise ValueError(f"a batch of {len(samples.valid)} time steps; sequences were made for {self._T}")
        i, lo, hi = self._n_batches, self.choices.lo // B, self.choices.hi // B
        if i and start != self._end:
            self._whole[np.arange(hi, i) % M] = False
        self._start[i % M], self._whole[i % M], self._batch[start % ring.L] = start, True, i
        map_tree(lambda column, x: column.write(i, as_numpy(x)[None]), self._state, samples.state)
        self._n_batches, self._end = i + 1, ring.t
        while lo <= i and self._start[lo % M] < ring.oldest + storage.rows_before:
            lo += 1
        new = hi = max(lo, hi)
        while hi <= i and self._start[hi % M] + self._length <= ring.t:
            hi += 1
        return self.choices.move(lo * B, hi * B, np.repeat(self._whole[np.arange(new, hi) % M], B))

    def read(self, drawn: np.ndarray, weight: Tensor) -> Sequences:
        storage, B = self._storage, self._storage.ring.B
        number = self.number(drawn)
        rows = number + np.arange(self._length + 1)[:, None] * B  # [L+1, n]
        at = storage.at(rows[:-1])
        state_at = storage.memory.locate(drawn % self.choices.n_slots)
        return Sequences(
            inputs=storage.inputs(storage.at(rows)),
            action=storage.actions(at),
            reward=storage.flags(storage.reward, at),
            terminated=storage.flags(storage.terminated, at),
            truncated=storage.flags(storage.truncated, at),
            valid=storage.flags(storage.valid, at),
            state=map_tree(lambda column: column.take(state_at), self._state),
            weight=weight,
            index=number,
        )

    def number(self, choices: np.ndarray) -> np.ndarray:
        B = self._storage.ring.B
        return self._start[choices // B % self._M] * B + choices % B

    def choice(self, numbers: np.ndarray) -> np.ndarray:
        time, env = np.divmod(numbers, self._storage.ring.B)
        batch = self._batch[time % self._storage.ring.L]
        return np.where(self._start[batch % self._M] == time, batch * self._storage.ring.B + env, -1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "whole": self._whole,
            "batch": self._batch,
            "n_batches": self._n_batches,
            "end": self._end,
            "state": [column.held(self._M) for column in leaves(self._state)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start[...], self._whole[...], self._batch[...] = state["start"], state["whole"], state["batch"]
        self._n_batches, self._end = state["n_batches"], state["end"]
        for column, saved in zip(leaves(self._state), state["state"], strict=True):
            column.load(saved)
