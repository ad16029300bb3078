"""Ranks: the processes that train one agent together, each on samples of its own; usually a single one, alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from rlframe.core.errors import ReadableError

_T = TypeVar("_T")


class RankLost(ReadableError):
    """A rank is gone, or gave no sign in time, and the others cannot go on without it."""


class RanksDiffer(ReadableError):
    """What must be equal on all ranks is not."""


class Ranks(ABC):
    """This process's place among the ranks, and what they do together. All must call the same, in the same order.

    Raises (every method that exchanges something):
        RankLost: a rank is gone, or did not come within the deadline.
    """

    rank: int  # from 0
    world_size: int

    @abstractmethod
    def sum(self, number: int) -> int:
        """Of the numbers of all ranks."""

    @abstractmethod
    def largest(self, number: int) -> int:
        """Of the numbers of all ranks."""

    @abstractmethod
    def total(self, tensor: Any) -> Any:
        """The sum of a tensor over ranks, element by element."""

    @abstractmethod
    def stack(self, tensor: Any) -> Any:
        """The tensors of all ranks, of one shape, in their order: [world_size, ...]."""

    @abstractmethod
    def average(self, tensors: Sequence[Any], weight: Any = 1.0) -> None:
        """Replace tensors by their mean over ranks, each rank weighted by its `weight` (a number or 0-d tensor)."""

    @abstractmethod
    def gather(self, value: _T) -> list[_T]:
        """The picklable values of all ranks, in their order; on every rank."""

    @abstractmethod
    def broadcast(self, value: _T) -> _T:
        """The value that rank 0 has."""

    @abstractmethod
    def pass_on(self, signum: int) -> None:
        """Send a signal that came to this process to the ranks that are its children and would not hear of it."""

    def every(self, claim: bool) -> bool:
        """Whether it holds on all ranks."""
        return self.sum(int(claim)) == self.world_size


class Alone(Ranks):
    """A single rank: whatever all ranks do together is done."""

    rank, world_size = 0, 1

    def sum(self, number: int) -> int:
        return number

    def largest(self, number: int) -> int:
        return number

    def total(self, tensor: Any) -> Any:
        return tensor

    def stack(self, tensor: Any) -> Any:
        return tensor[None]

    def average(self, tensors: Sequence[Any], weight: Any = 1.0) -> None:
        """Nothing: the mean of one."""

    def gather(self, value: _T) -> list[_T]:
        return [value]

    def broadcast(self, value: _T) -> _T:
        return value

    def pass_on(self, signum: int) -> None:
        """There is nobody."""


_current: ContextVar[Ranks] = ContextVar("rlframe_ranks")


def current_ranks() -> Ranks:
    """The ranks that this process has joined, or none but itself."""
    return _current.get(Alone())


@contextmanager
def as_current(ranks: Ranks) -> Iterator[None]:
    """Inside, these are the current ranks: what is built here counts, draws and averages as one of them."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


def first_of_rank(n: int) -> int:
    """The index, over all ranks, of the first of this rank's environments, where every rank has n."""
    return current_ranks().rank * n
