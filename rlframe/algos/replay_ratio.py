"""When updates of algorithms with replay are due, by the replay ratio."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from rlframe.core.ranks import current_ranks
from rlframe.updates.progress import Progress


class ReplayRatio:
    """Counts due updates exactly: each env_step after `learning_starts` adds `replay_ratio / batch_size` updates.

    An update learns from batch_size rows of each replay: one a rank, or one of all learners. env_steps count over all
    ranks, so with n replays an env_step adds 1 / n of that, and all ranks have the same updates due.
    If batches arrive faster than updates are made (AsyncRl), updates for more than `most_batches` are dropped and
    counted: made later all at once, they would learn from data that has hardly changed.
    """

    def __init__(self, replay_ratio: float, batch_size: int, learning_starts: int, progress: Progress) -> None:
        """Args:
            replay_ratio: rows learned from per row received.    batch_size: rows of an update from each replay.
            learning_starts: env_steps, over all ranks, before the first update.    progress: counts updates made.
        Raises:
            ValueError: a number out of range.
        """
        if replay_ratio <= 0 or batch_size < 1 or learning_starts < 0:
            raise ValueError(
                f"algo.replay_ratio={replay_ratio} must be above 0, algo.batch_size={batch_size} at least 1 and "
                f"algo.learning_starts={learning_starts} at least 0"
            )
        self.progress, self._counted = progress, progress.updates  # those that are taken from the pending ones
        self.ranks, self.ready = current_ranks(), False  # ready: every replay has rows to sample
        self.batch_size, self.learning_starts = batch_size * self.ranks.n_samplers, learning_starts
        rate = Fraction(replay_ratio).limit_denominator(10**6) / self.batch_size  # updates an env_step
        self.most_batches: float = 8
        self._share, self._whole = rate.as_integer_ratio()  # counts are integers, in units of 1 / _whole update
        self._pending = self._dropped = 0
        self._rows = 0  # learned from

    def updates_until(self, env_steps: int) -> int:
        """Whole updates due until then."""
        return self._share * max(env_steps - self.learning_starts, 0) // self._whole

    def receive(self, before: int, after: int) -> None:
        """Count a batch, given the env_steps before and after it."""
        self._count_updates()
        more = self._share * max(after - max(before, self.learning_starts), 0)
        if self.ready:  # before, updates were impossible, not too slow
            dropped = int(max(self._pending - self.most_batches * max(more, self._whole), 0))
            self._pending -= dropped
            self._dropped += dropped
        self._pending += more

    def due(self, n_rows: int = 1) -> int:
        """Whole updates due; 0 until every replay has rows to sample, and while the only one has none again.

        Args:
            n_rows: those in this rank's replay.
        """
        self._count_updates()
        due = self._pending // self._whole
        if due and not self.ready:
            self.ready = self.ranks.sum(int(n_rows > 0)) == self.ranks.n_samplers
        return due if self.ready and (n_rows or self.ranks.world_size > 1) else 0

    def _count_updates(self) -> None:
        """Those made since; one that was not due, of a run without a sampler, takes none of those that are."""
        made, self._counted = self.progress.updates - self._counted, self.progress.updates
        self._pending -= min(made * self._whole, self._pending)
        self._rows += made * self.batch_size

    def drop(self) -> None:
        """Drop all pending updates."""
        self._count_updates()
        self._dropped, self._pending = self._dropped + self._pending, 0

    @property
    def pending(self) -> Fraction:
        """Updates due and not made yet, with fraction."""
        self._count_updates()
        return Fraction(self._pending, self._whole)

    @property
    def dropped(self) -> Fraction:
        """Updates dropped."""
        return Fraction(self._dropped, self._whole)

    def counters(self) -> dict[str, float]:
        """For the log: rows learned from per env_step since `learning_starts`, and the updates dropped."""
        self._count_updates()
        dropped = {"replay/dropped_updates": float(self.dropped)} if self._dropped else {}
        env_steps = self.progress.env_steps - self.learning_starts
        return {"replay/ratio": self._rows / env_steps if env_steps > 0 else 0.0, **dropped}

    def state_dict(self) -> dict[str, list[int]]:
        """All counts as exact fractions."""
        counts = {"pending": self.pending, "dropped": self.dropped, "rows": self._rows}
        return {name: list(count.as_integer_ratio()) for name, count in counts.items()}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Continue from saved counts, once `progress` has its own."""
        self._counted = self.progress.updates
        self._pending, self._dropped = (int(Fraction(*state[name]) * self._whole) for name in ("pending", "dropped"))
        self._rows = state["rows"][0]
