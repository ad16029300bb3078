"""Steppers step environments over the rows of a batch, in this process or in workers. Used by Collector."""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import has_masks, random_actions
from rlframe.core.seeding import Role, generators
from rlframe.core.struct import leaves, write
from rlframe.envs.base import Envs, EnvStep
from rlframe.rollout.buffer import NOBODY, EnvRows, empty_rows
from rlframe.rollout.worker_pool import Worker, WorkerContext, WorkerPool, WorkerTask
from rlframe.system.process import ChildDied
from rlframe.system.shared import Shared
from rlframe.system.worker_main import N_EVENTS, PROGRESS, Handler

Diagnostics = dict[tuple[int, int], dict[str, float]]  # (t, env): means over the episode that ended at step t
Interruptions = set[tuple[int, int]]  # (t, env): restarted at step t because its process died; the episode is dropped


class BatchEvents(NamedTuple):
    """What happened during a batch, besides its rows."""

    diagnostics: Diagnostics
    interruptions: Interruptions


def check_room(longest: int, T: int) -> None:
    """Raise ConfigError unless batches of T time steps have room for episodes of at most `longest` env steps (0: any).

    An episode's last observation is a row too, so that every batch can start with a new episode.
    """
    if not longest:
        raise ConfigError(
            "sampler.complete_episodes=true needs to know the longest episode, and the environment has no time limit; "
            "set env.max_episode_steps"
        )
    if longest >= T:
        raise ConfigError(
            f"sampler.complete_episodes=true needs batches that hold the longest episode: sampler.batch_T={T} must be "
            f"at least {longest + 1}, one more for the last observation; or lower env.max_episode_steps"
        )


class Stepper(ABC):
    """Steps a group of environments, columns lo to hi - 1 of a batch."""

    lo: int
    hi: int
    waits: np.ndarray = NOBODY  # [hi - lo] bool: whose last step is not finished; empty if all always are

    @abstractmethod
    def start_step(self, t: int) -> None:
        """Start step t, whose actions are in the batch."""

    @abstractmethod
    def finish_step(self, t: int) -> None:
        """Wait until step t has been written into the batch. Raises EnvError if an environment fails."""

    @abstractmethod
    def decorrelate(self, n_steps: int, seed: int, first: int) -> None:
        """Take random steps before the first batch, so that episodes do not end together; writes row T of the batch.

        Each environment takes its own number of them, from 0 to n_steps, and draws from a generator of its own; `first`
        is the first one's index over all ranks. Vector environments, which step all at once, take n_steps each.
        """

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
        self._heartbeat = np.zeros(1, np.int64)
        self._actions, self._steps = rows.actions(), rows.steps()
        self.diagnostics: Diagnostics = {}
        self.interruptions: Interruptions = set()
        self._whole_episodes = envs.env is not None and envs.env.whole_episodes
        self._special = self._whole_episodes or envs.restarts > 0
        if self._whole_episodes:
            check_room(envs.time_limit, rows.T)

    def start_step(self, t: int) -> None:
        """Does nothing: `finish_step` takes the step."""

    def finish_step(self, t: int) -> None:
        step = self._steps[t]
        if self._special:
            self._special_step(t, step)
        else:
            self.envs.step(self._actions[t], step)
        if np.count_nonzero(step.ended):  # takes a fifth of the time of any()
            for env in np.flatnonzero(step.ended):
                means = self.envs.pop_diagnostics(int(env))
                if means:
                    self.diagnostics[t, self.lo + int(env)] = means
        self.progress[0] = t + 1
        self._heartbeat[0] += 1

    def _special_step(self, t: int, step: EnvStep) -> None:
        """A step with whole episodes, or with environments that are made again if they raise."""
        rows = self.rows
        if self._whole_episodes:  # the episode that a reset starts now has its first row at t + 1
            fits = t + self.envs.time_limit < rows.T - 1 or t == rows.T - 1
            self.envs.hold(frozenset() if fits else frozenset(range(self.envs.n)))
        self.envs.step(self._actions[t], step)
        waited = ~step.valid & ~step.first
        if waited.any():
            for row in leaves(rows.observation):
                row[t + 1, waited] = row[t, waited]
        for env in self.envs.restarted:
            self.interruptions.add((t, self.lo + env))
            if t:
                rows.truncated[t - 1, env] |= rows.valid[t - 1, env] & ~rows.terminated[t - 1, env]

    def decorrelate(self, n_steps: int, seed: int, first: int) -> None:
        envs, actions, step = self.envs, self._actions[-1], self._steps[-1]
        rngs = generators(seed, Role.DECORRELATION, envs.n, first)
        waits = [n_steps - int(rng.integers(n_steps + 1)) if envs.can_wait else 0 for rng in rngs]
        for number in range(n_steps):
            if envs.can_wait:
                envs.hold(frozenset(env for env, wait in enumerate(waits) if number < wait), at_once=True)
            write(actions, random_actions(envs.observation_space, envs.action_space, step.observation, rngs))
            envs.step(actions, step)
            self.progress[0] = -number
            self._heartbeat[0] += 1
        if envs.can_wait:
            envs.hold(frozenset())
        step.first[...] = True  # the agent's part of the episode starts here

    def reset(self, round_: int = 0) -> None:
        self.envs.reset(self._steps[-1], round_)

    def state(self) -> list[Any]:
        return self.envs.state()

    def restore(self, states: Sequence[Any]) -> list[str]:
        return self.envs.restore(states, self._steps[-1], self._tick)

    def _tick(self) -> None:
        self.progress[0] += 1
        self._heartbeat[0] += 1

    def restart_episodes(self, t: int) -> None:
        """Reset all environments in row t, in place of a process that died there.

        Row t - 1 becomes the end of the interrupted episodes: truncated, unless they had ended.
        """
        rows, step = self.rows, self._steps[t]
        self.envs.reset(step)
        for array in (step.reward, step.terminated, step.truncated, step.valid, step.raw_reward, step.ended):
            array[...] = 0
        if t:
            rows.truncated[t - 1] |= rows.valid[t - 1] & ~rows.terminated[t - 1]

    def pop_events(self) -> BatchEvents:
        diagnostics, self.diagnostics = self.diagnostics, {}
        interruptions, self.interruptions = self.interruptions, set()
        return BatchEvents(diagnostics, interruptions)

    @property
    def n_events(self) -> int:
        return len(self.diagnostics) + len(self.interruptions)

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._heartbeat = heartbeat


STEP, RESET, RESTART_EPISODES, POP_EVENTS, STATE, RESTORE, DECORRELATE = range(7)  # commands


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
            words[N_EVENTS] = stepper.n_events
        elif command == RESET:
            stepper.reset(t)
        elif command == RESTART_EPISODES:
            stepper.restart_episodes(t)
        elif command == STATE:
            return stepper.state()
        elif command == RESTORE:
            return stepper.restore(context.parent.receive())
        elif command == DECORRELATE:
            stepper.decorrelate(t, *context.parent.receive())
        else:
            words[N_EVENTS] = 0
            return stepper.pop_events()
        return None

    return handle


class WorkerStepper(Stepper):
    """Steps a group of a WorkerPool's workers, which write their columns of shared rows."""

    def __init__(self, pool: WorkerPool, group: list[Worker]) -> None:
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

    def decorrelate(self, n_steps: int, seed: int, first: int) -> None:
        for worker in self.group:
            worker.child.start_command(DECORRELATE, n_steps)
            with contextlib.suppress(ChildDied):  # `wait` replaces it
                worker.child.send((seed, first + worker.lo - self.lo))
        self._reset_replaced()

    def reset(self, round_: int = 0) -> None:
        for worker in self.group:
            worker.child.start_command(RESET, round_)
        self._reset_replaced(round_)

    def _reset_replaced(self, round_: int = 0) -> None:
        """Wait for the group, and reset the environments of workers that replaced others."""
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
            worker.needs_reset = False  # also of a process that replaced one meanwhile
        return reasons

    def pop_events(self) -> BatchEvents:
        diagnostics: Diagnostics = {}
        for worker in self.group:
            if worker.child.n_events:
                events = self.pool.call(worker, POP_EVENTS)
                diagnostics |= events.diagnostics
                self._interruptions |= events.interruptions
        interruptions, self._interruptions = self._interruptions, set()
        return BatchEvents(diagnostics, interruptions)

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self.pool.heartbeat = heartbeat


def worker_steppers(pool: WorkerPool, rows: Shared, n_groups: int) -> list[WorkerStepper]:
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
    envs.reset(steps[-1])
    in_spaces = envs.observation_space, envs.action_space
    for action in actions:
        write(action, random_actions(*in_spaces, steps[-1].observation, [rng] * envs.n))
    masked = has_masks(*in_spaces)
    rows_in_turn = itertools.cycle(range(_N_ROWS))  # over all commands: the mask is in the row before

    def handle(command: int, argument: int) -> Any:
        n, start, deadline = 0, time.perf_counter(), time.perf_counter() + command / 1e3
        while n == 0 or time.perf_counter() < deadline:
            row = next(rows_in_turn)
            if masked:
                write(actions[row], random_actions(*in_spaces, steps[row - 1].observation, [rng] * envs.n))
            envs.step(actions[row], steps[row])
            n += 1
            context.parent.control[PROGRESS] = n  # a heartbeat
        return (time.perf_counter() - start) / n

    return handle
