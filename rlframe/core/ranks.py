"""Ranks: the processes that train one agent together, each on its own samples. Usually there is only one.

`system.shared_ranks` and `system.collectives` implement them; `current_ranks` is used wherever ranks must agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np

from rlframe.core.context import set_within
from rlframe.core.errors import ReadableError


class RankLost(ReadableError):
    """A rank has died or missed its deadline, and the others cannot continue."""


class RanksDiffer(ReadableError):
    """A value that must be equal on all ranks differs."""


class Ranks(ABC):
    """This process's rank and its collective operations, which all ranks must call in the same order.

    They raise RankLost if another rank died or missed the deadline.
    """

    rank: int  # from 0
    world_size: int
    n_samplers: int  # ranks that have environments, and a replay if there is one: 1 (rank 0) or world_size

    @abstractmethod
    def sum(self, number: int) -> int:
        """Sum of a number over all ranks."""

    @abstractmethod
    def max(self, number: int) -> int:
        """Maximum of a number over all ranks."""

    @abstractmethod
    def sum_tensor(self, tensor: Any) -> Any:
        """Elementwise sum of a tensor over all ranks."""

    @abstractmethod
    def stack(self, tensor: Any) -> Any:
        """The tensors of all ranks, which have equal shapes, in rank order: [world_size, ...]."""

    @abstractmethod
    def average(self, tensors: Sequence[Any], weight: Any = 1.0) -> None:
        """Replace tensors in place by their mean over ranks, weighted by `weight`: a number or tensor [] per rank."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order, on every rank. JSON must hold them; its tuples come back as lists."""

    @abstractmethod
    def scatter(self, parts: Sequence[Sequence[np.ndarray]], like: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays parts[rank] of rank 0's `parts`; those of the other ranks are not looked at.

        `like`: arrays with the shapes and dtypes that each rank receives, equal on all.
        """

    @abstractmethod
    def forward_signal(self, signum: int) -> None:
        """Send a signal on to ranks that are children of this process."""

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0 (see `gather`)."""
        return self.gather(value if self.rank == 0 else None)[0]

    def all(self, condition: bool) -> bool:
        """Whether the condition holds on all ranks."""
        return self.sum(int(condition)) == self.world_size


class SingleRank(Ranks):
    """The only rank: every collective operation returns its input."""

    rank, world_size, n_samplers = 0, 1, 1

    def sum(self, number: int) -> int:
        return number

    def max(self, number: int) -> int:
        return number

    def sum_tensor(self, tensor: Any) -> Any:
        return tensor

    def stack(self, tensor: Any) -> Any:
        return tensor[None]

    def average(self, tensors: Sequence[Any], weight: Any = 1.0) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def scatter(self, parts: Sequence[Sequence[np.ndarray]], like: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(parts[0])

    def forward_signal(self, signum: int) -> None:
        """Do nothing: there are no other ranks."""


class SamplerRank(SingleRank):
    """One of the processes that sample for one learner: its environments come after those of the ones before it."""

    def __init__(self, rank: int, n_samplers: int) -> None:
        self.rank, self.n_samplers = rank, n_samplers


_current: ContextVar[Ranks] = ContextVar("rlframe_ranks")


def current_ranks() -> Ranks:
    """The ranks that this process has joined; a SingleRank if none."""
    return _current.get(SingleRank())


def use_ranks(ranks: Ranks) -> AbstractContextManager[None]:
    """Make these the current ranks inside the `with` block."""
    return set_within(_current, ranks)


def first_env_of_rank(n: int) -> int:
    """Index over all ranks of this rank's first environment, if every rank has n."""
    return current_ranks().rank * n
