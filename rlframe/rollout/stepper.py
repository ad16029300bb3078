"""Steppers step environments over the rows of a batch, in this process or in workers. Used by Collector."""

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
from rlframe.rollout.buffer import EnvRows, empty_rows
from rlframe.rollout.env_pool import EnvPool, Worker, WorkerContext, WorkerTask
from rlframe.system.shared import Shared
from rlframe.system.worker_main import N_EVENTS, PROGRESS, Handler

Diagnostics = dict[tuple[int, int], dict[str, float]]  # (t, env): means over the episode that ended at step t
Interruptions = set[tuple[int, int]]  # (t, env): restarted at step t because its process died; the episode is dropped


class BatchEvents(NamedTuple):
    """What happened during a batch, besides its rows."""

    diagnostics: Diagnostics
    interruptions: Interruptions


class Stepper(ABC):
    """Steps a group of environments, columns lo to hi - 1 of a batch."""

    lo: int
    hi: int

    @abstractmethod
    def start_step(self, t: int) -> None:
        """Start step t, whose actions are in the batch."""

    @abstractmethod
    def finish_step(self, t: int) -> None:
        """Wait until step t has been written into the batch. Raises EnvError if an environment fails."""

    @abstractmethod
    def reset(self, round_: int = 0) -> None:
        """Reset all environments (see `Envs.reset`); writes row T of the batch."""

    @abstractmethod
    def state(self) -> list[Any]:
        """The state of each environment, for `restore`. Call it between batches."""

    @abstractmethod
    def restore(self, states: Sequence[Any]) -> list[str]:
        """Restore newly made environments to states saved with the batch's row T (see `Envs.restore`)."""

    @abstractmethod
    def pop_events(self) -> BatchEvents:
        """The events since the last call. Call it between batches."""

    @abstractmethod
    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        """Change `heartbeat[0]` with each step from now on, or while waiting for workers that step."""


class LocalStepper(Stepper):
    """Steps environments of this process. `progress` (one number, may be shared) is the number of finished steps."""

    def __init__(self, envs: Envs, rows: EnvRows, lo: int, progress: np.ndarray) -> None:
        """`rows` are the columns of these environments; `lo` is the first one's column in the whole batch."""
        self.envs, self.rows, self.lo, self.hi, self.progress = envs, rows, lo, lo + envs.n, progress
        self._actions, self._steps = rows.actions(), rows.steps()
        self.diagnostics: Diagnostics = {}

    def start_step(self, t: int) -> None:
        """Does nothing: `finish_step` takes the step."""

    def finish_step(self, t: int) -> None:
        step = self._steps[t]
        self.envs.step(self._actions[t], step)
        if np.count_nonzero(step.ended):  # takes a fifth of the time of any()
            for env in np.flatnonzero(step.ended):
                means = self.envs.pop_diagnostics(int(env))
                if means:
                    self.diagnostics[t, self.lo + int(env)] = means
        self.progress[0] = t + 1

    def reset(self, round_: int = 0) -> None:
        self.envs.reset(self._steps[-1], round_)

    def state(self) -> list[Any]:
        return self.envs.state()

    def restore(self, states: Sequence[Any]) -> list[str]:
        return self.envs.restore(states, self._steps[-1], self._tick)

    def _tick(self) -> None:
        self.progress[0] += 1

    def restart_episodes(self, t: int) -> None:
        """Reset all environments in row t, in place of a process that died there.

        Row t - 1 becomes the end of the interrupted episodes: truncated, unless they had ended.
        """
        rows, step = self.rows, self._steps[t]
        self.envs.reset(step)
        for array in (step.reward, step.terminated, step.truncated, step.valid, step.score, step.ended):
            array[...] = 0
        if t:
            rows.truncated[t - 1] |= rows.valid[t - 1] & ~rows.terminated[t - 1]

    def pop_events(self) -> BatchEvents:
        diagnostics, self.diagnostics = self.diagnostics, {}
        return BatchEvents(diagnostics, set())

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self.progress = heartbeat


STEP, RESET, RESTART_EPISODES, POP_DIAGNOSTICS, STATE, RESTORE = range(6)  # commands


def make_step_handler(context: WorkerContext) -> Handler:
    """For workers that only step: handle the commands above on their columns of the shared rows."""
    rows: EnvRows = context.memory[0]
    words, lo, envs = context.parent.control, context.lo, context.envs
    stepper = LocalStepper(envs, rows.columns(lo, lo + envs.n), lo, words[PROGRESS:])
    if not context.is_replacement:
        stepper.reset()

    def handle(command: int, t: int) -> Any:
        if command == STEP:
            stepper.finish_step(t)
            words[N_EVENTS] = len(stepper.diagnostics)
        elif command == RESET:
            stepper.reset(t)
        elif command == RESTART_EPISODES:
            stepper.restart_episodes(t)
        elif command == STATE:
            return stepper.state()
        elif command == RESTORE:
            return stepper.restore(context.parent.receive())
        else:
            words[N_EVENTS] = 0
            return stepper.pop_events().diagnostics
        return None

    return handle


class WorkerStepper(Stepper):
    """Steps a group of an EnvPool's workers, which write their columns of shared rows."""

    def __init__(self, pool: EnvPool, group: list[Worker]) -> None:
        self.pool, self.group = pool, group
        self.lo, self.hi = group[0].lo, group[-1].hi
        self._interruptions: Interruptions = set()

    def start_step(self, t: int) -> None:
        for worker in self.group:
            worker.child.start_command(RESTART_EPISODES if worker.needs_reset else STEP, t)

    def finish_step(self, t: int) -> None:
        for worker, result in zip(self.group, self.pool.wait(self.group), strict=True):
            if not result.done:
                self.pool.call(worker, RESTART_EPISODES, t)
            if worker.needs_reset:
                self._interruptions |= {(t, env) for env in range(worker.lo, worker.hi)}
                worker.needs_reset = False

    def reset(self, round_: int = 0) -> None:
        for worker in self.group:
            worker.child.start_command(RESET, round_)
        for worker, result in zip(self.group, self.pool.wait(self.group), strict=True):
            if not result.done:
                self.pool.call(worker, RESET, round_)
            worker.needs_reset = False

    def state(self) -> list[Any]:
        return [state for worker in self.group for state in self.pool.states(worker, STATE)]

    def restore(self, states: Sequence[Any]) -> list[str]:
        reasons: list[str] = []
        for worker in self.group:
            own = list(states[worker.lo - self.lo : worker.hi - self.lo])
            reasons += self.pool.call(worker, RESTORE, values=[own])
        return reasons

    def pop_events(self) -> BatchEvents:
        diagnostics: Diagnostics = {}
        for worker in self.group:
            if worker.child.n_events:
                diagnostics |= self.pool.call(worker, POP_DIAGNOSTICS)
        interruptions, self._interruptions = self._interruptions, set()
        return BatchEvents(diagnostics, interruptions)

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self.pool.heartbeat = heartbeat


def worker_steppers(pool: EnvPool, rows: Shared, n_groups: int) -> list[WorkerStepper]:
    """Make all workers step on shared `rows`, in groups that step independently of each other."""
    pool.assign(WorkerTask(make_step_handler, (rows,), ()))
    bounds = [round(i * len(pool.workers) / n_groups) for i in range(n_groups + 1)]
    return [WorkerStepper(pool, pool.workers[lo:hi]) for lo, hi in pairwise(bounds)]


_N_ROWS = 64  # the timed steps write the same rows again and again


def make_timing_handler(context: WorkerContext) -> Handler:
    """For timing: a command is the milliseconds to step for, and returns the mean seconds of a step of all envs."""
    envs, rng = context.envs, np.random.default_rng(0)
    rows = empty_rows(envs.observation_space, envs.action_space, _N_ROWS, envs.n)
    actions, steps = rows.actions(), rows.steps()
    for action in actions:
        write(action, spaces.random_action(envs.action_space, rng, envs.n))
    envs.reset(steps[-1])
    parts = spaces.mask_parts(envs.observation_space, envs.action_space)

    def handle(command: int, argument: int) -> Any:
        n, start, deadline = 0, time.perf_counter(), time.perf_counter() + command / 1e3
        while n == 0 or time.perf_counter() < deadline:
            if parts:
                mask = steps[(n - 1) % _N_ROWS].observation[spaces.ACTION_MASK]
                write(actions[n % _N_ROWS], spaces.random_allowed(envs.action_space, parts, mask, [rng] * envs.n))
            envs.step(actions[n % _N_ROWS], steps[n % _N_ROWS])
            n += 1
            context.parent.control[PROGRESS] = n  # a heartbeat
        return (time.perf_counter() - start) / n

    return handle
