"""Runner: the training loop that all runners share.

A runner collects batches from a sampler, lets the algorithm learn from them, and logs, evaluates and saves.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import MappingProxyType
from typing import Any, Self

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.errors import Interrupted, ReadableError, SnapshotError
from rlframe.core.ranks import RankLost
from rlframe.core.types import Samples
from rlframe.evaluation.evaluator import BaseEvaluator, EvaluationStopped, Result
from rlframe.evaluation.report import RETURN_MEAN
from rlframe.evaluation.schedule import EvaluationSchedule
from rlframe.record import current_run
from rlframe.record.metrics import collect_in
from rlframe.rewards.normalize import rewards_for
from rlframe.runners.callbacks import Callback, Callbacks
from rlframe.runners.config import NO_AFFINITY, NO_LIMITS, Clock, Limits
from rlframe.runners.recorded_config import config_of
from rlframe.runners.report import (
    Diverged,
    TrainingLog,
    describe_resumed,
    describe_tree,
    load_torch_rng,
    save_after_error,
    save_snapshot,
    skip_update,
    torch_rng_states,
    write_result,
)
from rlframe.runners.threads import apply_affinity, keep_threads
from rlframe.samplers import Sampler
from rlframe.system.affinity import Affinity
from rlframe.system.machine import retain_freed_memory
from rlframe.system.signals import OUT_OF_TIME, StopRequest, stop_request

_GRACE_S = 7.0  # from a signal to the snapshot; the update or batch in progress must end within it
_LEAST_S = 1e-9  # of a time limit; 0 means none
_BY_CALLBACK = 1  # stop request of a callback; above it: 1 + StopRequest.reason()

_logger = logging.getLogger("rlframe")


class Exited(ReadableError):
    """User code called sys.exit during a run."""

    shows_cause = True


class NothingLearned(ReadableError):
    """A training came to its end without one update."""


class Runner(ABC):
    """Drives sampler, agent and algorithm, and reports to the current run (see record.logger_context).

    However training ends (complete, stopped, an error in an environment), a snapshot is written first. With several
    ranks, an error or death of one ends all of them, and the last snapshot remains.
    """

    clock = Clock.ENV_STEPS

    def __init__(
        self,
        sampler: Sampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int = 10_000,
        evaluator: BaseEvaluator | None = None,
        limits: Limits = NO_LIMITS,
        callbacks: Sequence[Callback] = (),
        affinity: Affinity | Mapping[str, Any] = NO_AFFINITY,
    ) -> None:
        """Args:
            n_steps, log_interval_steps: in units of the runner's clock, over all ranks.
            evaluator: evaluates the agent before training, every `interval_steps`, and at the end; None: no evaluation,
                and the score is the mean return of the last training episodes.
            affinity: CPUs and torch threads of this process, see `apply_affinity`; not changed by default.
        Raises:
            ValueError: n_steps or log_interval_steps is below 1.
        """
        if n_steps < 1 or log_interval_steps < 1:
            found = f"runner.n_steps={n_steps} and runner.log_interval_steps={log_interval_steps}"
            raise ValueError(f"{found} must be at least 1")
        algo.check_run(n_steps)
        self.sampler, self.agent, self.algo, self.evaluator = sampler, agent, algo, evaluator
        self.n_steps, self.log_interval_steps, self.limits = n_steps, log_interval_steps, limits
        self.ranks = algo.progress.ranks
        self.log, self.callbacks = TrainingLog(self.ranks, limits.stop), Callbacks(callbacks)
        self.rewards = rewards_for(sampler, agent, algo)
        self.evaluations = EvaluationSchedule(evaluator, self.ranks, log_interval_steps)
        self.updates_left = False  # a stop came between the updates of the newest batch
        self._described = self.skips_updates = False  # the first batch was; an update was skipped since the start
        self.stop = StopRequest()
        apply_affinity(affinity)
        self.adapt_threads: Callable[[], None] = keep_threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.sampler.close()
        if self.evaluator is not None:
            self.evaluator.close()

    def options(self) -> dict[str, Any]:
        """The values of the fields of its Config that not all runners have."""
        return {}

    @property
    def env_steps(self) -> int:
        """Valid rows trained on, over all ranks."""
        return self.algo.progress.env_steps

    @property
    def now(self) -> int:
        """The runner's clock, over all ranks."""
        return self.env_steps if self.clock is Clock.ENV_STEPS else self.algo.progress.updates

    @property
    def score_name(self) -> str:
        """The metric that target_score and snapshot_mode=best compare."""
        return RETURN_MEAN if self.evaluator is not None else "episode/return_mean"

    def train(self) -> dict[str, float]:
        """Train to `n_steps`, to a limit, or until stopped; returns the last row of the log.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGHUP stopped it; a snapshot was written if there was time.
            EnvError, CallbackError: an environment or a callback failed; a snapshot was written.
            Diverged: a parameter became NaN or Inf; no snapshot has it.
            NothingLearned: it came to its end without one update.    Exited: code of the user's called sys.exit.
        """
        last: dict[str, float] = {}
        with self.stop_request() as self.stop:
            for row in self.rows():
                last = row
        return last

    def stop_request(self, used_s: float = 0.0) -> AbstractContextManager[StopRequest]:
        """Signals and the time limit, of which `used_s` seconds are over, for `stop`."""
        limit = self.limits.max_time_s
        left_s = max(limit - used_s, _LEAST_S) if limit else 0.0
        return stop_request(_GRACE_S, left_s, self.ranks.forward_signal)

    def rows(self) -> Generator[dict[str, float]]:
        """Train as `train` does, and give each row of the log once it is written; signals are left to the caller.

        Closed before the end, it writes a snapshot. Advance it in one context of contextvars only.
        """
        retain_freed_memory()
        try:
            how, why = yield from self._rows()
        except BaseException as error:
            stopped = isinstance(error, Interrupted | GeneratorExit)
            write_result(self, "interrupted" if stopped else "failed", str(error) or "closed before its end")
            raise
        write_result(self, how, why)

    def _rows(self) -> Generator[dict[str, float], None, tuple[str, str]]:
        """Returns how and why training ended."""
        request = 0
        current_run().record_config(lambda: config_of(self))
        with collect_in(self.log.metrics), self.callbacks.running(self):
            try:
                self.sampler.refresh(self.agent)  # with the exploration that the algorithm has set
                if self.evaluator is not None:
                    self.evaluator.film_in(current_run().film_folder)
                self.log.timers.begin(self.env_steps, self.algo.progress.updates)
                while self._has_work() and not (request := self.stop_requested()):
                    if self.updates_left or not self.report_due():
                        self.adapt_threads()
                        self.iterate()
                        continue
                    with suppress(EvaluationStopped):  # it is repeated when the run is resumed
                        yield self.report()
            except (Interrupted, Diverged, RankLost):  # there is no time, or nothing worth saving
                raise
            except BaseException as error:
                self._check_parameters(error)
                if self.ranks.world_size == 1:  # a snapshot needs all ranks, and the others may not save now
                    save_after_error(self)
                if isinstance(error, SystemExit):  # which would end the run midway without a word
                    raise Exited(
                        f"sys.exit({error.code}) was called at env_steps {self.env_steps:,} of {self.n_steps:,}, by "
                        f"the environment, a callback or a network; raise an exception instead"
                    ) from error
                raise
            self._check_parameters()
            save_snapshot(self, final=True)
            if request:
                return self._end_early(request)
            if not self.algo.progress.updates and self.now >= self.n_steps:
                raise NothingLearned(
                    f"nothing was learned in {self.env_steps:,} env_steps: no update was due, or replay never had rows "
                    f"to learn from; look at algo.learning_starts, and at the lengths of batches and sequences"
                )
            if self.now < self.n_steps:
                _logger.info(f"ended at {self.clock.value} {self.now:,}: {self.end_reason}")
        return "completed", self.end_reason

    @abstractmethod
    def iterate(self) -> None:
        """Collect a batch and learn from it; after a stop between updates, make the updates that are left."""

    def update(self) -> None:
        """Make one update.

        Raises:
            Diverged: its loss or gradient was NaN or Inf, and `limits.nonfinite` is stop.
        """
        metrics = self.algo.update()
        if self.algo.progress.skipped_updates:
            skip_update(self, metrics)
        self.log.metrics.add(named := {f"algo/{name}": value for name, value in metrics.items()})
        self.callbacks.call("on_update", named)

    def received(self, samples: Samples) -> None:
        """Call the callbacks with a batch that the algorithm has received; the first is described in debug.log."""
        if not self._described:
            self._described = True
            _logger.debug("first batch:\n%s", "\n".join(describe_tree(samples, "samples")))
        if samples.valid.numel():  # none where there are no environments
            self.callbacks.call("on_batch", samples)

    def record_episodes(self) -> None:
        """Add the episodes that ended to the log, and move the progress bar."""
        with self.log.timers("recording"):
            finished = self.sampler.trajectories()
            self.log.add_episodes(finished, self.env_steps, self.algo.greediest() if finished else range(0))
            current_run().progress(self.now, self.n_steps)
        self.callbacks.call_each("on_episode", finished)

    @property
    def end_reason(self) -> str:
        """Why the training is complete; empty if it is not."""
        score = self.log.latest.get(self.score_name, math.nan)
        if score >= self.limits.target_score:
            return f"{self.score_name} {score:g} is at least runner.target_score={self.limits.target_score:g}"
        if self.log.rule_holds:
            return f"stop={self.limits.stop!r} holds"
        if self.now >= self.n_steps:
            return f"it has {self.now:,} of {self.n_steps:,} {self.clock.value}"
        return ""

    def report_due(self) -> bool:
        """Whether an interval of the log or of evaluation has passed since the last row, or the end has no row yet."""
        last, now = self.log.last, self.now
        passed = now // self.log_interval_steps > last // self.log_interval_steps
        return passed or self.evaluations.passed(last, now) or last < now >= self.n_steps

    def _has_work(self) -> bool:
        return self.updates_left or self.report_due() or not self.end_reason

    def stop_requested(self) -> int:
        """The strongest stop request of any rank: 0 none, _BY_CALLBACK, or 1 + StopRequest.reason()."""
        reason = self.stop.reason()
        return self.ranks.max(1 + reason if reason else _BY_CALLBACK * bool(self.callbacks.stop_reason))

    def _end_early(self, request: int) -> tuple[str, str]:
        """How and why; raises Interrupted after a signal."""
        where = f"at {self.clock.value} {self.now:,} of {self.n_steps:,}, snapshot written; resume= continues the run"
        if request > 1 + OUT_OF_TIME:
            raise Interrupted(request - 1 - OUT_OF_TIME, f"stopped {where}")
        if request > _BY_CALLBACK:
            reason = f"the time is over (runner.max_time_s={self.limits.max_time_s:g})"
            _logger.info(f"{reason}: stopped {where}")
            return "out_of_time", reason
        reason = f"by a callback ({next(filter(None, self.ranks.gather(self.callbacks.stop_reason)))})"
        _logger.info(f"stopped {reason} {where}")
        return "stopped", reason

    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation with the current parameters; empty without an evaluator."""
        if self.evaluator is None:
            return {}
        return self.evaluator.evaluate(self.env_steps, self.stop.__bool__)

    def counters(self) -> dict[str, float]:
        """Metrics of this runner since the last call."""
        return {}

    def report(self) -> dict[str, float]:
        """Evaluate, log a row, and write a snapshot if the run's snapshot mode wants one.

        Returns the row, with the metrics of an evaluation that has ended since the one before.

        Raises:
            Diverged: a parameter is NaN or Inf.    EvaluationStopped: a stop request ended the evaluation.
        """
        self._check_parameters()
        evaluation, late = self._evaluate_if_due()
        row = self._log_row(self.evaluations.with_best(self.env_steps, evaluation))
        late = self._log_late(late)
        if self.end_reason:  # which this row may have brought about: the agent is evaluated as it is now
            evaluation, more = self._evaluate_if_due()
            late += self._log_late([*more, *([(self.env_steps, evaluation)] if evaluation else [])])
        with self.log.timers("recording"):
            current_run().await_score(self.evaluations.awaited)
            save_snapshot(self, final=False)
            for env_steps, metrics in late:
                current_run().score_snapshot(env_steps, metrics)
        return {**row, **(late[-1][1] if late else {})}

    def _evaluate_if_due(self) -> tuple[dict[str, float], list[Result]]:
        with self.log.timers("evaluating"):
            ending, stop = bool(self.end_reason), self.stop.__bool__
            return self.evaluations.make(self.now, self.env_steps, ending, self.evaluate, stop)

    def _log_row(self, evaluation: Mapping[str, float]) -> dict[str, float]:
        counters = {**self.sampler.counters(), **self.algo.counters(), **self.counters()}
        if self.algo.progress.skipped:
            counters["algo/refused"] = self.algo.progress.skipped
        row = self.log.row(self.algo.progress, evaluation, counters)
        self.log.score = row.get(self.score_name, math.nan)
        try:
            if evaluation:
                self.callbacks.call("on_evaluation", MappingProxyType(evaluation))
            self.callbacks.call("on_log", MappingProxyType(row))
        finally:  # what was measured is logged although a callback fails
            row |= self.log.metrics.flush()  # what on_log logged
            with self.log.timers("recording"):
                current_run().log(row)
            self.log.last = self.now  # before the snapshot, which has it
            self.log.follow(row)
        return row

    def _log_late(self, late: Sequence[Result]) -> list[Result]:
        """Log evaluations that were started earlier, each as a row of its own; returns them with the best score."""
        found = [(env_steps, self.evaluations.with_best(env_steps, metrics)) for env_steps, metrics in late]
        for env_steps, metrics in found:
            current_run().log_evaluation({"env_steps": env_steps, **metrics})
            self.log.follow(metrics)
            self.callbacks.call("on_evaluation", MappingProxyType(metrics))
        return found

    def _check_parameters(self, cause: BaseException | None = None) -> None:
        if rate := self.algo.progress.diverged(self.agent.parameters()):
            raise Diverged(
                f"training diverged: at env_steps {self.env_steps:,} a parameter is NaN or Inf; the last "
                f"snapshot is from before. Try a lower learning rate ({rate}) or smaller rewards"
            ) from cause

    def state_dict(self) -> dict[str, Any]:
        """The complete training state, for `load_state_dict`."""
        return {
            "agent": self.agent.state_dict(),
            "algo": self.algo.state_dict(),
            "sampler": self.sampler.state_dict(),
            "rewards": self.rewards.state_dict(),
            "runner": {"env_steps": self.env_steps, **self.log.state_dict()},
            "evaluations": self.evaluations.state_dict(),
            "torch": torch_rng_states(self.agent),
            "callbacks": self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a saved state; returns why each environment's episode starts anew, empty where it continues."""
        self.agent.load_state_dict(state["agent"])
        self.algo.load_state_dict(state["algo"])
        self.updates_left = bool(self.algo.updates_due())
        reasons = self.sampler.load_state_dict(state["sampler"])
        self.rewards.load_state_dict(state["rewards"], reasons)
        self.sampler.refresh(self.agent)
        self.log.load_state_dict(state["runner"])
        self.evaluations.load_state_dict(state["evaluations"])
        load_torch_rng(state["torch"], self.agent)
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
            what = str(error).partition("\n")[0]
            saved = current_run().newest_snapshot() or "the saved state"
            raise SnapshotError(f"{saved} does not fit this run: {type(error).__name__}: {what}") from error
        current_run().trim(self.env_steps)
        self.evaluations.start_again(self.now, self.evaluate)
        _logger.info(f"resumed at env_steps {self.env_steps:,}: {describe_resumed(reasons)}")
