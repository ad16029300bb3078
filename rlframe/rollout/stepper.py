"""Steppers drive environments over the rows of a batch: in this process, or in workers one time step at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rlframe.core import spaces
from rlframe.core.struct import write
from rlframe.envs.base import Envs
from rlframe.rollout.buffer import Rows, empty_rows
from rlframe.rollout.env_pool import EnvPool, Job, Site, Worker
from rlframe.system.shared import Shared
from rlframe.system.worker_main import NOTES, PROGRESS, Handler


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


STEP, RESET, CUT, EVENTS, STATE, RESTORE = range(6)  # commands


def step_rows(site: Site) -> Handler:
    """The program of a worker that only steps: its environments write their columns of the shared rows."""
    rows: Rows = site.memory[0]
    words = site.parent.words
    stepper = LocalStepper(site.envs, rows.columns(site.lo, site.lo + site.envs.n), site.lo, words[PROGRESS:])
    if not site.takes_over:
        stepper.reset()

    def handle(command: int, t: int) -> Any:
        if command == STEP:
            stepper.finish(t)
            words[NOTES] = stepper.n_notes
        elif command == RESET:
            stepper.reset(t)
        elif command == CUT:
            stepper.cut(t)
        elif command == STATE:
            return stepper.state()
        elif command == RESTORE:
            return stepper.restore(site.parent.receive())
        else:
            words[NOTES] = 0
            return stepper.events().diagnostics
        return None

    return handle


class RemoteStepper(Stepper):
    """Some workers of `EnvPool`, side by side, that step their columns of shared rows at our word."""

    def __init__(self, workers: EnvPool, group: list[Worker]) -> None:
        self.workers, self.group = workers, group
        self.lo, self.hi = group[0].lo, group[-1].hi
        self._cuts: list[Cut] = []

    def begin(self, t: int) -> None:
        for place in self.group:
            place.child.begin(CUT if place.took_over else STEP, t)

    def finish(self, t: int) -> None:
        for place, answer in zip(self.group, self.workers.finish(self.group), strict=True):
            if not answer.done:
                self.workers.call(place, CUT, t)
            if place.took_over:
                self._cuts.append(Cut(t, place.lo, place.hi))
                place.took_over = False

    def reset(self, round_: int = 0) -> None:
        for place in self.group:
            place.child.begin(RESET, round_)
        for place, answer in zip(self.group, self.workers.finish(self.group), strict=True):
            if not answer.done:
                self.workers.call(place, RESET, round_)
            place.took_over = False

    def state(self) -> list[Any]:
        return [state for place in self.group for state in self.workers.states(place, STATE)]

    def restore(self, states: Sequence[Any]) -> list[str]:
        reasons: list[str] = []
        for place in self.group:
            own = list(states[place.lo - self.lo : place.hi - self.lo])
            reasons += self.workers.call(place, RESTORE, values=[own])
        return reasons

    def events(self) -> Events:
        diagnostics: list[Diagnostics] = []
        for place in self.group:
            if place.child.n_notes:
                diagnostics += self.workers.call(place, EVENTS)
        cuts, self._cuts = self._cuts, []
        return Events(diagnostics, cuts)

    def tell_life(self, life: np.ndarray) -> None:
        self.workers.life = life


def remote_steppers(workers: EnvPool, rows: Shared, n_groups: int) -> list[RemoteStepper]:
    """Start the workers stepping on `rows`, in groups that can step while the others are acted for."""
    workers.run(Job(step_rows, (rows,), ()))
    places = workers.workers
    bounds = [round(i * len(places) / n_groups) for i in range(n_groups + 1)]
    return [RemoteStepper(workers, places[lo:hi]) for lo, hi in pairwise(bounds)]


_T = 64  # rows that are written over and over


def time_steps(site: Site) -> Handler:
    """Commands are milliseconds to step for; the answer is the mean seconds of a step of all environments."""
    envs, rng = site.envs, np.random.default_rng(0)
    rows = empty_rows(envs.observation_space, envs.action_space, _T, envs.n)
    actions, steps = rows.actions(), rows.steps()
    for action in actions:
        write(action, spaces.random_action(envs.action_space, rng, envs.n))
    envs.reset(steps[-1])

    def handle(command: int, argument: int) -> Any:
        n, start, deadline = 0, time.perf_counter(), time.perf_counter() + command / 1e3
        while n == 0 or time.perf_counter() < deadline:
            envs.step(actions[n % _T], steps[n % _T])
            n += 1
            site.parent.words[PROGRESS] = n  # a sign of life
        return (time.perf_counter() - start) / n

    return handle
