"""Prefetch: the loss of the next update is computed in a thread while the sampler steps one environment."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlframe.algos.base import Algorithm, Progress, UpdateMetrics
from rlframe.core.types import Samples
from rlframe.replay import ReplayBuffer, Transitions

Result = TypeVar("Result")


class TwoPhase(Protocol):
    """What an algorithm whose updates can be prefetched adds to the three verbs, as DQN does."""

    progress: Progress
    generator: torch.Generator  # drawn from by `draw`, beside replay's

    def draw(self, env_steps: int) -> Transitions: ...
    def evaluate(self, batch: Transitions) -> tuple[Tensor, ...]: ...
    def descend(self, batch: Transitions, *evaluated: Tensor) -> dict[str, Tensor]: ...
    def finish(self, batch: Transitions, found: Mapping[str, Tensor]) -> UpdateMetrics: ...


@dataclass(frozen=True)
class _Prefetched:
    batch: Transitions
    evaluated: Future[tuple[Tensor, ...]]
    undo: tuple[Callable[[], object], ...]  # each puts one generator back to where it was before the batch was drawn


class Prefetch(Algorithm):
    """An algorithm, the loss of whose next update is computed while the sampler collects.

    The networks do not change meanwhile, so the result is that of computing it later; only the newest rows cannot be in
    its batch. What was prefetched and is not used - no update is due, a snapshot is taken - is drawn again later: a
    resumed run makes the same updates.
    """

    def __init__(self, algo: Any, replay: ReplayBuffer) -> None:
        """`algo`: an Algorithm that is TwoPhase and learns from `replay`."""
        self.algo, self.replay, self.progress = algo, replay, algo.progress
        self._thread = OneThread()
        self._next: _Prefetched | None = None

    def prefetch(self) -> None:
        if torch.get_num_threads() < 2 or not self.progress.updates or not self.replay.n_rows:
            return
        self._discard()
        generator = self.algo.generator
        state = generator.get_state()
        undo = self.replay.mark(), lambda: generator.set_state(state)
        batch = self.algo.draw(self.progress.env_steps)
        self._next = _Prefetched(batch, self._thread.start(self.algo.evaluate, batch), undo)

    def _discard(self) -> None:
        if self._next:
            self._next.evaluated.result()  # the thread reads the networks until then
            for undo in self._next.undo:
                undo()
            self._next = None

    def receive(self, samples: Samples) -> None:
        if self._next:
            self._next.evaluated.result()  # by the observations' statistics from before this batch
        self.algo.receive(samples)

    def updates_due(self) -> int:
        due: int = self.algo.updates_due()
        if not due:
            self._discard()
        return due

    def update(self) -> UpdateMetrics:
        ready, self._next = self._next, None
        if ready is None:
            return self.algo.update()
        found = self.algo.descend(ready.batch, *ready.evaluated.result())
        return self.algo.finish(ready.batch, found)

    def drop_updates(self) -> None:
        self.algo.drop_updates()

    def facts(self) -> dict[str, str]:
        return self.algo.facts()

    def counters(self) -> dict[str, float]:
        return self.algo.counters()

    def state_dict(self) -> dict[str, Any]:
        self._discard()
        return self.algo.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.algo.load_state_dict(state)


class OneThread:
    """A thread that computes with one torch thread, in the context of its caller; it starts at its first task."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """The result will be that of `Future.result`, which raises what the function raises."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "prefetch")
            n = torch.get_num_threads()
            self._pool.submit(_limit_to_one_thread).result()
            torch.set_num_threads(n)
        return self._pool.submit(contextvars.copy_context().run, function, *arguments)


def _limit_to_one_thread() -> None:
    """Of torch's threads in this thread; what is set also holds for threads to come."""
    torch.get_num_threads()  # a thread's first look would take over what another has set meanwhile
    torch.set_num_threads(1)
