"""ReplayBuffer, the replay that algorithms use: storage, selector and reader."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic

import numpy as np
from torch import Tensor

from rlframe.core.struct import as_numpy, leaves
from rlframe.core.types import Samples
from rlframe.replay.readers import Batch, Reader
from rlframe.replay.select import Prioritized, Selector
from rlframe.replay.storage import Storage


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

    @property
    def is_prioritized(self) -> bool:
        return isinstance(self._selector, Prioritized)

    def append(self, samples: Samples) -> None:
        """Copy a batch, overwriting the oldest rows; raises ValueError as `Storage.append` does."""
        start = self._storage.append(samples)
        removed = self._reader.append(samples, start)
        self._selector.update_candidates(self._reader.candidates, removed)
        numbers, priority = self._reader.priorities
        if len(numbers):
            self._selector.set_priorities(self._reader.candidates, numbers, priority)

    def sample(self, n: int, beta: float = 0.0) -> Batch:
        """Sample n transitions or sequences (see `Replay.sample`); raises ValueError if there are none yet."""
        return self.sample_parts(n, 1, beta)[0]

    def sample_parts(self, n: int, n_parts: int, beta: float = 0.0) -> list[Batch]:
        """What `sample` returns, in parts of n / n_parts."""
        candidates = self._reader.candidates
        if not candidates.n:
            raise ValueError(
                f"replay cannot be sampled yet: none of its {self._storage.n_rows} valid rows has all rows that must "
                f"follow it; append more rows, for example with a larger algo.learning_starts"
            )
        numbers = self._selector.draw(candidates, n)
        found = self._selector.weights(candidates, numbers, beta)
        weight = self._ones_of(n) if found is None else self._storage.memory.send(found)
        parts = zip(numbers.reshape(n_parts, -1), weight.view(n_parts, -1), strict=True)
        return [self._reader.read(*part) for part in parts]

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

    def layout(self, n: int) -> Batch:
        """A batch of n rows with the shapes and dtypes of a sample; its values mean nothing."""
        return self._reader.read(np.zeros(n, np.int64), self._ones_of(n))

    def newest(self) -> np.ndarray:
        """The index [n] of the rows that the last `append` made available.

        Their priority is the highest so far, or what the reader knows of it.
        """
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
        kinds = ", ".join(part.name for part in leaves(storage.observation))
        return f"{self._reader.config} {self._selector} of {ring.L} x {ring.B} rows of {rows} as {kinds}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; raises ValueError if that replay has another layout or size."""
        if state["made_for"] != self._made_for():
            raise ValueError(f"the saved replay is {state['made_for']}, not {self._made_for()}; use its config")
        self._storage.load_state_dict(state["storage"])
        self._reader.load_state_dict(state["reader"])
        self._reader.candidates.load_state_dict(state["choices"])
        self._selector.load_state_dict(state["selector"])
