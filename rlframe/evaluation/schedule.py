"""EvaluationSchedule: when a runner evaluates its agent, and the mean returns so far. A runner owns and saves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlframe.core.ranks import Ranks
from rlframe.data.reading import ReferenceScores
from rlframe.evaluation.evaluator import BaseEvaluator, EvaluationStopped, Result, Stop
from rlframe.evaluation.report import RETURN_MEAN


class EvaluationSchedule:
    """Evaluates every `interval_steps` of the runner's clock, and at the end. Its state is equal on all ranks."""

    def __init__(self, evaluator: BaseEvaluator | None, ranks: Ranks, log_interval_steps: int) -> None:
        self._evaluator, self._ranks = evaluator, ranks
        self.interval_steps = (evaluator.interval_steps if evaluator is not None else 0) or log_interval_steps
        self._started = self._finished = -1  # the clock at the start of the newest evaluation, and of one with a result
        self._started_steps = -1  # env_steps at the start of the newest one
        self.updates = self._started_updates = 0  # made now, which the runner sets, and by the start of the newest one
        self._late: list[Result] = []  # results of earlier evaluations that `make` has not returned yet
        self.best, self.best_env_steps = -math.inf, 0  # the highest mean return
        self.final, self.final_env_steps = math.nan, 0  # the newest mean return
        self.since_best = 0  # evaluations
        self.reference: ReferenceScores | None = None  # for normalized scores, which there are none of without

    def passed(self, last: int, now: int) -> bool:
        """Whether an interval has passed since the clock was at `last`."""
        n = self.interval_steps
        return math.isfinite(n) and now // n > last // n

    def is_owed(self, now: int, end_reason: str) -> bool:
        """Whether a training that ends at `now`, if it does, lacks the evaluation there: a stop request ended it."""
        if self._evaluator is None or not end_reason:
            return False
        return self._started < now or bool(self._late or self._ranks.max(int(self._evaluator.busy)))

    @property
    def awaited(self) -> int:
        """env_steps at the start of the evaluation that is running; -1: none is."""
        return self._started_steps if self._started > self._finished else -1

    def make(
        self, now: int, env_steps: int, ending: bool, evaluate: Callable[[], dict[str, float]], stop: Stop
    ) -> tuple[dict[str, float], list[Result]]:
        """Evaluate if it is due; returns the metrics, and results of evaluations that were started earlier.

        At the end of the training it waits for all of them.

        Raises:
            EvaluationStopped: `stop()` returned True on some rank.
        """
        if self._evaluator is None:
            return {}, []
        metrics: dict[str, float] = {}
        busy, last = self._collect(ending, stop), max(self._started, self._finished)
        if not busy and (self.passed(last, now) or (ending and last < now)):
            metrics = self._evaluated(evaluate)
            self._started, self._started_steps, self._started_updates = now, env_steps, self.updates
            if metrics:
                self._finished = now
            self._collect(ending, stop)
        late, self._late = self._late, []
        return metrics, late

    def _evaluated(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The metrics of rank 0, which may be the only one that evaluates; all ranks stop if it does."""
        own: dict[str, float] | None = None
        with suppress(EvaluationStopped):
            own = evaluate()
        found: dict[str, float] | None = self._ranks.broadcast(own)
        if found is None:
            raise EvaluationStopped
        return found

    def _collect(self, wait: bool, stop: Stop) -> bool:
        """Collect the results of earlier evaluations; returns whether one is still running, on some rank."""
        assert self._evaluator is not None
        found = self._ranks.broadcast(self._evaluator.finished(wait, stop))
        if found:
            self._finished = self._started
            version = {"eval/updates": self._started_updates}
            self._late += [(int(env_steps), {**metrics, **version}) for env_steps, metrics in found]
        busy = bool(self._ranks.max(int(self._evaluator.busy)))
        if wait and busy:
            raise EvaluationStopped
        return busy

    def start_again(self, now: int, evaluate: Callable[[], dict[str, float]]) -> None:
        """After a resume: start the evaluation that was running, if the agent is still the same."""
        if self._evaluator is None or not self._finished < self._started == now:
            self._started = self._finished
        elif metrics := self._evaluated(evaluate):  # at once, where it no longer has a process of its own
            self._finished = self._started
            self._late.append((self._started_steps, {**metrics, "eval/updates": self._started_updates}))

    def with_best(self, env_steps: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics with those of the best mean return so far, and the normalized score."""
        found = metrics.get(RETURN_MEAN, math.nan)
        if math.isnan(found):
            return dict(metrics)
        self.final, self.final_env_steps = found, env_steps
        better = found > self.best
        self.since_best = 0 if better else self.since_best + 1
        if better:
            self.best, self.best_env_steps = found, env_steps
        score = {"eval/normalized_score": self.reference.normalized(found)} if self.reference else {}
        return {**metrics, **score, "eval/return_best": self.best, "eval/since_best": self.since_best}

    def state_dict(self) -> dict[str, Any]:
        return {
            "started": [self._started, self._started_steps, self._started_updates],
            "finished": self._finished,
            "late": [[env_steps, dict(metrics)] for env_steps, metrics in self._late],
            "best": [self.best, self.best_env_steps],
            "final": [self.final, self.final_env_steps],
            "since_best": self.since_best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._started, self._started_steps, self._started_updates = state["started"]
        self._finished, self.since_best = state["finished"], state["since_best"]
        self._late = [(env_steps, dict(metrics)) for env_steps, metrics in state["late"]]
        self.best, self.best_env_steps = state["best"]
        self.final, self.final_env_steps = state["final"]
