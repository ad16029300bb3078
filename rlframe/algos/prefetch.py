"""Prefetch: computes the loss of DQN's next update in a thread while the sampler steps one environment."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlframe.algos.base import AlgorithmWrapper, UpdateMetrics
from rlframe.core.types import Samples
from rlframe.replay import ReplayBuffer, Transitions

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Prefetched:
    batch: Transitions
    evaluated: Future[tuple[Tensor, ...]]
    undo: tuple[Callable[[], object], ...]  # restores the generators to their state before the draw


class Prefetch(AlgorithmWrapper):
    """Wraps an algorithm and computes the loss of its next update while the sampler collects.

    The networks do not change meanwhile, so the loss is the same as later, but the newest rows cannot be in its batch.
    A prefetched batch that is not used (no update is due, a snapshot is taken) is drawn again later, so a resumed run
    makes the same updates.
    """

    algo: Any  # an Algorithm with what `__init__` asks for

    def __init__(self, algo: Any, replay: ReplayBuffer[Transitions]) -> None:
        """`algo`: an Algorithm that learns from `replay` and splits `update` into draw, evaluate, descend and finish,
        and whose `learn` is Compiled.

        Its `draw` uses `algo.generator` and that of replay, as in DQN.
        """
        super().__init__(algo)
        self.replay = replay
        self._thread = OneThread()
        self._next: _Prefetched | None = None

    def prefetch(self) -> None:
        if torch.get_num_threads() < 2 or not self.progress.updates or not self.replay.n_rows:
            return
        if self.algo.learn.compiles:  # loss and step are one function
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
            self._next.evaluated.result()  # it uses the normaliser from before this batch
        self.algo.receive(samples)

    def updates_due(self) -> int:
        due = super().updates_due()
        if not due:
            self._discard()
        return due

    def update(self) -> UpdateMetrics:
        ready, self._next = self._next, None
        if ready is None:
            return self.algo.update()
        found = self.algo.descend(ready.batch, *ready.evaluated.result())
        return self.algo.finish(ready.batch, found)

    def state_dict(self) -> dict[str, Any]:
        self._discard()
        return super().state_dict()


class OneThread:
    """A thread that computes with one torch thread, in its caller's context; starts at its first task."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Run the function in the thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "prefetch")
            n = torch.get_num_threads()
            self._pool.submit(_limit_to_one_thread).result()
            torch.set_num_threads(n)
        return self._pool.submit(contextvars.copy_context().run, function, *arguments)


def _limit_to_one_thread() -> None:
    """Set one torch thread for this thread; this also sets the default of later threads."""
    torch.get_num_threads()  # the first call in a thread adopts the default, so call it before setting
    torch.set_num_threads(1)
