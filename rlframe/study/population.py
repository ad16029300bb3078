"""A population of runs that train interval by interval, copy each other's snapshots and change settings in between.

`population.jsonl` in the study's directory has the plan and a line for each interval, so that the same command goes on
where a study was stopped. What is copied, and what members try, is in `rlframe.study.pbt`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.files import parse_json, read_json, read_regular_file, replace_file, replace_json
from rlframe.experiment.objects import long_key
from rlframe.experiment.trust import foreign
from rlframe.record.branch import branch, change_settings, changes_of
from rlframe.record.metrics import signed
from rlframe.record.rank_state import env_steps_of, list_snapshots
from rlframe.study.pbt import Member, PbtPlan, first_members, next_members, schedules
from rlframe.study.plan import PlannedRun, number_or_text
from rlframe.study.record import DONE, FAILED, WAITING, Status, logged_columns

JOURNAL, BEST = "population.jsonl", "best.json"  # in the study's directory


class Population:
    """The members of a study, and what they do in the next interval."""

    def __init__(
        self, plan: PbtPlan, directory: Path, runs: Sequence[PlannedRun], statuses: Mapping[str, Status]
    ) -> None:
        """Begin, or go on with the journal in `directory`, which exists.

        Args:
            runs: of the members, with their first settings.    statuses: of the runs by name, which this changes.
        Raises:
            ConfigError: the journal is damaged or that of another plan.
        """
        self.plan, self._path, self._runs, self._statuses = plan, directory / JOURNAL, list(runs), statuses
        self._column, self._sign = signed(plan.metric)
        self._intervals = read_journal(self._path, plan)  # up to the one that is trained now
        if not self._intervals:
            self._intervals = [first_members(plan)]
            self._save()

    @property
    def number(self) -> int:
        """Of the interval that is trained now, from 1."""
        return len(self._intervals)

    @property
    def _ends_at(self) -> int:
        """env_steps at the end of this interval: the first multiple that all members have half an interval before them.

        They stop at the next row of their logs, which may lie far behind it.
        """
        start, interval = max(member.env_steps for member in self._intervals[-1]), self.plan.interval_steps
        return min(((start + interval // 2) // interval + 1) * interval, self.plan.n_steps)

    def start_interval(self) -> list[PlannedRun]:
        """The runs of all members up to the end of this interval; those that are not there yet wait.

        Raises:
            ConfigError: a directory is in use.    SnapshotError, RecordError: a snapshot cannot be copied.
        """
        self._copy()
        for run in self._runs:
            status = self._statuses[run.name]  # a snapshot from there on may be of one stopped before its last row
            is_there = status.state == DONE and _env_steps(run) >= self._ends_at
            status.state, status.reason = (DONE if is_there else WAITING), ""
        stop = f"stop=env_steps >= {self._ends_at}" if self._ends_at < self.plan.n_steps else "stop="
        return [
            self._of_interval(run, member, stop) for run, member in zip(self._runs, self._intervals[-1], strict=True)
        ]

    def _of_interval(self, run: PlannedRun, member: Member, stop: str) -> PlannedRun:
        """A run with the settings of now, which also are those it would be started anew with."""
        words = {f"{key}={run.arguments[key]}": f"{key}={value}" for key, value in member.settings.items()}
        command = tuple(words.get(word, word) for word in run.command)
        return replace(run, command=(*command, stop), resume_command=(*run.resume_command, stop))

    def runs_as_tuned(self) -> list[PlannedRun]:
        """The runs with the settings of now as arguments, for a table."""
        return as_tuned(self._runs, self._intervals[-1])

    def advance(self) -> bool:
        """After an interval, decide who copies whom and what is tried in the next one; False if there is none.

        There is none after the last, if a run has not reached the end of this one, or if no member has a score.

        Raises:
            ConfigError: the metric is not in the logs.
        """
        self._check_metric()
        ended = [self._statuses[run.name].state in (DONE, FAILED) for run in self._runs]
        if self._ends_at >= self.plan.n_steps or not all(ended):
            return False
        members = self._scored()
        if all(math.isnan(member.score) for member in members):
            return False
        for run in self._runs:
            if (path := run.directory / "params.json").is_file() and read_json(path).get("config", {}).get("stop"):
                change_settings(run.directory, {"stop": ""})  # of the interval; for those who resume the run themselves
        self._intervals.append(next_members(self.plan, self.number, members))
        self._save()
        return True

    def _check_metric(self) -> None:
        columns = [name for run in self._runs for name in logged_columns(run)]
        if columns and self._column not in columns:
            hint = nearest(self._column, columns)
            raise ConfigError(f"metric={self.plan.metric} is not in the logs{hint}; begin anew with another")

    def _scored(self) -> list[Member]:
        """The members with the scores and env_steps that they have now."""
        found = []
        for k, (run, member) in enumerate(zip(self._runs, self._intervals[-1], strict=True)):
            env_steps, start = _env_steps(run), member.env_steps if self.number > 1 else -1
            score = self._score(run, start)
            if env_steps <= start:  # it had passed the end already
                score = self._intervals[-1][member.copied if member.copied >= 0 else k].score
            failed = self._statuses[run.name].state == FAILED
            found.append(Member(member.settings, env_steps, math.nan if failed else score))
        return found

    def _score(self, run: PlannedRun, start: int) -> float:
        """The last value of the metric after `start`, higher is better; nan if there is none."""
        columns = logged_columns(run)
        if self._column not in columns or "env_steps" not in columns:
            return math.nan
        values = columns[self._column][columns["env_steps"] > start]
        finite = values[np.isfinite(values)]
        return self._sign * float(finite[-1]) if len(finite) else math.nan

    def _copy(self) -> None:
        """Make the copies of this interval that are not made yet. No run trains before they all are."""
        members, before = self._intervals[-1], self._intervals[-2:][0]
        for k, (run, member) in enumerate(zip(self._runs, members, strict=True)):
            notes = changes_of(run.directory)
            if member.copied < 0 or any(note.get("interval") == self.number for note in notes):
                continue
            changed = [key for key, x in member.settings.items() if x != before[member.copied].settings[key]]
            note = {
                "interval": self.number,
                "copied": self._runs[member.copied].name,
                "before": before[k].settings,
                "settings": member.settings,
                "changed": [long_key(key) for key in changed],
            }
            settings = {long_key(key): number_or_text(x) for key, x in member.settings.items()}
            branch(run.directory, self._runs[member.copied].directory, {**settings, "stop": ""}, note)

    def describe(self) -> str:
        """This interval, and what changes before it, in lines."""
        lines = [f"interval {self.number}, to env_steps {self._ends_at:,} of {self.plan.n_steps:,}"]
        for run, member in zip(self._runs, self._intervals[-1], strict=True):
            if member.copied >= 0:
                words = " ".join(f"{key}={value}" for key, value in member.settings.items())
                lines.append(f"  {run.name} copies {self._runs[member.copied].name}: {words}")
        return "\n".join(lines)

    def describe_best(self) -> str:
        """The member with the highest score at the end, with its settings over time, which are written to best.json."""
        members = self._scored()
        known = [k for k, member in enumerate(members) if not math.isnan(member.score)]
        if not known:
            self._check_metric()
            return f"no member has a score: metric={self.plan.metric} has no value in the last interval"
        best = max(known, key=lambda k: members[k].score)
        words = schedules(self.plan, self._stems_from(best))
        shown = " ".join(f"{key}={value}" for key, value in words.items())
        score = self._sign * members[best].score
        path = self._path.with_name(BEST)
        config = read_json(self._runs[best].directory / "params.json")["config"]
        config |= {long_key(key): number_or_text(x) for key, x in words.items()}
        config |= {"log_dir": "", "run_ID": 0, "stop": ""}
        replace_json(path, {"config": config})
        trust = " trust=true" if foreign(config) else ""
        again = f"python -m rlframe.launch experiment={shlex.quote(str(path))}{trust}"
        found = f"best: {self._runs[best].name}, {self._column} {score:.6g}: {shown}"
        return f"{found}\ntrain anew with these settings: {again}"

    def _stems_from(self, k: int) -> list[Member]:
        """Member k and those that it stems from, oldest first, one for each interval."""
        found = []
        for members in reversed(self._intervals):
            found.append(members[k])
            k = members[k].copied if members[k].copied >= 0 else k
        return found[::-1]

    def _save(self) -> None:
        lines = [{"plan": self.plan.facts()}, *({"members": [_entry(each) for each in x]} for x in self._intervals)]
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in lines))


def _env_steps(run: PlannedRun) -> int:
    """Of its newest snapshot; -1 if it has none."""
    found = list_snapshots(run.directory / "snapshot")
    return env_steps_of(found[-1]) if found else -1


def _entry(member: Member) -> dict[str, Any]:
    return {**asdict(member), "score": None if math.isnan(member.score) else member.score}


def as_tuned(runs: Sequence[PlannedRun], members: Sequence[Member]) -> list[PlannedRun]:
    """The runs with the settings of their members as arguments."""
    pairs = zip(runs, members, strict=True)
    return [replace(run, arguments={**run.arguments, **member.settings}) for run, member in pairs]


def read_population(path: Path) -> tuple[dict[str, Any], list[list[Member]]]:
    """The facts of the plan, and the members at the start of each interval; none of a last line that was cut off.

    Raises:
        ConfigError: the journal is damaged.
    """
    lines = read_regular_file(path).splitlines(keepends=True)
    try:
        entries = [parse_json(line) for line in lines if line.endswith(b"\n")]
        known = dict(entries[0]["plan"].items()) if entries else {}
        intervals = [[_member(each) for each in entry["members"]] for entry in entries[1:]]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{path} is damaged; move it away, and use another log_dir") from None
    return known, intervals


def read_journal(path: Path, plan: PbtPlan) -> list[list[Member]]:
    """The members of `read_population`; none without a journal. Raises ConfigError also for one of another plan."""
    known, intervals = read_population(path) if path.exists() else ({}, [])
    mine = json.loads(json.dumps(plan.facts()))
    for key in (key for key in {**mine, **known} if known and mine.get(key) != known.get(key)):
        raise ConfigError(
            f"{path} is of a population with {key}={known.get(key)}, not {mine.get(key)}; use another log_dir"
        )
    return intervals


def _member(entry: Any) -> Member:
    score = math.nan if entry["score"] is None else float(entry["score"])
    settings = {str(key): str(value) for key, value in entry["settings"].items()}
    return Member(settings, int(entry["env_steps"]), score, int(entry["copied"]))
