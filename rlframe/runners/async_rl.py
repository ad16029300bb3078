"""AsyncRl: a sampler in a process of its own collects ahead while this one learns; scored as by MinibatchRlEval."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.config import choice, count, option
from rlframe.core.errors import ConfigError
from rlframe.runners.base import NO_LIMITS, Limits, Runner, RunnerConfig
from rlframe.samplers import BackgroundSampler, Evaluator
from rlframe.system.process import START_METHODS
from rlframe.system.supervision import Supervision


@chz.chz
class Config(RunnerConfig):
    """How long to train, how far sampling may run ahead, and what happens when its process dies."""

    n_slots: int = count(2, "batches that sampling may be ahead, the one that is learned from included")
    sampler_waits: bool = option(
        False, "replay_ratio holds exactly, and sampling waits; else it is the most, and fast sampling goes beyond it"
    )
    learner_cores: int = count(0, "of the run's cores, for learning; 0: one if it learns on a GPU, else half of them")
    timeout_s: float = option(120.0, "seconds without a sign of life of the sampler's process, before it is killed")
    max_restarts: int = count(10, "sampler processes replaced within an hour, beyond which the run ends")
    start_method: str = choice("forkserver", START_METHODS, "how the process starts")

    @chz.validate
    def _check(self) -> None:
        if self.n_slots < 1 or self.learner_cores < 0:
            raise ConfigError(
                f"runner.n_slots={self.n_slots} must be at least 1, "
                f"runner.learner_cores={self.learner_cores} at least 0"
            )
        if not self.timeout_s > 0 or self.max_restarts < 0:
            raise ConfigError(
                f"runner.timeout_s={self.timeout_s} must be above 0, runner.max_restarts={self.max_restarts} at least 0"
            )

    def supervision(self) -> Supervision:
        """What happens to the sampler's process if it dies or hangs."""
        return Supervision(self.timeout_s, self.max_restarts, self.start_method, "sampler")

    def make_runner(
        self, sampler: BackgroundSampler, agent: Agent, algo: Algorithm, make_evaluator: Callable[[], Evaluator]
    ) -> AsyncRl:
        how = make_evaluator(), self.sampler_waits, self.limits()
        return AsyncRl(sampler, agent, algo, self.n_steps, self.log_interval_steps, *how)


class AsyncRl(Runner):
    """One update at a time; batches are received when none is due, and between updates as they come.

    So an algorithm that learns from the batch itself learns each once and in order, and one with replay makes as many
    updates as it owes, if it has the time. With `sampler_waits` nothing is received while an update is due: the ring
    fills, and sampling is held back until all is paid. What is in the ring at the end is not learned from.
    """

    score_name = "eval/return_mean"
    sampler: BackgroundSampler

    def __init__(
        self,
        sampler: BackgroundSampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int,
        evaluator: Evaluator,
        sampler_waits: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> None:
        if not isinstance(sampler, BackgroundSampler):
            raise TypeError(
                f"AsyncRl needs a BackgroundSampler, whose process is its own, got {type(sampler).__name__}"
            )
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps, limits)
        self.evaluator, self.sampler_waits = evaluator, sampler_waits
        self.staleness = 0  # the most in this interval
        self._posted: deque[tuple[int, int]] = deque()  # versions of the parameters, and the updates they had
        self._news = True  # for the sampler: a batch was received since the last posting

    def iterate(self) -> None:
        """A batch, if no update is due; one update; the batches that have come meanwhile."""
        self.sampler.check_process()
        if not self.algo.updates_due():
            self._receive()
        self._pay()
        while not self.sampler_waits and self.algo.updates_due() and self.sampler.ready and not self._at_end:
            self._receive()
        while self._at_end and self.algo.updates_due() and not self.stop:  # what is owed in the end is paid
            self._pay()
        self.half_done = self._at_end and bool(self.algo.updates_due())
        self.follow()

    @property
    def _at_end(self) -> bool:
        return self.env_steps >= self.n_steps

    def _receive(self) -> None:
        with self.clock("sampling"):
            samples = self.sampler.collect()
        staleness = self.algo.progress.updates - self._updates_of(self.sampler.version)
        self.staleness = max(self.staleness, staleness)
        self.metrics.add({"async/staleness_mean": staleness, "async/queue_mean": self.sampler.queue_length})
        with self.clock("learning"):
            self.algo.receive(samples)
        self._news = True

    def _updates_of(self, version: int) -> int:
        """The updates that had been made when these parameters were posted. Older versions do not come again."""
        if not self._posted:
            self._posted.append((0, self.algo.progress.updates))
        while len(self._posted) > 1 and self._posted[1][0] <= version:
            self._posted.popleft()
        return self._posted[0][1]

    def _pay(self) -> None:
        """An update, if one is due; the parameters handed on after the first since a batch came, and before waiting.

        Once for each of many updates would gain little: the sampler looks at the beginning of a batch.
        """
        if self.algo.updates_due():
            with self.clock("learning"):
                self.update()
        if self._news or not self.algo.updates_due():
            self._news = False
            self.sampler.refresh(self.agent)
            self._posted.append((self.sampler.posted_version, self.algo.progress.updates))

    def counters(self) -> dict[str, float]:
        """How stale the stalest batch of the interval was."""
        staleness, self.staleness = self.staleness, 0
        return {"async/staleness_max": staleness}

    def evaluate(self) -> dict[str, float]:
        """Mean return, its spread and the episodes' length; the sampler fills its slots meanwhile, then waits."""
        return self.evaluator.score(self.env_steps, self.stop.__bool__)

    def close(self) -> None:
        """Close the sampler and the evaluator."""
        self.sampler.close()
        self.evaluator.close()
