"""The queue: it keeps every slot busy until no run waits, and answers for every process that it starts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from sys import platform

from rlframe.core.errors import counted
from rlframe.study.attempt import Attempt
from rlframe.study.plan import Run
from rlframe.study.progress import Reader
from rlframe.study.record import (
    DONE,
    FAILED,
    FILE,
    INTERRUPTED,
    RUNNING,
    WAITING,
    Record,
    Status,
    can_resume,
    set_aside,
)
from rlframe.study.slots import Slot
from rlframe.study.table import Display, Row, summary
from rlframe.system.signals import StopRequest, stop_request

_LOOK_S = 0.5 if platform == "linux" else 0.1  # between looks at all runs; on Linux the end of one wakes us
_GRACE_S = 300.0  # for runs that were asked to stop to write their snapshots
_REFUSED = 2  # exit status of a command that was refused before it started: trying again is in vain


@dataclass(frozen=True)
class Options:
    """What a queue does when a run fails or says nothing."""

    retries: int = 0  # times that a failed run is started again, from its snapshot
    stall_s: float = 3600.0  # without a new line in its logs after which a run is taken for hung; 0: for ever


class Queue:
    """Runs what waits in a record, one process a slot, in the runs' order."""

    def __init__(
        self, runs: Sequence[Run], slots: Sequence[Slot], record: Record, display: Display, options: Options
    ) -> None:
        self._runs, self._record, self._display, self._options = runs, record, display, options
        self._waiting = deque(run for run in runs if record.statuses[run.name].state == WAITING)
        self._free = list(slots)
        self._active: list[Attempt] = []
        self._failures = dict.fromkeys((run.name for run in runs), 0)  # of this queue
        self._readers = {run.name: Reader(run.directory) for run in runs}
        self._shown_s = 0.0

    def run(self) -> int:
        """Start and watch runs until all have ended; a failure is recorded and stops no other run.

        The first SIGINT or SIGTERM asks all runs to write their snapshots, and waits for that. Returns the signal if it
        has left something to be done, else 0.

        Raises:
            Interrupted: by a second signal, which ends all at once.
        """
        with stop_request() as stop, self._leaving_nothing():
            while self._active or (self._waiting and not stop):
                if stop:
                    self._ask_to_stop(stop)
                else:
                    self._fill()
                wait([end for attempt in self._active for end in attempt.sentinels()], _LOOK_S)
                self._look()
                self._show()
        unfinished = any(status.state in (WAITING, INTERRUPTED) for status in self._record.statuses.values())
        return stop.signum if unfinished else 0

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        try:
            yield
        finally:
            for attempt in self._active:
                attempt.close()
                self._status(attempt.run).state = INTERRUPTED
            self._active.clear()
            self._save()
            self._show(last=True)

    def _status(self, run: Run) -> Status:
        return self._record.statuses[run.name]

    def _fill(self) -> None:
        """Start runs while there are slots for them."""
        while self._free and self._waiting:
            run, slot = self._waiting.popleft(), self._free.pop(0)
            status = self._status(run)
            status.state, status.slot, status.attempts = RUNNING, slot.index, status.attempts + 1
            status.reason = ""
            try:
                resume = can_resume(run)
                if not resume:
                    set_aside(run)
                self._active.append(Attempt(run, slot, resume))
            except OSError as error:
                self._free.insert(0, slot)
                self._end(run, FAILED, f"cannot be started: {error}")
                continue
            self._display.message(f"{run.name} {'goes on' if resume else 'starts'} on slot {slot.index}")
            self._save()

    def _look(self) -> None:
        """Take leave of the runs that have ended, and watch the others."""
        for attempt in list(self._active):
            if not attempt.ended():
                attempt.watch(self._options.stall_s)
                continue
            self._active.remove(attempt)
            self._free.append(attempt.slot)
            self._free.sort(key=lambda slot: slot.index)
            status = self._status(attempt.run)
            status.seconds = round(status.seconds + attempt.seconds(), 3)
            status.exit_status, reason = attempt.outcome()
            attempt.close()
            stopped = attempt.asked_to_stop and not attempt.reason
            if not reason and self._readers[attempt.run.name].read().fraction() < 1:  # as its own limit wants it
                stopped, reason = True, "its time is over; the same command goes on with it"
            self._end(attempt.run, INTERRUPTED if reason and stopped else FAILED if reason else DONE, reason)

    def _end(self, run: Run, state: str, reason: str) -> None:
        """Record an end, and queue the run again if it failed and may try again."""
        status = self._status(run)
        status.state, status.reason, status.has_directory = state, reason, run.directory.is_dir()
        if state == FAILED:
            self._failures[run.name] += 1
            left = self._options.retries - self._failures[run.name] + 1
            again = left > 0 and status.exit_status != _REFUSED
            self._display.message(
                f"{run.name} failed, {reason}" + (f"; it will be tried {counted(left, 'time')} more" if again else "")
            )
            if again:
                status.state = WAITING
                self._waiting.append(run)
        else:
            self._display.message(self._row(run).ended())
        self._save()

    def _save(self) -> None:
        """Keep the record; without it the runs go on all the same, and only what it says is out of date."""
        try:
            self._record.save()
        except OSError as error:
            self._display.message(f"{FILE} cannot be written: {error}")

    def _ask_to_stop(self, stop: StopRequest) -> None:
        asked = [attempt for attempt in self._active if not attempt.asked_to_stop]
        if asked:
            self._display.message(f"stopping: waiting for {counted(len(asked), 'snapshot')}; once more stops at once")
        for attempt in asked:
            attempt.interrupt(_GRACE_S)

    def _row(self, run: Run) -> Row:
        status = self._status(run)
        running = next((attempt.seconds() for attempt in self._active if attempt.run is run), 0.0)
        progress = self._readers[run.name].read()
        return Row(run.name, status.state, status.slot, status.seconds + running, status.reason, progress)

    def _show(self, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._shown_s >= self._display.interval_s:
            self._shown_s = now
            rows = [self._row(run) for run in self._runs]
            self._display.show(rows, summary(rows, len(self._free) + len(self._active)), last)
