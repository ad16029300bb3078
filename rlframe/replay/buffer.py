"""ReplayBuffer, the replay that algorithms use: storages, selector and readers; and one that several ranks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlframe.core.ranks import Ranks
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import Array, Samples
from rlframe.replay.select import Candidates, Drawn, Prioritized, Selector
from rlframe.replay.storage import Storage

Batch = TypeVar("Batch")  # Transitions or Sequences
_NONE = np.zeros(0, np.int64), np.zeros(0)  # index and priority


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
    def read(self, numbers: Array, weight: Tensor) -> Batch:
        """The batch of these candidates [n]."""

    def to_index(self, numbers: Array) -> Array:
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

    def data_T(self, T: int) -> int:
        """Time steps of each batch in which recorded rows are stored, for a sampler's of T; 0: they may be any."""
        return 0

    def n_absent(self, T: int) -> int:
        """Absent rows that are stored after batches [T] of recorded ones, so that the last can be sampled too.

        A multiple of T if `data_T` says what T is.
        """
        return 0

    def made_with(self) -> dict[str, Any]:
        """Optional: the settings of an algorithm's Config that it follows, by name."""
        return {}

    @abstractmethod
    def make_reader(self, storage: Storage, T: int, state: Tree, prioritized: bool) -> Reader[Batch]:
        """The reader of a storage of batches of T time steps; `state` [B]: NumPy example of the agent's state."""

    @abstractmethod
    def join(self, parts: list[Batch]) -> Batch:
        """One batch of several, copied."""


class ReplayBuffer(Generic[Batch]):
    """A replay (see `Replay`) of transitions or sequences, made by `make_replay` and owned by an algorithm.

    Each stream has a storage and a reader of its own, in the order in which they appear. The `index` of a row is its
    number there times the number of streams, plus the stream's place.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        selector: Selector,
        readers: Sequence[Reader[Batch]],
        size: str,
        row_bytes: int,
    ) -> None:
        """`storages`, `readers`: one for each stream.    size: as text, for the log.    row_bytes: of a row."""
        self.size, self.row_bytes = size, row_bytes
        self._storages, self.selector, self._readers = storages, selector, readers
        self._candidates = [reader.candidates for reader in readers]
        self._n, self._memory = len(readers), storages[0].memory
        self._streams: dict[int, int] = {}  # the place of each stream
        self._newest = 0  # place of the stream that was appended last
        self._ones = self._memory.send(np.ones(0, np.float32))  # the weights of the last uniform batch

    def __str__(self) -> str:
        return self.size

    @property
    def n_rows(self) -> int:
        """Number of valid rows stored; 0 while no batch can be sampled."""
        can_be_sampled = self.n_choices >= self.selector.least
        return sum(storage.n_rows for storage in self._storages) if can_be_sampled else 0

    @property
    def n_choices(self) -> int:
        """Number of rows, or of sequences, that can be sampled."""
        return sum(candidates.n for candidates in self._candidates)

    @property
    def mass(self) -> float:
        """The number of rows or sequences that can be sampled, or the sum of their priorities^α."""
        return self.selector.mass(self._candidates)

    @property
    def is_prioritized(self) -> bool:
        return isinstance(self.selector, Prioritized)

    def made_with(self) -> dict[str, Any]:
        """The settings of an algorithm's Config that decided what it holds, by name."""
        return {"prioritized": self.is_prioritized, **self._readers[0].config.made_with()}

    def append(self, samples: Samples) -> None:
        """Copy a batch, overwriting the oldest rows of its stream.

        Raises:
            ValueError: as `Storage.append`, or of more streams than the replay was made for.
        """
        self._newest = i = self._place_of(samples.stream)
        start, reader = self._storages[i].append(samples), self._readers[i]
        removed = reader.append(samples, start)
        self.selector.update_candidates(i, reader.candidates, removed)
        numbers, priority = reader.priorities
        if len(numbers):
            self.selector.set_priorities(i, reader.candidates, numbers, priority)

    def _place_of(self, stream: int) -> int:
        if stream not in self._streams:
            if len(self._streams) == self._n:
                known = ", ".join(map(str, self._streams))
                raise ValueError(
                    f"a batch of stream {stream}, but this replay was made for {self._n}, and has {known}; make it "
                    f"with BatchSpec(n_streams={self._n + 1})"
                )
            self._streams[stream] = len(self._streams)
        return self._streams[stream]

    def sample(self, n: int, beta: float = 0.0) -> Batch:
        """Sample n transitions or sequences (see `Replay.sample`); raises ValueError if there are none yet."""
        return self._read_drawn(*self._draw(n, beta))

    def sample_with_probability(self, n: int) -> tuple[Batch, np.ndarray]:
        """What `sample` returns, with weights of 1, and the probability [n] float64 of each draw."""
        drawn, ones = self._draw(n, 0.0)
        return self._read_drawn(drawn, ones), self.selector.probability(self._candidates, drawn)

    def _read_drawn(self, drawn: Drawn, weight: Tensor) -> Batch:
        if self._n == 1:
            return self._read_rows(0, drawn[0][1], weight)
        weights = weight.split([len(numbers) for _, numbers in drawn])
        return self.join([self._read(i, numbers, own) for (i, numbers), own in zip(drawn, weights, strict=True)])

    def sample_parts(self, n: int, n_parts: int, beta: float = 0.0) -> list[Batch]:
        """What `sample` returns, dealt in turn to parts of n / n_parts; raises ValueError if that is not whole."""
        if n % n_parts:
            raise ValueError(f"{n} rows cannot be divided among {n_parts}")
        drawn, weight = self._draw(n, beta)
        starts = accumulate((len(numbers) for _, numbers in drawn), initial=0)
        streams = [(i, numbers, start) for (i, numbers), start in zip(drawn, starts, strict=False)]
        parts: list[Batch] = []
        for k in range(n_parts):
            own = [(i, numbers[(k - start) % n_parts :: n_parts]) for i, numbers, start in streams]
            parts.append(self._read_drawn([each for each in own if len(each[1])], weight[k::n_parts].contiguous()))
        return parts

    def _draw(self, n: int, beta: float) -> tuple[Drawn, Tensor]:
        """Numbers, and their weights [n]."""
        if not self.n_choices:
            raise ValueError(
                f"replay cannot be sampled yet: none of its {sum(storage.n_rows for storage in self._storages)} valid "
                f"rows has all rows that must follow it; append more rows, for example with a larger "
                f"algo.learning_starts"
            )
        drawn = self.selector.draw(self._candidates, n)
        found = self.selector.weights(self._candidates, drawn, beta)
        return drawn, self._ones_of(n) if found is None else self._memory.send(found)

    def _read(self, i: int, numbers: Array, weight: Tensor) -> Batch:
        batch: Any = self._read_rows(i, numbers, weight)
        return replace(batch, index=batch.index * self._n + i) if self._n > 1 else batch

    def _read_rows(self, i: int, numbers: Array, weight: Tensor) -> Batch:
        return self._memory.delivered(self._readers[i].read(numbers, weight))

    def _ones_of(self, n: int) -> Tensor:
        if len(self._ones) != n:
            self._ones = self._memory.send(np.ones(n, np.float32))
        return self._ones

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | Tensor) -> None:
        """See `Replay`; raises ValueError for a wrong shape, or a priority that is negative, NaN or infinite."""
        values = as_numpy(priority)
        if values.shape != index.shape:
            raise ValueError(f"priorities {list(values.shape)} must have the shape {list(index.shape)} of the index")
        for i, reader in enumerate(self._readers):
            mine = index % self._n == i if self._n > 1 else slice(None)
            numbers = reader.from_index(index[mine] // self._n)
            self.selector.set_priorities(i, reader.candidates, numbers, values[mine])

    def raise_highest(self, priority: float) -> None:
        """Give new rows at least this priority."""
        self.selector.raise_highest(priority)

    def read(self, index: np.ndarray) -> Batch:
        """The rows of one stream with this `index` [n], which must still be stored; weights are 1."""
        i = int(index[0]) % self._n if len(index) else 0
        return self._read(i, self._readers[i].from_index(index // self._n), self._ones_of(len(index)))

    def join(self, parts: list[Batch]) -> Batch:
        """One batch of all parts."""
        return parts[0] if len(parts) == 1 else self._readers[0].config.join(parts)

    def layout(self, n: int) -> Batch:
        """A batch of n rows with the shapes and dtypes of a sample; its values mean nothing."""
        return self._read_rows(0, np.zeros(n, np.int64), self._ones_of(n))

    def newest(self) -> np.ndarray:
        """The index [n] of the rows that the last `append` made available.

        Their priority is the highest so far or a fixed one, or what the reader knows of it.
        """
        reader = self._readers[self._newest]
        return reader.to_index(reader.candidates.newest) * self._n + self._newest

    def state_dict(self) -> dict[str, Any]:
        """Rows, priorities and generator; arrays are views where possible, valid until the next `append`."""
        parts = [
            {"storage": storage.state_dict(), "reader": reader.state_dict(), "choices": reader.candidates.state_dict()}
            for storage, reader in zip(self._storages, self._readers, strict=True)
        ]
        streams = {"streams": list(self._streams), "newest": self._newest}
        return {"made_for": self._made_for(), "selector": self.selector.state_dict(), "parts": parts, **streams}

    def _made_for(self) -> str:
        storage, ring = self._storages[0], self._storages[0].ring
        rows = ", ".join(f"{x.dtype}{list(x.shape[1:])}" for x in leaves(storage.example))
        kinds = ", ".join(part.name for part in leaves(storage.observation))
        size = f"{ring.L} x {ring.B}" if self._n == 1 else f"{self._n} x {ring.L} x {ring.B}"
        return f"{self._readers[0].config} {self.selector} of {size} rows of {rows} as {kinds}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; raises ValueError if that replay has another layout or size."""
        if state["made_for"] != self._made_for():
            raise ValueError(f"the saved replay is {state['made_for']}, not {self._made_for()}; use its config")
        for storage, reader, saved in zip(self._storages, self._readers, state["parts"], strict=True):
            storage.load_state_dict(saved["storage"])
            reader.load_state_dict(saved["reader"])
            reader.candidates.load_state_dict(saved["choices"])
        self._streams = {stream: i for i, stream in enumerate(state["streams"])}
        self._newest = state["newest"]
        self.selector.load_state_dict(state["selector"])


class DividedReplay(Generic[Batch]):
    """A replay (see `Replay`) that all ranks sample at the same time; each gets its share of the rows.

    The rows are those that one rank would draw. Priorities that other ranks set reach rank 0 before the next batch is
    appended or sampled.
    """

    def __init__(self, replay: ReplayBuffer[Batch], ranks: Ranks) -> None:
        """`replay`: on rank 0 that of the run; on the others an empty one of the same layout, and of any size."""
        self._replay, self._ranks = replay, ranks
        self._new: tuple[np.ndarray, np.ndarray] = _NONE  # index and priority, on their way to rank 0

    def __str__(self) -> str:
        return f"{self._replay}, each batch shared by {self._ranks.world_size} learners"

    @property
    def n_rows(self) -> int:
        return self._replay.n_rows

    def append(self, samples: Samples) -> None:
        self._send_priorities()  # new rows get the highest one so far
        if self._ranks.rank == 0:
            self._replay.append(samples)

    def _send_priorities(self) -> None:
        """To rank 0, from the others."""
        if not self._replay.is_prioritized:
            return
        for index, priority in self._ranks.gather([x.tolist() for x in self._new]):
            if self._ranks.rank == 0 and index:
                self._replay.update_priorities(np.array(index), np.array(priority))
        self._new = _NONE

    def sample(self, n: int, beta: float = 0.0) -> Batch:
        """This rank's n / world_size of n rows."""
        ranks = self._ranks
        self._send_priorities()
        if ranks.rank == 0:
            parts = self._replay.sample_parts(n, ranks.world_size, beta)
            ranks.scatter([_arrays(part) for part in parts], ())
            return parts[0]
        layout = self._replay.layout(n // ranks.world_size)
        found = iter(ranks.scatter((), _arrays(layout)))
        return map_tree(lambda x: torch.from_numpy(next(found)) if isinstance(x, Tensor) else next(found), layout)

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | Tensor) -> None:
        if self._ranks.rank == 0:
            self._replay.update_priorities(index, priority)
        else:
            self._new = np.append(self._new[0], index), np.append(self._new[1], as_numpy(priority))

    def newest(self) -> np.ndarray:
        return self._replay.newest()

    def read(self, index: np.ndarray) -> Batch:
        return self._replay.read(index)

    def state_dict(self) -> dict[str, Any]:
        return {"replay": self._replay.state_dict(), "new": list(self._new)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replay.load_state_dict(state["replay"])
        index, priority = state["new"]
        self._new = index, priority


def _arrays(batch: Any) -> list[np.ndarray]:
    return [as_numpy(leaf) for leaf in leaves(batch)]
