"""Steppers drive environments over the rows of a batch: here, in this process (see `remote` for worker processes)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlframe.envs.base import Envs
from rlframe.envs.rows import Rows


class Diagnostics(NamedTuple):
    """What the episode of one environment that ended at step t has reported (see Envs.pop_diagnostics)."""

    t: int
    env: int
    means: dict[str, float]


class Cut(NamedTuple):
    """Environments lo to hi - 1 began anew at step t, because their process died: no trajectory comes of it."""

    t: int
    lo: int
    hi: int


class Events(NamedTuple):
    """What happened in a batch beside its rows."""

    diagnostics: list[Diagnostics]
    cuts: list[Cut]


class Stepper(ABC):
    """A group of environments, columns lo to hi - 1 of a batch."""

    lo: int
    hi: int

    @abstractmethod
    def begin(self, t: int) -> None:
        """Start step t, whose actions are written."""

    @abstractmethod
    def finish(self, t: int) -> None:
        """Wait until step t has been written.

        Raises:
            EnvError: an environment failed.
        """

    @abstractmethod
    def reset(self, round_: int = 0) -> None:
        """Begin the episodes of a round everywhere (see `Envs.reset`); writes the last row of the batch."""

    @abstractmethod
    def state(self) -> list[Any]:
        """Of each environment, for `restore`; between batches."""

    @abstractmethod
    def restore(self, states: Sequence[Any]) -> list[str]:
        """Bring fresh environments to where those were whose observations the last row has (see `Envs.restore`)."""

    @abstractmethod
    def events(self) -> Events:
        """What happened since the last call; called between batches."""

    @abstractmethod
    def tell_life(self, life: np.ndarray) -> None:
        """From now on, change `life[0]` with each step, or while others are watched who step."""


class LocalStepper(Stepper):
    """Environments of this process. `progress` (one number, perhaps shared) tells how many steps are finished."""

    def __init__(self, envs: Envs, rows: Rows, lo: int, progress: np.ndarray) -> None:
        """Args:
        rows: of these environments only.    lo: the index of the first of them in the whole batch.
        """
        self.envs, self.rows, self.lo, self.hi, self.progress = envs, rows, lo, lo + envs.n, progress
        self._actions, self._steps = rows.actions(), rows.steps()
        self._diagnostics: list[Diagnostics] = []

    def begin(self, t: int) -> None:
        """Nothing: all is done by `finish`."""

    def finish(self, t: int) -> None:
        step = self._steps[t]
        self.envs.step(self._actions[t], step)
        if np.count_nonzero(step.ended):  # a fifth of the time of any()
            for env in np.flatnonzero(step.ended):
                means = self.envs.pop_diagnostics(int(env))
                if means:
                    self._diagnostics.append(Diagnostics(t, self.lo + int(env), means))
        self.progress[0] = t + 1

    def reset(self, round_: int = 0) -> None:
        self.envs.reset(self._steps[-1], round_)

    def state(self) -> list[Any]:
        return self.envs.state()

    def restore(self, states: Sequence[Any]) -> list[str]:
        return self.envs.restore(states, self._steps[-1], self._tick)

    def _tick(self) -> None:
        self.progress[0] += 1

    def cut(self, t: int) -> None:
        """Begin new episodes at step t, in place of a process that died in it, and mark the row as a reset's.

        The row before is where the cut episode ended for learning: it was truncated, unless it ended by itself.
        """
        rows, step = self.rows, self._steps[t]
        self.envs.reset(step)
        for array in (step.reward, step.terminated, step.truncated, step.valid, step.score, step.ended):
            array[...] = 0
        if t:
            rows.truncated[t - 1] |= rows.valid[t - 1] & ~rows.terminated[t - 1]

    @property
    def n_notes(self) -> int:
        """How many diagnostics `events` would give."""
        return len(self._diagnostics)

    def events(self) -> Events:
        diagnostics, self._diagnostics = self._diagnostics, []
        return Events(diagnostics, [])

    def tell_life(self, life: np.ndarray) -> None:
        self.progress = life
