"""Stepping environments of worker processes: the hand-over of one time step at a time, and what a death leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlframe.envs.rows import Rows
from rlframe.envs.stepper import Cut, Diagnostics, Events, LocalStepper, Stepper
from rlframe.envs.worker import Site
from rlframe.envs.workers import EnvWorkers, Job, Worker
from rlframe.system.shared import Shared
from rlframe.system.worker_main import NOTES, PROGRESS, Handler

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
    """Some workers of `EnvWorkers`, side by side, that step their columns of shared rows at our word."""

    def __init__(self, workers: EnvWorkers, group: list[Worker]) -> None:
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


def remote_steppers(workers: EnvWorkers, rows: Shared, n_groups: int) -> list[RemoteStepper]:
    """Start the workers stepping on `rows`, in groups that can step while the others are acted for."""
    workers.run(Job(step_rows, (rows,), ()))
    places = workers.workers
    bounds = [round(i * len(places) / n_groups) for i in range(n_groups + 1)]
    return [RemoteStepper(workers, places[lo:hi]) for lo, hi in pairwise(bounds)]
