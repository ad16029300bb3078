"""MinibatchRl: collect a batch, learn from it, repeat, in one process; `runner=minibatch_rl`, without evaluation."""

from __future__ import annotations

import chz

from rlframe.runners.base import Runner
from rlframe.runners.config import RunnerConfig

_CHECK_UPDATES = 8  # updates between checks for stop requests, which ranks exchange


class MinibatchRl(Runner):
    """Collects a batch, makes all updates that are due, and repeats."""

    def iterate(self) -> None:
        if not self.updates_left:
            with self.log.timers("sampling"):
                self.algo.prefetch()
                samples = self.rewards(self.sampler.collect())
            with self.log.timers("learning"):
                self.algo.receive(samples)
            self.received(samples)
            self.record_episodes()
        with self.log.timers("learning"):
            self.updates_left = not self._learn()
        if not self.updates_left:
            self.sampler.refresh(self.agent)

    def _learn(self) -> bool:
        """Make the updates that are due; False if a stop request leaves some of many for later."""
        n = 0
        while self.algo.updates_due():
            if n and n % _CHECK_UPDATES == 0 and self.stop_requested():
                return False
            self.update()
            n += 1
        return True


@chz.chz
class Config(RunnerConfig):
    """How long to train and how often to log; the score is the mean return of the last 100 training episodes."""

    runner_class = MinibatchRl
    becomes_sync_rl = True

    def evaluates(self, n_episodes: int) -> bool:
        return False
