"""EstimateEvaluator: estimates in place of evaluation episodes, for training from data without an environment."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import warn_once
from rlframe.data.episodes import Episode
from rlframe.evaluation.estimate import EstimateConfig, check_estimate, estimate
from rlframe.evaluation.evaluator import BaseEvaluator, Stop, never
from rlframe.evaluation.target_policy import target_policy

_log = logging.getLogger("rlframe")


class EstimateEvaluator(BaseEvaluator):
    """Logs estimate/<method>, _low and _high: what the current agent, with its noise, is worth by a dataset.

    There is no eval/return_mean, so agents are not compared by it. The same parameters give the same estimates.
    """

    def __init__(
        self,
        agent: Agent,
        spaces: tuple[Space, Space],
        episodes: Iterable[Episode],
        discount: float,
        methods: Sequence[str],
        seed: int = 0,
        interval_steps: float = 0.0,
        config: EstimateConfig = EstimateConfig(),  # noqa: B008  # frozen
        explore: bool = True,
        epsilon: float = math.nan,
    ) -> None:
        """Args:
            spaces: of observations and actions.    episodes: kept in memory.
            discount, methods, config: see `estimate`.    explore, epsilon: see `target_policy`.
        Raises:
            ConfigError: an unknown method, the probabilities of the agent's actions are not known, or episodes that do
                not fit.
        """
        self._explores, self._noted = (explore, epsilon), False
        self.interval_steps = interval_steps
        self._agent, self._spaces, self._episodes = agent, spaces, list(episodes)
        check_estimate(methods, target_policy(agent, *spaces, *self._explores), self._episodes, discount, "eval.")
        self._discount, self._methods, self._seed, self._config = discount, tuple(methods), seed, config

    def evaluate(self, number: int, stop: Stop = never) -> dict[str, float]:
        policy = target_policy(self._agent, *self._spaces, *self._explores)
        report = estimate(policy, self._episodes, self._discount, self._methods, self._seed, self._config)
        for note in () if self._noted else report.notes():
            _log.info(f"estimates: {note}")
        self._noted = True
        if report.warning:
            warn_once(f"estimates: {report.warning}")
        return report.metrics()
