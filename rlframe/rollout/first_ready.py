"""FirstReadyStepper: workers step while others are acted for; who has not answered in time waits in its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlframe.core.struct import leaves, map_tree, write
from rlframe.rollout.buffer import BatchBuffer, EnvRows
from rlframe.rollout.stepper import (
    POP_EVENTS,
    RESTART_EPISODES,
    STEP,
    BatchEvents,
    Diagnostics,
    Interruptions,
    Stepper,
    WorkerStepper,
)
from rlframe.rollout.worker_pool import Worker, WorkerPool


class FirstReadyStepper(Stepper):
    """Steps a group of workers, and finishes a step once one has answered and the others had `wait_s` seconds.

    An environment whose step is not finished repeats its inputs in the next row, and the row before is absent: not
    valid, with the action and reward of the row before it. So when the step is finished, its reward and end stand in
    the row that has its observation and action, and the next row has the next observation. Steps go on over the end of
    a batch, since workers write into `box`, rows of a single step, from which they are copied.
    """

    def __init__(self, pool: WorkerPool, group: list[Worker], box: EnvRows, batch: BatchBuffer, wait_s: float) -> None:
        """`box`, `batch`: of this group's environments; the workers step on the memory of `box`."""
        self._workers = WorkerStepper(pool, group)
        self.pool, self.group, self.wait_s, self._batch = pool, group, wait_s, batch
        self.lo, self.hi = self._workers.lo, self._workers.hi
        self.waits = np.zeros(self.hi - self.lo, bool)  # environments whose step is not finished
        self._actions, self._to = batch.rows.actions(), batch.rows.steps()
        self._box_action, self._from = box.actions()[0], box.steps()[0]
        self._infos = [map_tree(lambda x, t=t: x[t], batch.outputs.info) for t in range(batch.rows.T)]
        self._inputs = [leaves(batch.inputs()[t]) for t in range(batch.rows.T + 1)]
        self._acted = map_tree(np.copy, (self._actions[0], self._infos[0]))  # of the steps that are not finished
        self._diagnostics: Diagnostics = {}
        self._interruptions: Interruptions = set()
        self._copy(-1, slice(None))

    def _columns(self, worker: Worker) -> slice:
        return slice(worker.lo - self.lo, worker.hi - self.lo)

    def _copy(self, t: int, columns: slice) -> None:
        """Copy what workers wrote into the rows of step t."""
        for to, from_ in zip(leaves(self._to[t]), leaves(self._from), strict=True):
            to[columns] = from_[columns]

    def start_step(self, t: int) -> None:
        acted, acts = (self._actions[t], self._infos[t]), ~self.waits
        for to, kept in zip(leaves(acted), leaves(self._acted), strict=True):
            to[self.waits], kept[acts] = kept[self.waits], to[acts]
        write(self._box_action, self._actions[t])  # those of unfinished steps are as they were
        for worker in self.group:
            columns = self._columns(worker)
            if not self.waits[columns][0]:
                worker.child.start_command(RESTART_EPISODES if worker.needs_reset else STEP, 0)
                self.waits[columns] = True

    def finish_step(self, t: int) -> None:
        for worker, result in self.pool.wait_first(self.group, self.wait_s):
            columns = self._columns(worker)
            self.waits[columns] = False
            if not result.done:
                self.pool.call(worker, RESTART_EPISODES, 0)
            self._copy(t, columns)
            if worker.needs_reset:
                self._interrupt(t, columns)
                worker.needs_reset = False
            if worker.child.n_events:
                events = self.pool.call(worker, POP_EVENTS)
                self._diagnostics |= {(t, env): means for (_, env), means in events.diagnostics.items()}
        if np.count_nonzero(self.waits):
            self._wait(t)

    def _wait(self, t: int) -> None:
        """Make row t absent where a step is not finished, and repeat its inputs in row t + 1."""
        rows, waits = self._batch.rows, self.waits
        for to, row in zip(self._inputs[t + 1], self._inputs[t], strict=True):
            to[waits] = row[waits]
        for array in (rows.terminated, rows.truncated, rows.valid, rows.raw_reward, rows.ended):
            array[t, waits] = 0

    def _interrupt(self, t: int, columns: slice) -> None:
        """Truncate the episodes that a process lost before step t, in their last row of this batch that acted."""
        rows = self._batch.rows
        for env in range(columns.start, columns.stop):
            self._interruptions.add((t, self.lo + env))
            row = t - 1
            while row >= 0 and not rows.valid[row, env] and not rows.first[row + 1, env]:
                row -= 1
            if row >= 0:
                rows.truncated[row, env] |= rows.valid[row, env] & ~rows.terminated[row, env]

    def decorrelate(self, n_steps: int, seed: int, first: int) -> None:
        self._workers.decorrelate(n_steps, seed, first)
        self._workers.pop_events()
        self._copy(-1, slice(None))

    def reset(self, round_: int = 0) -> None:
        """Waits for steps that are not finished, and drops them."""
        self.pool.wait([worker for worker in self.group if self.waits[self._columns(worker)][0]])
        self.waits[:] = False
        self._workers.reset(round_)
        self._workers.pop_events()
        self._copy(-1, slice(None))

    def state(self) -> list[Any]:
        """None: where steps go on between batches, a resumed run starts new episodes."""
        return [None] * (self.hi - self.lo)

    def restore(self, states: Sequence[Any]) -> list[str]:
        """Of a sampler that waits for all."""
        for box, row in zip(leaves(self._from), leaves(self._to[-1]), strict=True):
            box[...] = row  # where only those that start anew write
        reasons = self._workers.restore(states)
        self._copy(-1, slice(None))
        return reasons

    def pop_events(self) -> BatchEvents:
        events = BatchEvents(self._diagnostics, self._interruptions)
        self._diagnostics, self._interruptions = {}, set()
        return events

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self.pool.heartbeat = heartbeat
