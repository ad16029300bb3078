"""AsyncRl: a sampler in its own process collects batches ahead while this process learns; `runner=async_rl`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.config import choice, count, option, positive
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.runners.base import Runner
from rlframe.runners.callbacks import Callback
from rlframe.runners.config import NO_AFFINITY, NO_LIMITS, Limits, RunnerConfig
from rlframe.samplers import BackgroundSampler
from rlframe.system.affinity import Affinity
from rlframe.system.process import START_METHODS
from rlframe.system.supervision import Supervision


@chz.chz
class Config(RunnerConfig):
    """How long to train, how far sampling may run ahead; eval.n_episodes=0: no evaluation."""

    samples_in_background = True

    n_slots: int = count(2, "batches that sampling may be ahead, including the one being learned from", high=4096)
    sampler_waits: bool = option(
        False, "true: sampling waits for updates, and replay_ratio is exact; false: replay_ratio is an upper bound"
    )
    learner_cores: int = count(0, "cores of the run for learning; 0: one if it learns on a GPU, else half of them")
    timeout_s: float = positive(120.0, "seconds without progress before the sampler's process is killed and replaced")
    max_restarts: int = count(10, "replacements of the sampler's process within an hour before the run ends", low=0)
    start_method: str = choice("forkserver", START_METHODS, "how the process starts")

    def supervision(self) -> Supervision:
        return Supervision(self.timeout_s, self.max_restarts, self.start_method, "sampler")

    def make_runner(
        self,
        sampler: BackgroundSampler,
        agent: Agent,
        algo: Algorithm,
        evaluator: BaseEvaluator | None,
        callbacks: Sequence[Callback],
        stop: str = "",
    ) -> AsyncRl:
        steps = self.n_steps, self.log_interval_steps
        return AsyncRl(sampler, agent, algo, *steps, evaluator, self.sampler_waits, self.limits(stop), callbacks)


class AsyncRl(Runner):
    """Makes one update at a time; receives batches when no update is due, and between updates as they arrive.

    An algorithm that learns from the batch itself learns from each batch once, in order. One with replay makes as many
    updates as its replay ratio asks for, if there is time. With `sampler_waits` no batch is received while an update is
    due: the ring of batches fills, and sampling waits. Batches in the ring at the end are not learned from.
    While an evaluation runs, the sampler fills its slots and then waits.
    """

    sampler: BackgroundSampler

    def __init__(
        self,
        sampler: BackgroundSampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int = 10_000,
        evaluator: BaseEvaluator | None = None,
        sampler_waits: bool = False,
        limits: Limits = NO_LIMITS,
        callbacks: Sequence[Callback] = (),
        affinity: Affinity | Mapping[str, Any] = NO_AFFINITY,
    ) -> None:
        if not isinstance(sampler, BackgroundSampler):
            raise TypeError(
                f"AsyncRl needs a BackgroundSampler, which has its own process, got {type(sampler).__name__}"
            )
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps, evaluator, limits, callbacks, affinity)
        self.sampler_waits = sampler_waits
        self.staleness = 0  # the largest of this interval
        self._posted: deque[tuple[int, int]] = deque()  # version of posted parameters, updates made by then
        self._received = True  # a batch was received since parameters were last posted

    def iterate(self) -> None:
        self.sampler.check_process()
        if not self.algo.updates_due():
            self._receive()
        self._learn_and_post()
        while not self.sampler_waits and self.algo.updates_due() and self.sampler.ready and not self._at_end:
            self._receive()
        while self._at_end and self.algo.updates_due():  # the last batches are learned from too
            if self.stop or self.callbacks.stop_reason:
                break
            self._learn_and_post()
        self.updates_left = self._at_end and bool(self.algo.updates_due())
        self.record_episodes()

    @property
    def _at_end(self) -> bool:
        return self.now >= self.n_steps

    def _receive(self) -> None:
        with self.log.timers("sampling"):
            samples = self.rewards(self.sampler.collect())
        staleness = self.algo.progress.updates - self._updates_of(self.sampler.version)
        self.staleness = max(self.staleness, staleness)
        self.log.metrics.add({"async/staleness_mean": staleness, "async/queue_mean": self.sampler.queue_length})
        with self.log.timers("learning"):
            self.algo.receive(samples)
        self._received = True
        self.received(samples)

    def _updates_of(self, version: int) -> int:
        """The updates made before this version was posted; forgets older versions."""
        if not self._posted:
            self._posted.append((0, self.algo.progress.updates))
        while len(self._posted) > 1 and self._posted[1][0] <= version:
            self._posted.popleft()
        return self._posted[0][1]

    def _learn_and_post(self) -> None:
        """Make an update if one is due; post parameters after the first update since a batch, and before waiting.

        Posting after every update gains little: the sampler reads parameters at the start of a batch.
        """
        if self.algo.updates_due():
            with self.log.timers("learning"):
                self.update()
        if self._received or not self.algo.updates_due():
            self._received = False
            self.sampler.refresh(self.agent)
            self._posted.append((self.sampler.posted_version, self.algo.progress.updates))

    def options(self) -> dict[str, Any]:
        return {"n_slots": len(self.sampler.ring.slots), "sampler_waits": self.sampler_waits}

    def counters(self) -> dict[str, float]:
        staleness, self.staleness = self.staleness, 0
        return {"async/staleness_max": staleness}
