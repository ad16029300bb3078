"""ReplayBuffer: what is stored, how rows are chosen, and what is read there, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic

import numpy as np
from torch import Tensor

from rlframe.core.struct import as_numpy, leaves
from rlframe.core.types import Samples
from rlframe.replay.read import Drawn, Reader
from rlframe.replay.select import Selector
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
