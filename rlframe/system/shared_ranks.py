"""SharedRanks: the ranks of one machine exchange through memory that no other process can reach."""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.core.ranks import RankLost
from rlframe.system.collectives import ExchangingRanks, first_line
from rlframe.system.process import ChildProcess
from rlframe.system.shared import Shared, share_zeros

_YIELD_S = 1e-4  # of waiting for another rank, before sleeping
_LONGEST_SLEEP_S = 0.01
_CHECK_S = 0.2  # between looks at the processes of the others


@dataclass(frozen=True)
class RankMemory:
    """What the ranks of a machine share; rank 0 makes it, and the others receive it at their start."""

    words: Shared  # arrived [world_size, 8]: exchanges begun, one cache line a rank; number and weight [2, world_size]
    data: Shared  # [2, world_size, n_bytes] uint8, which grows with need; the exchanges use its halves in turns

    @classmethod
    def make(cls, world_size: int) -> "RankMemory":
        pairs = {"number": np.zeros((2, world_size), np.int64), "weight": np.zeros((2, world_size))}
        words = {"arrived": np.zeros((world_size, 8), np.int64), **pairs}
        return cls(share_zeros(words, "ranks"), share_zeros(np.zeros(1, np.uint8), "exchange"))

    def send(self, child: ChildProcess) -> None:
        """Send it to a rank, which receives `words` and `data` in this order."""
        child.send_memory(self.words)
        child.send_memory(self.data)

    def close(self) -> None:
        """Close the file descriptors; the memory goes with the last process that maps it."""
        self.words.close()
        self.data.close()


class SharedRanks(ExchangingRanks):
    """Every rank writes into its own part, all wait for each other, and each adds up its share of the elements.

    Sums are in the order of the ranks, so they are equal to the last bit on all of them and in every run. GPUs, one for
    each rank, exchange tensors by NCCL instead.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        memory: RankMemory,
        timeout_s: float,
        check: Callable[[], None],
        children: Sequence[int],
        n_samplers: int,
        on_gpus: bool = False,
    ) -> None:
        """Args:
        check: called now and then while this rank waits; raises if another rank has failed.
        children: process ids of the ranks that this process has started.
        n_samplers: see Ranks.
        """
        self.rank, self.world_size, self.n_samplers = rank, world_size, n_samplers
        self._timeout_s, self._check, self._children, self._on_gpus = timeout_s, check, children, on_gpus
        self._arrived = [memory.words.tree["arrived"][i, :1] for i in range(world_size)]
        self._numbers, self._weights = memory.words.tree["number"], memory.words.tree["weight"]
        self._fd, self._fence = memory.data.fd, threading.Lock()
        self._n_met, self._half = 0, 0
        self._slots = np.zeros((2, world_size, 0), np.uint8)

    def max(self, number: int) -> int:
        return max(self._all(number))

    def sum(self, number: int) -> int:
        return sum(self._all(number))

    def _all(self, number: int) -> list[int]:
        """The number of each rank."""
        self._half ^= 1
        self._numbers[self._half, self.rank] = number
        self._meet()
        return [int(each) for each in self._numbers[self._half]]

    def average(self, tensors: Sequence[Tensor], weight: Tensor | float = 1.0) -> None:
        """As in ExchangingRanks, but on the CPU without a copy of all tensors."""
        if not tensors or tensors[0].is_cuda:
            super().average(tensors, weight)
            return
        n = sum(map(Tensor.numel, tensors))
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
        slots = [torch.from_numpy(slot).view(dtype) for slot in self._next_slots(n * dtype.itemsize)]
        torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=slots[self.rank])
        self._weights[self._half, self.rank] = float(weight)
        self._meet()
        weights = (self._weights[self._half] / (self._weights[self._half].sum() or 1.0)).tolist()
        own = self._share(n)
        mean = slots[0][own].mul_(weights[0])
        for other, of_other in zip(slots[1:], weights[1:], strict=True):
            mean.add_(other[own], alpha=of_other)
        self._meet()
        pieces = slots[0].split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])

    def _share(self, n: int) -> slice:
        """The elements of n that this rank adds up."""
        return slice(n * self.rank // self.world_size, n * (self.rank + 1) // self.world_size)

    def _sum(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda and self._on_gpus:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:
                raise RankLost(f"rank {self.rank} lost another rank: {first_line(error)}") from error
            return tensor
        carried = tensor.cpu().contiguous()
        each = [torch.from_numpy(slot).view(carried.dtype) for slot in self._next_slots(carried.nbytes)]
        each[self.rank].copy_(carried.view(-1))
        self._meet()
        own = self._share(carried.numel())
        for other in each[1:]:
            each[0][own] += other[own]
        self._meet()
        return carried.copy_(each[0].view(carried.shape)).to(tensor.device)

    def _gather(self, message: bytes) -> list[bytes]:
        sizes = self._all(len(message))
        slots = self._next_slots(max(sizes))
        slots[self.rank][: len(message)] = np.frombuffer(message, np.uint8)
        self._meet()
        return [slot[:n].tobytes() for slot, n in zip(slots, sizes, strict=True)]

    def _next_slots(self, n_bytes: int) -> list[np.ndarray]:
        """The parts [n_bytes] of all ranks in the next half; this rank writes into its own.

        A half may be written again after the exchange in between, which all begin only when they have read this one.
        """
        self._half ^= 1
        if n_bytes > self._slots.shape[2]:
            self._grow(n_bytes)
        return list(self._slots[self._half, :, :n_bytes])

    def _grow(self, n_bytes: int) -> None:
        """Map parts of at least `n_bytes`; all ranks do so in the same exchange."""
        n_bytes = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = 2 * self.world_size * n_bytes
        self._meet()
        if self.rank == 0:
            os.ftruncate(self._fd, size)
        self._meet()
        self._slots = np.frombuffer(mmap.mmap(self._fd, size), np.uint8).reshape(2, self.world_size, n_bytes)

    def _meet(self) -> None:
        """Wait until every rank has come here as often as this one. What they wrote before is then visible.

        Raises:
            RankLost: another rank has died, or did not come within the time limit.
        """
        self._n_met += 1
        with self._fence:  # processors that reorder writes must not move them beyond this
            self._arrived[self.rank][0] = self._n_met
        for rank, arrived in enumerate(self._arrived):
            if arrived[0] < self._n_met:
                self._wait_for(rank)
        with self._fence:
            pass

    def _wait_for(self, rank: int) -> None:
        arrived, start, checked = self._arrived[rank], time.perf_counter(), 0.0
        while arrived[0] < self._n_met:
            waited = time.perf_counter() - start
            if waited < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(min(waited / 10, _LONGEST_SLEEP_S))
            if waited - checked > _CHECK_S:
                checked = waited
                self._check()
            if waited > self._timeout_s:
                limit = f"{self._timeout_s:g} s (runner.timeout_s)"
                raise RankLost(f"rank {rank} did not come within {limit}; rank {self.rank} cannot continue")

    def forward_signal(self, signum: int) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
