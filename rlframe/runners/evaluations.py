"""Evaluations: when a runner evaluates its agent, and the scores so far. Owned by a runner and saved with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlframe.core.ranks import Ranks
from rlframe.samplers.evaluator import BaseEvaluator, EvaluationStopped, Result, Stop

SCORE = "eval/return_mean"


class Evaluations:
    """Evaluates every `interval_steps` of the runner's clock, and at the end."""

    def __init__(self, evaluator: BaseEvaluator | None, ranks: Ranks, log_interval_steps: int, n_steps: int) -> None:
        self._evaluator, self._ranks, self._n_steps = evaluator, ranks, n_steps
        self.interval_steps = (evaluator.interval_steps if evaluator is not None else 0) or log_interval_steps
        self._started = self._finished = -1  # the clock at the start of the newest evaluation, and of one with a result
        self.best, self.best_env_steps = -math.inf, 0  # the highest score
        self.since_best = 0  # evaluations

    def passed(self, last: int, now: int) -> bool:
        """Whether an interval has passed since the clock was at `last`."""
        n = self.interval_steps
        return math.isfinite(n) and now // n > last // n

    def due(self, now: int) -> bool:
        last = max(self._started, self._finished)
        return self._evaluator is not None and (self.passed(last, now) or last < now >= self._n_steps)

    def make(
        self, now: int, evaluate: Callable[[], dict[str, float]], stop: Stop
    ) -> tuple[dict[str, float], list[Result]]:
        """Evaluate if it is due; returns the metrics, and results of evaluations that were started earlier.

        At the end it waits for all of them.

        Raises:
            EvaluationStopped: `stop()` returned True on some rank.
        """
        if self._evaluator is None:
            return {}, []
        ending = now >= self._n_steps
        late, metrics = self._late(ending, stop), {}
        if self.due(now) and not self._ranks.max(int(self._evaluator.busy)):
            metrics = evaluate()
            self._started = now
            late += self._late(ending, stop)
            if metrics:
                self._finished = now
        return metrics, late

    def _late(self, wait: bool, stop: Stop) -> list[Result]:
        assert self._evaluator is not None
        found = self._ranks.broadcast(self._evaluator.finished(wait, stop))
        if wait and self._ranks.max(int(self._evaluator.busy)):
            raise EvaluationStopped
        if found:
            self._finished = self._started
        return [(int(env_steps), dict(metrics)) for env_steps, metrics in found]

    def scored(self, env_steps: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics with those of the best score so far."""
        score = metrics.get(SCORE, math.nan)
        if math.isnan(score):
            return dict(metrics)
        better = score > self.best
        self.since_best = 0 if better else self.since_best + 1
        if better:
            self.best, self.best_env_steps = score, env_steps
        return {**metrics, "eval/return_best": self.best, "eval/since_best": self.since_best}

    def state_dict(self) -> dict[str, Any]:
        return {
            "finished": self._finished,  # one that is running now is made again after a resume
            "best": self.best,
            "best_env_steps": self.best_env_steps,
            "since_best": self.since_best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._finished, self.best = state["finished"], state["best"]
        self.best_env_steps, self.since_best = state["best_env_steps"], state["since_best"]
