"""The queue of a study: one process per slot; kills hung runs, retries failed ones and records them all."""

import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from rlframe.core.errors import ConfigError, pluralize
from rlframe.record.snapshot import list_snapshots
from rlframe.study.plan import PlannedRun, Slot
from rlframe.study.process import REFUSED, RunProcess
from rlframe.study.record import (
    DONE,
    FAILED,
    FILE,
    INTERRUPTED,
    PRUNED,
    RUNNING,
    WAITING,
    ProgressReader,
    Status,
    StudyRecord,
    move_aside,
)
from rlframe.study.table import Row, StatusTable, progress_line
from rlframe.system.signals import StopRequest

_POLL_S = 0.5 if sys.platform == "linux" else 0.1  # between polls; on Linux the end of a process wakes the queue


@dataclass(frozen=True)
class QueueOptions:
    """What a queue does with runs that fail or hang."""

    retries: int = 0  # times a failed run is started again, from its snapshot
    stall_s: float = 3600.0  # seconds without a new line in its logs until a run counts as hung; 0: never


class MoreRuns:
    """Where further runs of a study come from, once its slots are free. This one has none."""

    def more(self) -> Sequence[PlannedRun]:
        """The next runs, which are not in the record yet."""
        return ()

    def has_more(self) -> bool:
        """Whether the study is incomplete without those of `more`."""
        return False

    def finished(self, run: PlannedRun, status: Status) -> None:
        """A run has ended for good, or waits to be tried again."""

    def reason_to_stop(self, run: PlannedRun) -> str:
        """Why a run that waits or goes on is not worth its time; empty if it is."""
        return ""


NO_MORE = MoreRuns()


class Queue:
    """Runs the waiting runs of a record in order, one process per slot."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        slots: Sequence[Slot],
        record: StudyRecord,
        table: StatusTable,
        options: QueueOptions,
        source: MoreRuns = NO_MORE,
    ) -> None:
        self.runs: list[PlannedRun] = []
        self._record, self._table, self._options, self._source = record, table, options, source
        self._waiting = deque[PlannedRun]()
        self._free = list(slots)
        self._active: list[RunProcess] = []
        self._failures = Counter[str]()  # of this queue
        self._readers: dict[str, ProgressReader] = {}
        self._shown_s = 0.0
        self._take(runs)

    def _more(self) -> bool:
        """Take the next runs of the source; returns whether some are to be started. Those that are done are not."""
        while not self._waiting and (runs := self._source.more()):
            self._record.add(runs)
            self._take(runs)
        return bool(self._waiting)

    def _take(self, runs: Sequence[PlannedRun]) -> None:
        self.runs += runs
        self._waiting += [run for run in runs if self._status(run).state == WAITING]
        self._readers |= {run.name: ProgressReader(run.directory) for run in runs}

    def run(self, stop: StopRequest) -> int:
        """Process all runs; returns 0, or the number of the signal that left runs unfinished.

        The first SIGINT or SIGTERM asks the active runs to write their snapshots and waits for them. A second one kills
        them and raises Interrupted.
        """
        try:
            while self._active or (not stop and (self._waiting or self._more())):
                if stop:
                    self._interrupt_runs()
                else:
                    self._start_runs()
                wait([fd for process in self._active for fd in process.sentinels()], _POLL_S)
                self._collect_finished()
                self._show()
        finally:
            for process in self._active:
                process.close()
                for run in process.runs:
                    self._status(run).state = INTERRUPTED
            self._active.clear()
            self._save()
            self._show(last=True)
        unfinished = any(status.state in (WAITING, INTERRUPTED) for status in self._record.statuses.values())
        return stop.signum if unfinished or self._source.has_more() else 0

    def _status(self, run: PlannedRun) -> Status:
        return self._record.statuses[run.name]

    def _start_runs(self) -> None:
        """Start waiting runs on the free slots."""
        while self._free and (self._waiting or self._more()):
            run = self._waiting.popleft()
            if reason := self._source.reason_to_stop(run):
                self._finish(run, PRUNED, reason)
                continue
            slot = self._free.pop(0)
            runs = [run, *self._stack_of(run)]
            for each in runs:
                status = self._status(each)
                status.state, status.slot, status.reason = RUNNING, slot.index, ""
                status.attempts += 1
            try:
                resumed = [bool(list_snapshots(each.directory / "snapshot")) for each in runs]
                for each, resumes in zip(runs, resumed, strict=True):
                    if not resumes:
                        move_aside(each)
                self._active.append(RunProcess(run, slot, resumed[0], runs[1:]))
            except (OSError, ConfigError) as error:
                self._free.insert(0, slot)
                for each in runs:
                    self._finish(each, FAILED, f"cannot be started: {error}")
                continue
            for each, resumes in zip(runs, resumed, strict=True):
                self._table.message(f"{each.name} {'resumes' if resumes else 'starts'} on slot {slot.index}")
            self._save()

    def _stack_of(self, run: PlannedRun) -> list[PlannedRun]:
        """The waiting runs that are trained in the process of this one, which wait no more."""
        found = [each for each in self._waiting if run.stack_command and each.stack_command == run.stack_command]
        for each in found:
            self._waiting.remove(each)
        return found

    def _collect_finished(self) -> None:
        """Record the runs that have ended and free their slots; kill hung runs."""
        for process in list(self._active):
            if not process.ended():
                process.check_hung(self._options.stall_s)
                for run in process.runs:  # it may be gone at the end
                    self._note_directory(run)
                if not (process.pruned or process.interrupted) and (why := self._source.reason_to_stop(process.run)):
                    process.pruned = why
                    process.interrupt()
                continue
            self._active.remove(process)
            self._free.append(process.slot)
            self._free.sort(key=lambda slot: slot.index)
            for run in process.runs:
                self._finish_of(process, run)
            process.close()

    def _finish_of(self, process: RunProcess, run: PlannedRun) -> None:
        """Record the end of a run whose process has ended."""
        status = self._status(run)
        status.seconds = round(status.seconds + process.seconds(), 3)
        status.exit_status, reason = process.result_of(run)
        if process.pruned and reason:
            has_ended = process.own_result(run).get("ended") == "completed"  # when it was to be stopped
            self._finish(run, *((DONE, "") if has_ended else (PRUNED, process.pruned)))
            return
        interrupted = process.interrupted and not process.kill_reason
        if not reason and self._out_of_time(process, run):
            interrupted, reason = True, "its time limit is reached; the same command continues it"
        self._finish(run, INTERRUPTED if reason and interrupted else FAILED if reason else DONE, reason)

    def _note_directory(self, run: PlannedRun) -> None:
        status = self._status(run)
        status.has_directory = bool(status.has_directory) or run.directory.is_dir()

    def _out_of_time(self, process: RunProcess, run: PlannedRun) -> bool:
        """Whether runner.max_time_s ended it; without a result.json, whether its log has not reached the end."""
        ended = process.own_result(run).get("ended")
        return ended == "out_of_time" or (ended is None and self._readers[run.name].read().fraction() < 1)

    def _finish(self, run: PlannedRun, state: str, reason: str) -> None:
        """Record the end of an attempt; queue a failed run again if retries are left."""
        status = self._status(run)
        status.state, status.reason = state, reason
        self._note_directory(run)
        if state == FAILED:
            self._failures[run.name] += 1
            left = self._options.retries - self._failures[run.name] + 1
            retry = left > 0 and status.exit_status != REFUSED
            self._table.message(f"{run.name} failed, {reason}" + (f"; retries left: {left}" if retry else ""))
            if retry:
                status.state = WAITING
                self._waiting.append(run)
        else:
            self._table.message(self._row(run).result())
        self._source.finished(run, status)
        self._save()

    def _save(self) -> None:
        """Save the record. A full disk does not stop the runs; experiment.json is then out of date."""
        try:
            self._record.save()
        except OSError as error:
            self._table.message(f"cannot write {FILE}: {error}")

    def _interrupt_runs(self) -> None:
        running = [process for process in self._active if not process.interrupted]
        if running:
            snapshots = pluralize(len(running), "snapshot")
            self._table.message(f"stopping: waiting for {snapshots}; signal again to stop at once")
        for process in running:
            process.interrupt()

    def _row(self, run: PlannedRun) -> Row:
        status = self._status(run)
        running = next((process.seconds() for process in self._active if run in process.runs), 0.0)
        progress = self._readers[run.name].read()
        return Row(run.name, status.state, status.slot, status.seconds + running, status.reason, progress)

    def _show(self, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._shown_s >= self._table.interval_s:
            self._shown_s = now
            rows = [self._row(run) for run in self.runs]
            self._table.show(rows, progress_line(rows, len(self._free) + len(self._active)), last)
