"""MinibatchRl: collect a batch, learn from it, repeat, in one process; with an evaluator, runner=minibatch_rl_eval."""

from __future__ import annotations

import chz

from rlframe.runners.base import Runner
from rlframe.runners.config import RunnerConfig

_CHECK_UPDATES = 8  # updates between checks for stop requests, which ranks exchange


class MinibatchRl(Runner):
    """Collects a batch, makes all updates that are due, and repeats.

    With an evaluator it evaluates before training, every eval.interval_steps and at the end; their time does not count
    for steps/s.
    """

    def iterate(self) -> None:
        if not self.updates_left:
            with self.log.timers("sampling"):
                batches = self.collect()
            self.receive(batches)
        with self.log.timers("learning"):
            self.updates_left = not self._learn()
        if not self.updates_left:
            self.refresh()

    def _learn(self) -> bool:
        """Make the updates that are due; False if a stop request leaves some of many for later.

        Learners that hold a batch come first, and none is stopped before: snapshots have no batches.
        """
        n = 0
        for learner in sorted(self.learners.values(), key=lambda each: each.algo.can_receive()):
            while learner.algo.updates_due():
                if n and n % _CHECK_UPDATES == 0 and self.learners.can_receive() and self.stop_requested():
                    return False
                self.update(learner)
                n += 1
        return True


@chz.chz
class MinibatchRlConfig(RunnerConfig):
    """MinibatchRl: collect a batch, learn from it, repeat, in one process, without evaluation."""

    runner_class = MinibatchRl
    becomes_sync_rl = True

    def evaluates(self, n_episodes: int) -> bool:
        return False


@chz.chz
class MinibatchRlEvalConfig(RunnerConfig):
    """MinibatchRl with evaluation before training, now and then, and at the end; the default."""

    runner_class = MinibatchRl
    becomes_sync_rl = True
