"""Collective operations of several ranks: what all ways of exchanging share, and the way of torch.distributed."""

import contextlib
import json
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.core.ranks import RankLost, Ranks

_CAUSE_S = 5.0  # to find out why a rank died
_POLL_S = 0.02
_CPU = torch.device("cpu")


class ExchangingRanks(Ranks):
    """Several ranks. Values are exchanged as JSON and as plain arrays, so that nothing received is ever executed."""

    @abstractmethod
    def _sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor of this rank's own, which it may overwrite."""

    @abstractmethod
    def _gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks."""

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return self._sum(tensor.detach().clone())

    def average(self, tensors: Sequence[Tensor], weight: Tensor | float = 1.0) -> None:
        """One exchange: tensors and weight are packed into one bucket."""
        if not tensors:
            return
        one = torch.ones(1, dtype=tensors[0].dtype, device=tensors[0].device)
        bucket = self._sum(torch.cat([*(t.detach().reshape(-1) for t in tensors), one]) * weight)
        weights = bucket[-1]
        bucket /= torch.where(weights > 0, weights, 1.0)
        pieces = bucket[:-1].split([t.numel() for t in tensors])
        torch._foreach_copy_(list(tensors), [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])

    def stack(self, tensor: Tensor) -> Tensor:
        dense = tensor.detach().to(_CPU).contiguous()
        found = self._gather(dense.view(-1).view(torch.uint8).numpy().tobytes())
        each = [torch.frombuffer(bytearray(message), dtype=dense.dtype).view(dense.shape) for message in found]
        return torch.stack(each).to(tensor.device)

    def scatter(self, parts: Sequence[Sequence[np.ndarray]], like: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self.rank == 0:
            self._gather(b"".join(x.tobytes() for part in parts[1:] for x in part))
            return list(parts[0])
        message = np.frombuffer(bytearray(self._gather(b"")[0]), np.uint8)
        own = np.split(message, self.world_size - 1)[self.rank - 1]
        ends = np.cumsum([x.nbytes for x in like])
        pieces = np.split(own, ends[:-1])
        return [piece.view(x.dtype).reshape(x.shape) for piece, x in zip(pieces, like, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(message) for message in self._gather(json.dumps(value).encode())]


class TorchRanks(ExchangingRanks):
    """Ranks of a torch.distributed process group, on any machines: Gloo on the CPU, NCCL between GPUs."""

    def __init__(self, rank: int, world_size: int, timeout_s: float, on_gpus: bool) -> None:
        self.rank, self.world_size, self.n_samplers = rank, world_size, world_size
        self._timeout_s, self._on_gpus = timeout_s, on_gpus
        self._peers: list[list[Any]] = []  # host and process id
        self._peers = self.gather([socket.gethostname(), os.getpid()])

    def sum(self, number: int) -> int:
        return self._number(number, dist.ReduceOp.SUM)

    def max(self, number: int) -> int:
        return self._number(number, dist.ReduceOp.MAX)

    def _number(self, number: int, operation: Any) -> int:
        tensor = torch.tensor([number], dtype=torch.int64)
        with self._exchange():
            dist.all_reduce(tensor, operation)
        return int(tensor)

    def _sum(self, tensor: Tensor) -> Tensor:
        carried = tensor if self._on_gpus else tensor.to(_CPU)
        with self._exchange():
            dist.all_reduce(carried)
        return carried.to(tensor.device)

    def _gather(self, message: bytes) -> list[bytes]:
        n_bytes = self.max(len(message) + 8)
        own = np.zeros(n_bytes, np.uint8)  # its length, then the message
        own[:8] = np.frombuffer(len(message).to_bytes(8, "little"), np.uint8)
        own[8 : 8 + len(message)] = np.frombuffer(message, np.uint8)
        found = [torch.empty(n_bytes, dtype=torch.uint8) for _ in range(self.world_size)]
        with self._exchange():
            dist.all_gather(found, torch.from_numpy(own))
        received = [each.numpy().tobytes() for each in found]
        return [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in received]

    def forward_signal(self, signum: int) -> None:
        """Do nothing: whoever started the ranks sends signals to all."""

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(self._loss(error)) from error

    def _loss(self, error: RuntimeError) -> str:
        deadline = time.monotonic() + _CAUSE_S
        dead: list[str] = []
        while not dead and self._peers and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            dead = [
                f"rank {rank} (process {pid}) has died"
                for rank, (host, pid) in enumerate(self._peers)
                if host == socket.gethostname() and not is_running(pid)
            ]
        what = " and ".join(dead) or (
            f"another rank died, is unreachable, or exceeded {self._timeout_s:g} s ({first_line(error)})"
        )
        return f"{what}; rank {self.rank} cannot continue"


def first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]


def is_running(pid: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
