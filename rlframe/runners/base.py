"""Runner: the training loop that all runners share.

A runner collects batches from a sampler, lets the algorithm learn from them, and logs, evaluates and saves.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from rlframe.core.arguments import checked
from rlframe.core.errors import Interrupted, SnapshotError, one_line, refused
from rlframe.core.ranks import RankLost
from rlframe.core.types import Samples, Trajectory
from rlframe.evaluation.evaluator import BaseEvaluator, EvaluationStopped
from rlframe.evaluation.schedule import EvaluationSchedule
from rlframe.record import current_run
from rlframe.record.metrics import collect_in
from rlframe.rewards.normalize import check_rewards
from rlframe.runners.callbacks import Callback, Callbacks, Clock
from rlframe.runners.config import NO_AFFINITY, RunnerConfig, config_of
from rlframe.runners.described import DescribedBatches
from rlframe.runners.learner import Diverged, Learner, Learners
from rlframe.runners.nonfinite import skip_update
from rlframe.runners.ranks import check_equal, learned, statistics_of
from rlframe.runners.report import (
    Reporting,
    TrainingLog,
    describe_resumed,
    describe_saved,
    load_torch_rng,
    report,
    save_after_error,
    save_snapshot,
    torch_rng_states,
    write_result,
)
from rlframe.runners.standstill import NothingLearned, Standstill
from rlframe.runners.threads import apply_affinity
from rlframe.samplers import Source
from rlframe.system.affinity import Affinity
from rlframe.system.machine import retain_freed_memory
from rlframe.system.signals import OUT_OF_TIME, StopRequest, snapshot_grace_s, stop_request
from rlframe.updates.progress import do_nothing

_LEAST_S = 1e-9  # of a time limit; 0 means none
_BY_CALLBACK = 1  # stop request of a callback; above it: 1 + StopRequest.reason()

_logger = logging.getLogger("rlframe")


class Runner(Reporting):
    """Drives a sampler and learners, and reports to the current run (see record.logger_context).

    However training ends (complete, stopped, an error in an environment), a snapshot is written first. With several
    ranks, an error or death of one ends all of them, and the last snapshot remains.
    """

    @checked
    def __init__(
        self,
        sampler: Source,
        learners: Learner | Mapping[str, Learner],
        options: RunnerConfig,
        evaluator: BaseEvaluator | None = None,
        callbacks: Sequence[Callback] = (),
        stop: str = "",
        affinity: Affinity | Mapping[str, Any] = NO_AFFINITY,
    ) -> None:
        """Args:
            learners: one, or several by name, which the sampler then gives a batch each.
            options: n_steps and log_interval_steps count in units of the runner's clock, over all ranks.
            evaluator: evaluates the agent before training, every `interval_steps`, and at the end; None: no evaluation,
                and target_return compares the mean return of the last training episodes.
            stop: a StopRule: the training ends after the first row for which it holds; empty: none.
            affinity: CPUs and torch threads of this process, see `apply_affinity`; not changed by default.
        Raises:
            ConfigError: parts do not fit together.
        """
        self.sampler, self.learners, self.options, self.evaluator = sampler, Learners(learners), options, evaluator
        self.n_steps, self.log_interval_steps = options.n_steps, options.log_interval_steps
        self.learners.check_agents(sampler, evaluator)
        for learner in self.learners.values():
            check_rewards(sampler, learner.agent, learner.algo, learner.rewards)
            if self.clock is Clock.ENV_STEPS:
                learner.algo.check_run(self.n_steps)
                learner.algo.check_schedules(self.n_steps)
        self.ranks = self.learners.first.algo.progress.ranks
        self.log = TrainingLog(self.ranks, stop, options.window, sampler.batch_spec.n_envs)
        self.callbacks = Callbacks(callbacks)
        self.evaluations = EvaluationSchedule(evaluator, self.ranks, options.log_interval_steps)
        self.updates_left = False  # a stop came between the updates of the newest batch
        self.described = DescribedBatches()
        self.skips_updates = self.empty_batch = False  # an update was skipped; the newest batch has no env step
        self.unfinished = False  # an algorithm's receive or update, in which there was an error
        self.stop = StopRequest()
        self.prepare()
        apply_affinity(affinity)
        self.adapt_threads: Callable[[], None] = do_nothing

    def prepare(self) -> None:
        """Optional: check that sampler and learners fit this runner, and make what it needs besides."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.sampler.close()
        if self.evaluator is not None:
            self.evaluator.close()

    def train(self) -> dict[str, float]:
        """Train to `n_steps`, to a limit, or until stopped; returns the last row of the log, also of an ended run.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGHUP stopped it; a snapshot was written if there was time.
            EnvError, PartError: an environment, a callback or other code failed, or called sys.exit; a snapshot was
                written.
            Diverged: a parameter became NaN or Inf; no snapshot has it.
            NothingLearned: it came to its end without one update.    Idle: it stands still.
        """
        last = dict(self.log.latest)
        with self.stop_request() as self.stop:
            for row in self.rows():
                last = row
        return last

    def stop_request(self, used_s: float = 0.0) -> AbstractContextManager[StopRequest]:
        """Signals and the time limit, of which `used_s` seconds are over, for `stop`."""
        limit = self.options.max_time_s
        left_s = max(limit - used_s, _LEAST_S) if limit else 0.0
        return stop_request(snapshot_grace_s(), left_s, self.ranks.forward_signal)

    def rows(self) -> Generator[dict[str, float]]:
        """Train as `train` does, and give each row of the log once written; signals and max_time_s are the caller's.

        Closed before the end, it writes a snapshot. Advance it in one context of contextvars only.
        """
        retain_freed_memory()
        current_run().begin(self, lambda: config_of(self))
        try:
            how, why = yield from self._rows()
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | GeneratorExit)
            why = str(error) or ("closed before its end" if type(error) is GeneratorExit else type(error).__name__)
            write_result(self, "interrupted" if stopped else "failed", why)
            raise
        write_result(self, how, why)

    def _rows(self) -> Generator[dict[str, float], None, tuple[str, str]]:
        """Returns how and why training ended."""
        request, standstill = 0, Standstill()
        with collect_in(self.log.metrics), self.callbacks.running(self):
            try:
                self.refresh()  # with the exploration that the algorithms have set
                self.log.timers.begin(self.env_steps, self.updates)
                while self._has_work() and not (request := self.stop_requested()):
                    if self.updates_left or not self.report_due():
                        self.adapt_threads()
                        self.iterate()
                        standstill.check(self)
                        continue
                    with suppress(EvaluationStopped):  # it is repeated when the run is resumed
                        yield self.report()
            except (Interrupted, Diverged, RankLost):  # there is no time, or nothing worth saving
                raise
            except BaseException as error:
                save_after_error(self, error)
                raise
            self.check_parameters()
            save_snapshot(self, final=True)
            if request:
                return self._end_early(request)
            if not self.updates and self.now >= self.n_steps:
                raise NothingLearned(self.env_steps)
            if self.now < self.n_steps:
                _logger.info(f"ended at {self.clock.value} {self.now:,}: {self.end_reason}")
        return "completed", self.end_reason

    @abstractmethod
    def iterate(self) -> None:
        """Collect a batch and learn from it; after a stop between updates, make the updates that are left."""

    def collect(self) -> list[tuple[Learner, Samples]]:
        """The next batch of each learner, as the sampler wrote it."""
        return self.learners.batches(self.sampler.collect())

    def receive(self, batches: Sequence[tuple[Learner, Samples]]) -> None:
        """Let learners receive their batches, log the episodes that ended, and call the callbacks, which may raise."""
        if not self.described.n:
            for learner, samples in batches:
                learner.check_batch(samples)
        with self.log.timers("learning"):
            for learner, samples in batches:
                self.log.metrics.learner, self.unfinished = learner.name, True
                learner.receive(samples)
            self.log.metrics.learner, self.unfinished, self.updates_left = "", False, False
        self.described.receive({learner.name: samples for learner, samples in batches}, self.clock.value, self.now)
        self.empty_batch = not any(samples.n_env_steps or not samples.valid.numel() for _, samples in batches)
        finished = self.record_episodes()
        for learner, samples in batches:
            if samples.valid.numel():  # none where there are no environments
                self.callbacks.call_of(learner.name, "on_batch", samples)
        for episode in finished:
            self.callbacks.call("on_episode", episode)

    def update(self, learner: Learner) -> None:
        """Make one update. Raises Diverged if its loss or gradient was NaN or Inf, and runner.nonfinite is stop."""
        progress = learner.algo.progress
        if self.clock is Clock.UPDATES:
            progress.schedule(progress.updates)
        self.log.metrics.learner, self.unfinished = learner.name, True
        metrics = learner.update()
        self.log.metrics.learner, self.unfinished = "", False
        if progress.skipped_updates:
            skip_update(learner, metrics, self.options.nonfinite, first=not self.skips_updates)
            self.skips_updates = True
        with refused(f"{type(learner.algo).__name__}.update"):
            self.log.metrics.add(named := learner.named({f"algo/{name}": value for name, value in metrics.items()}))
        self.callbacks.call_of(learner.name, "on_update", named)
        if self.ranks.world_size > 1 and (found := self._statistics[learner.name]):
            self.ranks.average(found, 1.0)

    @cached_property
    def _statistics(self) -> dict[str, list[Tensor]]:
        """Running statistics of users' networks, which ranks average after each update."""
        return {learner.name: statistics_of(learner) for learner in self.learners.values()}

    def refresh(self) -> None:
        """Let the sampler act with the agents as they are now."""
        for agent in self.learners.acting():
            self.sampler.refresh(agent)

    def record_episodes(self) -> list[Trajectory]:
        """Add the episodes that ended since the last call to the log; returns them. The progress bar moves."""
        with self.log.timers("recording"):
            finished = self.sampler.trajectories()
            least = {x.name: x.algo.least_exploring() for x in self.learners.values() if finished and not x.team}
            self.log.add_episodes(finished, self.env_steps, least)
            current_run().progress(self.now, self.n_steps, self.clock.value)
        return finished

    def report_due(self) -> bool:
        """Whether an interval of log or evaluation has passed since the last row, or the end lacks one or the other."""
        last, now = self.log.last, self.now
        passed = now // self.log_interval_steps > last // self.log_interval_steps or self.evaluations.passed(last, now)
        return passed or last < now >= self.n_steps or (last == now and self.evaluations.is_owed(now, self.end_reason))

    def _has_work(self) -> bool:
        return self.updates_left or self.report_due() or not self.end_reason

    def stop_requested(self) -> int:
        """The strongest stop request of any rank: 0 none, _BY_CALLBACK, or 1 + StopRequest.reason()."""
        reason = self.stop.reason()
        return self.ranks.max(1 + reason if reason else _BY_CALLBACK * bool(self.callbacks.stop_reason))

    def _end_early(self, request: int) -> tuple[str, str]:
        """How and why; raises Interrupted after a signal."""
        where = f"at {self.clock.value} {self.now:,} of {self.n_steps:,}, {describe_saved(self.step)}"
        if request > 1 + OUT_OF_TIME:
            raise Interrupted(request - 1 - OUT_OF_TIME, f"stopped {where}")
        if request > _BY_CALLBACK:
            reason = f"the time is over (runner.max_time_s={self.options.max_time_s:g})"
            _logger.info(f"{reason}: stopped {where}")
            return "out_of_time", reason
        reason = f"by a callback ({next(filter(None, self.ranks.gather(self.callbacks.stop_reason)))})"
        _logger.info(f"stopped {reason} {where}")
        return "stopped", reason

    def report(self) -> dict[str, float]:
        """Evaluate, log a row, and write a snapshot if the run's snapshot mode wants one; returns the row.

        Raises:
            Diverged: a parameter is NaN or Inf.    EvaluationStopped: a stop request ended the evaluation.
            RanksDiffer: the parameters of the ranks are not equal.
        """
        for learner in self.learners.values() if self.ranks.world_size > 1 else ():
            check_equal(learned(learner), self.ranks)
        self.check_parameters()
        self.described.end_interval()
        return report(self)

    def state_dict(self) -> dict[str, Any]:
        """The complete training state, for `load_state_dict`."""
        held = self.unfinished or not self.learners.can_receive()
        return {
            **self.learners.state_dict(),
            "sampler": self.sampler.state_dict(),
            "runner": {"env_steps": self.env_steps, "held": held, **self.log.state_dict()},
            "evaluations": self.evaluations.state_dict(),
            "torch": torch_rng_states(self.learners.first.agent),
            "callbacks": self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a saved state; returns why each environment's episode starts anew, empty where it continues."""
        self.learners.load_state_dict(state)
        self.updates_left = self.clock is Clock.ENV_STEPS and self.learners.updates_due()
        reasons = self.sampler.load_state_dict(state["sampler"])
        self.refresh()
        self.log.load_state_dict(state["runner"])
        self.evaluations.load_state_dict(state["evaluations"])
        load_torch_rng(state["torch"], self.learners.first.agent)
        self.callbacks.load_state_dict(state["callbacks"])
        return reasons

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue the current run from a saved state, and log which episodes start anew.

        Raises:
            SnapshotError: the state was saved by a run with another configuration.
        """
        try:
            reasons = self.load_state_dict(state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            saved, kind = current_run().newest_snapshot() or "the saved state", type(error).__name__
            raise SnapshotError(f"{saved} does not fit this run: {kind}: {one_line(error, 300)}") from error
        current_run().truncate_after(self.step)
        self.evaluations.start_again(self.now, self.evaluate)
        how = describe_resumed(reasons, self.learners.lost(), self.callbacks.lost, bool(state["runner"].get("held")))
        _logger.info(f"resumed at {self.clock.value} {self.now:,}: {how}")
