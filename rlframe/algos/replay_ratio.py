"""Replay ratio: how many updates the samples received so far call for."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torch import Tensor

from rlframe.algos.base import Progress
from rlframe.core.ranks import current_ranks

_MOST_BATCHES = 8  # that UpdateDebt carries on, in what the newest of them calls for


PRIORITY_EPSILON = 1e-6  # added to priorities, so that no row is never drawn again (Schaul et al. 2016, section 3.3)


class UpdateDebt:
    """Updates owed for env_steps: each calls for `replay_ratio / batch_size` of one. Fractions add up, none is lost.

    Counting begins once `learn_from` env_steps have been received: what came before is learned from, but not owed for.
    An update takes batch_size rows on every rank, each from its own replay. Since env_steps count over all ranks, each
    then calls for 1 / world_size of that, and all ranks owe the same, whichever of them sampled it.
    Where batches come faster than updates are made, for good (AsyncRl), what more than a few batches call for is given
    up, and counted: a debt without end would only be paid at once, some day, on data that have hardly changed.
    """

    def __init__(self, replay_ratio: float, batch_size: int, learn_from: int) -> None:
        """Args:
            replay_ratio: rows learned from for each row received.    batch_size: rows of an update, of each rank.
            learn_from: env_steps, over all ranks, before the first update.
        Raises:
            ValueError: a number out of range.
        """
        if replay_ratio <= 0 or batch_size < 1 or learn_from < 0:
            raise ValueError(
                f"algo.replay_ratio={replay_ratio} must be above 0, algo.batch_size={batch_size} at least 1 and "
                f"algo.learn_from={learn_from} at least 0"
            )
        self.ranks, self.ready = current_ranks(), False  # ready: every rank has something to learn from
        self.batch_size, self.learn_from = batch_size * self.ranks.world_size, learn_from
        rate = Fraction(replay_ratio).limit_denominator(10**6) / self.batch_size  # updates an env_step
        self._share, self._whole = rate.as_integer_ratio()  # all is counted in integers: parts of which _whole are one
        self._owed = self._forgone = 0

    def receive(self, before: int, after: int) -> None:
        """Count the env_steps of a batch: so many had come before it, so many after it."""
        more = self._share * max(after - max(before, self.learn_from), 0)
        if self.ready:  # else it is not for want of time that nothing was paid
            given_up = max(self._owed - _MOST_BATCHES * max(more, self._whole), 0)
            self._owed -= given_up
            self._forgone += given_up
        self._owed += more

    def due(self, n_choices: int = 1) -> int:
        """Whole updates owed; none before every rank has rows to choose from (`n_choices` of this one's replay)."""
        owed = self._owed // self._whole
        if owed and not self.ready:
            self.ready = self.ranks.every(n_choices > 0)
        return owed if self.ready else 0

    def pay(self) -> None:
        """An update was made."""
        self._owed -= self._whole

    def forgive(self) -> None:
        """Give up all that is owed."""
        self._forgone, self._owed = self._forgone + self._owed, 0

    @property
    def owed(self) -> Fraction:
        """Updates owed."""
        return Fraction(self._owed, self._whole)

    @property
    def forgone(self) -> Fraction:
        """Updates given up."""
        return Fraction(self._forgone, self._whole)

    def reached(self, progress: Progress) -> float:
        """Rows learned from so far for each env_step since learning began; 0 before."""
        counted = progress.env_steps - self.learn_from
        return progress.updates * self.batch_size / counted if counted > 0 else 0.0

    def counters(self, progress: Progress) -> dict[str, float]:
        """The ratio reached, and what was given up, for the log."""
        forgone = {"replay/forgone": float(self.forgone)} if self._forgone else {}
        return {"replay/ratio": self.reached(progress), **forgone}

    def state_dict(self) -> dict[str, list[int]]:
        """What is owed and what was given up, exactly."""
        return {"owed": list(self.owed.as_integer_ratio()), "forgone": list(self.forgone.as_integer_ratio())}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Go on from a saved debt."""
        self._owed, self._forgone = (int(Fraction(*state[name]) * self._whole) for name in ("owed", "forgone"))


def priorities(error: Tensor) -> Tensor:
    """What replay is to choose by, from the size of errors; the least for rows whose error is NaN or Inf."""
    return error.nan_to_num(nan=0.0, posinf=0.0) + PRIORITY_EPSILON
