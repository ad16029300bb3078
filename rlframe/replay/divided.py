"""DividedReplay: one replay for ranks that learn one run together; rank 0 stores and draws, each learns from a part."""

from collections.abc import Callable, Mapping
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from rlframe.core.ranks import Ranks
from rlframe.core.struct import as_numpy, leaves, map_tree
from rlframe.core.types import Samples
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.readers import Batch

_NONE = np.zeros(0, np.int64), np.zeros(0)


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

    def mark(self) -> Callable[[], None]:
        return self._replay.mark()

    def state_dict(self) -> dict[str, Any]:
        return {"replay": self._replay.state_dict(), "new": list(self._new)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replay.load_state_dict(state["replay"])
        index, priority = state["new"]
        self._new = index, priority


def _arrays(batch: Any) -> list[np.ndarray]:
    return [as_numpy(leaf) for leaf in leaves(batch)]
