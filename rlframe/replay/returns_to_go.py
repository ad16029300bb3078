"""Replay of transitions with the return to the end of their episode, for imitation that weighs actions by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlframe.core.struct import Tree, as_numpy
from rlframe.core.types import Samples
from rlframe.ops.returns import discounted_return
from rlframe.replay.arrays import read_rows, write_rows
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
        reward, terminated, truncated, valid = (
            read_rows(array, waiting, n)
            for array in (storage.reward, storage.terminated, storage.truncated, storage.valid)
        )
        acted = as_numpy(valid)
        ended = acted & (as_numpy(terminated) | as_numpy(truncated))
        end = np.where(ended, np.arange(n)[:, None], n)
        end = np.minimum.accumulate(end[::-1])[::-1]  # [n, B] the last row of the episode; n: not known yet
        is_open = (acted & (end == n)).any(1)
        n_done = int(is_open.argmax()) if is_open.any() else n
        if n_done:
            steps = (end + 1 - np.arange(n)[:, None])[:n_done]
            self._write(waiting, n_done, steps, *map(torch.as_tensor, (reward, terminated, truncated, valid)))
        return self.candidates.advance(lo * B, (waiting + n_done) * B, valid[:n_done].reshape(-1))

    def _write(
        self,
        time: int,
        n_done: int,
        steps: np.ndarray,
        reward: torch.Tensor,
        terminated: torch.Tensor,
        truncated: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        """Write what is known of `n_done` time steps, from those and the ones that follow."""
        own, ends, discount = self._storage.memory.own, (terminated, truncated, valid), self._discount
        zeros = torch.zeros_like(torch.cat([reward, reward[:1]]))
        return_ = discounted_return(reward, zeros, *ends, discount)
        bootstrap = discounted_return(zeros[:-1], zeros + 1, *ends, discount)  # γ^k of a value of 1 at a truncation
        write_rows(self._return, time, own(return_[:n_done]))
        write_rows(self._bootstrap, time, own(bootstrap[:n_done]))
        write_rows(self._steps, time, own(steps.astype(np.int32)))
