"""Trainings that would never end, and those that end without having learned: errors that say where to look."""

from __future__ import annotations

from typing import Any

from rlframe.core.errors import ReadableError

MOST_IDLE = 10_000  # iterations in a row


class NothingLearned(ReadableError):
    """A training came to its end without one update."""

    def __init__(self, env_steps: int) -> None:
        super().__init__(
            f"nothing was learned in {env_steps:,} env_steps: no update was due, or replay never had rows to learn "
            f"from; look at algo.learning_starts, and at the lengths of batches, sequences and algo.n_step (your own "
            f"algorithm counts its updates: self.progress.updates += 1)"
        )


class Idle(ReadableError):
    """A training that stands still would never end."""


class Standstill:
    """Counts iterations of a runner in a row that had neither env steps nor updates, or a batch without an env step."""

    def __init__(self) -> None:
        self._n, self._before = 0, (-1, -1)

    def check(self, runner: Any) -> None:
        """Call it after each iteration; raises Idle once there are MOST_IDLE of them."""
        now = runner.now, runner.updates
        self._n = self._n + 1 if runner.empty_batch or now == self._before else 0
        self._before, runner.empty_batch = now, False
        if self._n >= MOST_IDLE:
            where = f"iterate of {type(runner).__name__} and collect of {type(runner.sampler).__name__}"
            raise Idle(f"{self._n:,} iterations in a row had no env step; look at {where}")
