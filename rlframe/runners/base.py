"""The training loop, and what every runner reports, saves and resumes."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.algos.base import UpdateMetrics
from rlframe.core.config import choice, count, option
from rlframe.core.errors import ConfigError, Interrupted, ReadableError, RecordError, SnapshotError
from rlframe.core.ranks import RankLost
from rlframe.core.types import Trajectory
from rlframe.record import Metrics, Timers, current_run
from rlframe.record.metrics import over_ranks
from rlframe.record.rank_state import RankEntry, write_rank_state
from rlframe.runners.nonfinite import keep_refused
from rlframe.samplers import Sampler
from rlframe.samplers.evaluator import EvaluationStopped, summarize
from rlframe.system.machine import resident_bytes, retain_freed_memory
from rlframe.system.signals import OUT_OF_TIME, StopRequest, stop_request

_RECENT_EPISODES = 100  # that episode/return_mean is over
_GRACE_S = 7.0  # from a signal to the snapshot: the update or the batch that is under way has so long
NONFINITE = ("stop", "skip")
_LOOK_UPDATES = 8  # updates between looks at whether a rank was asked to stop

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class Limits:
    """What ends a training early."""

    max_time_s: float = 0.0  # of this start, then a snapshot and an end in order; 0: none
    nonfinite: str = "stop"  # at an update whose loss or gradient is NaN or Inf; or skip it
    target_score: float = math.inf  # of a report, which is then the last

    def __post_init__(self) -> None:
        if not 0 <= self.max_time_s < math.inf or self.nonfinite not in NONFINITE:
            raise ValueError(
                f"runner.max_time_s={self.max_time_s} must be finite and at least 0, "
                f"runner.nonfinite={self.nonfinite!r} one of {', '.join(NONFINITE)}"
            )
        if math.isnan(self.target_score):
            raise ValueError("runner.target_score=nan must be a number, or inf for none")


NO_LIMITS = Limits()


@chz.chz
class RunnerConfig:
    """What every runner's Config has."""

    n_steps: int = count(1_000_000, "env_steps to train, over all ranks")
    log_interval_steps: int = count(10_000, "env_steps between rows of the log, evaluations if any, and snapshots")
    max_time_s: float = option(0.0, "seconds of this start, after which a snapshot is written and it ends; 0: no limit")
    target_score: float = option(
        math.inf, "eval/return_mean, or without evaluation episode/return_mean, at which it ends; inf: none"
    )
    nonfinite: str = choice("stop", NONFINITE, "the run, or just the update, where a loss or gradient is NaN or Inf")

    @chz.validate
    def _check_limits(self) -> None:
        try:
            self.limits()
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def limits(self) -> Limits:
        """What ends a training early."""
        return Limits(self.max_time_s, self.nonfinite, self.target_score)


class Diverged(ReadableError):
    """A loss, gradient or parameter became NaN or Inf: nothing that is learned from here on is worth saving."""


class Runner(ABC):
    """Drives sampler, agent and algorithm, and reports to the current run (see record.logger_context).

    Whatever ends the training - its end, Ctrl-C, an error in an environment - what was learned is saved first. Where
    several ranks train together, an error or a death of one ends them all, and the last snapshot stays.
    """

    score_name: str  # the metric by which snapshot_mode=best compares

    def __init__(
        self,
        sampler: Sampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int = 10_000,
        limits: Limits = NO_LIMITS,
    ) -> None:
        if n_steps < 1 or log_interval_steps < 1:
            raise ValueError(
                f"runner.n_steps={n_steps} and runner.log_interval_steps={log_interval_steps} must be at least 1"
            )
        self.sampler, self.agent, self.algo = sampler, agent, algo
        self.n_steps, self.log_interval_steps, self.limits = n_steps, log_interval_steps, limits
        self.metrics, self.clock = Metrics(), Timers()
        self.ranks = algo.progress.ranks
        self.recent: deque[Trajectory] = deque(maxlen=-(-_RECENT_EPISODES // self.ranks.world_size))  # of this rank
        self.n_episodes = 0  # of this rank
        self.reported = -1  # env_steps of the last report; -1: none yet
        self.score = math.nan
        self.half_done = False  # updates of the newest batch are left, which a stop came before
        self.skips_updates = False  # some were refused since the start
        self.stop = StopRequest()

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Score the agent apart from training; empty if this runner does not."""

    def counters(self) -> dict[str, float]:
        """Metrics of the runner's own for the log, since the last call; none where there is nothing to tell."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close what the runner was given."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def env_steps(self) -> int:
        """Valid rows trained on, over all ranks."""
        return self.algo.progress.env_steps

    def train(self) -> dict[str, float]:
        """Train to `n_steps`, or until the time is over; returns the last row of the log.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGHUP asked it to stop; a snapshot was written, if it came to that in time.
            EnvError: an environment failed; a snapshot was written.
            Diverged: a parameter became NaN or Inf; no snapshot has it.
        """
        retain_freed_memory()
        row: dict[str, float] = {}
        asked = 0
        with stop_request(_GRACE_S, self.limits.max_time_s, self.ranks.forward_signal) as self.stop:
            try:
                self.sampler.refresh(self.agent)  # whose exploration the algorithm has set
                self.clock.begin(self.env_steps, self.algo.progress.updates)
                while self._goes_on() and not (asked := self._asked()):
                    if self.half_done or not self.due():
                        self.iterate()
                        continue
                    with suppress(EvaluationStopped):  # of which nothing is left: it is made when the run goes on
                        row = self.report()
            except (Interrupted, Diverged, RankLost):  # asked a second time: at once; or nothing can be saved
                raise
            except BaseException as error:
                self._check_parameters(error)
                if self.ranks.world_size == 1:  # others are elsewhere, and what they hold is part of a snapshot
                    self._try_to_save()
                raise
            self._check_parameters()
            self.save()
            if asked:
                self._tell_of_stop(asked)
            elif self.env_steps < self.n_steps:
                _logger.info(f"ended at env_steps {self.env_steps:,}: {self.done}")
        return row

    @property
    def done(self) -> str:
        """Why nothing is left to train; empty while something is."""
        if self.score >= self.limits.target_score:
            return f"{self.score_name} {self.score:g} is at least runner.target_score={self.limits.target_score:g}"
        if self.env_steps >= self.n_steps:
            return f"it has {self.env_steps:,} of {self.n_steps:,} env_steps"
        return ""

    def _goes_on(self) -> bool:
        return self.half_done or self.due() or not self.done

    def _asked(self) -> int:
        """What some rank was asked to stop for; see StopRequest.reason."""
        return self.ranks.max(self.stop.reason())

    def _tell_of_stop(self, asked: int) -> None:
        where = f"at env_steps {self.env_steps:,} of {self.n_steps:,}, snapshot written; go on with resume="
        if asked > OUT_OF_TIME:
            raise Interrupted(asked - OUT_OF_TIME, f"stopped {where}")
        _logger.info(f"the time is over (runner.max_time_s={self.limits.max_time_s:g}): stopped {where}")

    def iterate(self) -> None:
        """One batch: sample, learn, hand the parameters on; or the rest of one that a stop has left half done."""
        if not self.half_done:
            with self.clock("sampling"):
                self.algo.prefetch()
                samples = self.sampler.collect()
            with self.clock("learning"):
                self.algo.receive(samples)
            self.follow()
        with self.clock("learning"):
            self.half_done = not self._learn()
        if not self.half_done:
            self.sampler.refresh(self.agent)

    def _learn(self) -> bool:
        """Make the updates that are due; False if a stop leaves some of many, which the algorithm's state has."""
        n = 0
        while self.algo.updates_due():
            if n and n % _LOOK_UPDATES == 0 and self._asked():
                return False
            self.update()
            n += 1
        return True

    def update(self) -> None:
        """Learn once.

        Raises:
            Diverged: the update was not finite and so not made, where `limits` do not say to skip it.
        """
        metrics = self.algo.update()
        if self.algo.progress.skipped_updates:
            self._refuse(metrics)
        self.metrics.add({f"algo/{name}": value for name, value in metrics.items()})

    def _refuse(self, metrics: UpdateMetrics) -> None:
        refusal, again = self.algo.progress.skipped_updates.pop(), self.skips_updates
        if self.limits.nonfinite == "stop":
            newest = current_run().newest_snapshot()
            raise Diverged(
                f"{keep_refused(self.agent, self.algo, refusal, metrics)}. "
                f"The last good snapshot is {newest or 'none'}. Try a lower learning rate (algo.learning_rate) or "
                f"smaller rewards; runner.nonfinite=skip goes on without such updates"
            )
        self.skips_updates = True
        if not again:  # the first is looked at, all are counted
            _logger.warning("%s; it is skipped", keep_refused(self.agent, self.algo, refusal, metrics))

    def follow(self) -> None:
        """Take note of the episodes that ended, and of the progress."""
        with self.clock("recording"):
            finished = self.sampler.trajectories()
            self.n_episodes += len(finished)
            self.recent.extend(finished)
            current_run().progress(self.env_steps, self.n_steps)

    def due(self) -> bool:
        """Whether an interval has passed since the last report, or the end is reached that has none yet."""
        passed = self.env_steps // self.log_interval_steps > self.reported // self.log_interval_steps
        return passed or self.reported < self.env_steps >= self.n_steps

    def _check_parameters(self, cause: BaseException | None = None) -> None:
        if not all(bool(x.isfinite().all()) for x in [*self.agent.parameters(), *self.algo.progress.learned]):
            raise Diverged(
                f"training diverged: at env_steps {self.env_steps:,} a parameter is NaN or Inf; the last "
                f"snapshot is from before. Try a lower learning rate (algo.learning_rate) or smaller rewards"
            ) from cause

    def report(self) -> dict[str, float]:
        """Evaluate, write one row of the log, and snapshot by the run's mode.

        Raises:
            Diverged: a parameter is NaN or Inf.    EvaluationStopped: a stop broke the evaluation off.
        """
        self._check_parameters()
        with self.clock("evaluating"):
            evaluation = self.evaluate()
        own = {
            "env_steps": self.env_steps,
            "updates": self.algo.progress.updates,
            **evaluation,
            **self._episodes(),
            **self.sampler.counters(),
            **self.algo.counters(),
            **({"algo/refused": self.algo.progress.skipped} if self.algo.progress.skipped else {}),
            **self.counters(),
            "memory/resident_mb": resident_bytes() / 1e6,
            **self.clock.flush(self.env_steps, self.algo.progress.updates),
            **self.metrics.flush(),
        }
        row = over_ranks(self.ranks.gather(own))
        self.score = row.get(self.score_name, math.nan)
        with self.clock("recording"):
            current_run().log(row)
            self.reported = self.env_steps  # before the snapshot, which keeps it
            self._snapshot(final=False)
        return row

    def save(self) -> None:
        """Snapshot what was learned since the last report."""
        self._snapshot(final=True)

    def _try_to_save(self) -> None:
        """Where an error ends the run, that is what it is told of, also where the disk refuses."""
        try:
            self.save()
        except RecordError as refused:
            _logger.warning("%s", refused)

    def _snapshot(self, final: bool) -> None:
        run, updates = current_run(), self.algo.progress.updates
        if self.ranks.broadcast(run.snapshot_due(self.env_steps, final)):
            with self.stop.protect():
                run.snapshot(
                    self.state_dict,
                    self.env_steps,
                    self.score,
                    updates=updates,
                    final=final,
                    other_ranks=self._states_of_others,
                )

    def _states_of_others(self, folder: Path) -> list[RankEntry]:
        """Every rank but the first writes its own state where the first one writes the snapshot."""
        folder, rank = self.ranks.broadcast(folder), self.ranks.rank
        own = [write_rank_state(folder, rank, self.state_dict())] if rank else []
        return [part for parts in self.ranks.gather(own) for part in parts]

    def _episodes(self) -> dict[str, float]:
        recent = [trajectory for of_rank in self.ranks.gather(list(self.recent)) for trajectory in of_rank]
        row = summarize(recent, "episode")
        if n_episodes := self.ranks.sum(self.n_episodes):
            row["episode/count"] = n_episodes
        sums: dict[str, list[float]] = {}
        for trajectory in recent:
            for name, value in trajectory.diagnostics.items():
                sums.setdefault(name, []).append(value)
        return {**row, **{f"env/{name}": sum(found) / len(found) for name, found in sums.items()}}

    def state_dict(self) -> dict[str, Any]:
        """The complete training state: what `load_state_dict` needs to go on."""
        return {
            "agent": self.agent.state_dict(),
            "algo": self.algo.state_dict(),
            "sampler": self.sampler.state_dict(),
            "runner": {
                "env_steps": self.env_steps,
                "reported": self.reported,
                "score": self.score,
                "metrics": self.metrics.state_dict(),
                "n_episodes": self.n_episodes,
                "elapsed_s": self.clock.elapsed_s(),
                "recent": [[t.return_, t.length, t.terminated, t.env, dict(t.diagnostics)] for t in self.recent],
            },
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, in the run it was saved in; says what of it starts anew, if anything does."""
        try:
            reasons = self.load_state_dict(state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            what = str(error).partition("\n")[0]
            raise SnapshotError(
                f"{current_run().newest_snapshot()} does not fit this run: {type(error).__name__}: {what}"
            ) from error
        current_run().trim(self.env_steps)
        _logger.info(f"resumed at env_steps {self.env_steps:,}: {_told(reasons)}")

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take on a saved state; for each environment why its episode begins anew, empty where it goes on."""
        self.agent.load_state_dict(state["agent"])
        self.algo.load_state_dict(state["algo"])
        self.half_done = bool(self.algo.updates_due())
        reasons = self.sampler.load_state_dict(state["sampler"])
        self.sampler.refresh(self.agent)
        runner = state["runner"]
        self.reported, self.n_episodes = runner["reported"], runner["n_episodes"]
        self.clock = Timers(runner["elapsed_s"])
        self.recent.extend(Trajectory(*fields) for fields in runner["recent"])
        self.score = runner["score"]
        self.metrics.load_state_dict(runner["metrics"])
        return reasons


def _told(reasons: list[str]) -> str:
    """What a resumed run's log says of its environments."""
    anew = [reason for reason in reasons if reason]
    if not anew:
        return "everything goes on as if it had never stopped, episodes included"
    why = "; ".join(dict.fromkeys(anew))
    return f"parameters, optimizer and counts go on; {len(anew)} of {len(reasons)} running episodes start anew ({why})"
