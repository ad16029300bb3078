"""Replay of transitions with the return to the end of their episode, for imitation that weighs actions by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlframe.core.struct import Tree, as_numpy
from rlframe.core.types import Samples
from rlframe.ops.returns import discounted_return
from rlframe.replay.arrays import write_rows
from rlframe.replay.base import Transitions
from rlframe.replay.buffer import Reader
from rlframe.replay.n_step import TransitionConfig, TransitionReader
from rlframe.replay.storage import Storage


@dataclass(frozen=True)
class ReturnsToGo(TransitionConfig):
    """Transitions to the end of the episode: all its rewards, and what follows where it was truncated.

    A row is a candidate once its episode has ended, and those of all environments before it.
    """

    discount: float  # γ per env step

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount={self.discount} must be from 0 to 1")

    def make_reader(self, storage: Storage, T: int, state: Tree, prioritized: bool) -> Reader[Transitions]:
        return ReturnsToGoReader(storage, self, prioritized)


class ReturnsToGoReader(TransitionReader):
    """Computes the returns of rows once, when the episodes in which they are have ended.

    A batch costs a look at the rows that wait for an end; in episodes that never end, that is all of them.
    """

    n_rows = 1

    def __init__(self, storage: Storage, config: ReturnsToGo, prioritized: bool) -> None:
        super().__init__(storage, config, prioritized)
        self._discount, ring, memory = config.discount, storage.ring, storage.memory
        self._return, self._bootstrap = (memory.zeros((ring.L, ring.B), np.float32) for _ in range(2))
        self._steps = memory.zeros((ring.L, ring.B), np.int32)  # to the row after the episode's last

    def append(self, samples: Samples, start: int) -> np.ndarray:
        storage, ring, B = self._storage, self._storage.ring, self._storage.ring.B
        lo = ring.oldest + storage.rows_before
        waiting = max(lo, self.candidates.hi // B)  # the first row without a return
        n = ring.t - waiting
        reward, terminated, truncated, valid = map(torch.as_tensor, storage.outcomes(waiting, n))
        acted = as_numpy(valid)
        ended = acted & (as_numpy(terminated) | as_numpy(truncated))
        end = np.where(ended, np.arange(n)[:, None], n)
        end = np.minimum.accumulate(end[::-1])[::-1]  # [n, B] the last row of the episode; n: not known yet
        is_open = (acted & (end == n)).any(1)
        n_done = int(is_open.argmax()) if is_open.any() else n
        if n_done:
            zeros, ends = reward.new_zeros(n + 1, B), (terminated, truncated, valid)
            return_ = discounted_return(reward, zeros, *ends, self._discount)
            bootstrap = discounted_return(zeros[:-1], zeros + 1, *ends, self._discount)  # γ^k at a truncation
            steps = (end + 1 - np.arange(n)[:, None]).astype(np.int32)
            for array, rows in ((self._return, return_), (self._bootstrap, bootstrap), (self._steps, steps)):
                write_rows(array, waiting, storage.memory.own(rows[:n_done]))
        return self.candidates.advance(lo * B, (waiting + n_done) * B, valid[:n_done].reshape(-1))
