"""Frozen: the algorithm of a policy that plays and does not learn, such as an opponent from another run."""

from __future__ import annotations

from typing import Any

from rlframe.algos.base import Algorithm, Progress, UpdateMetrics
from rlframe.core.types import Samples


class Frozen(Algorithm):
    """Counts what its agent plays."""

    saved = ("progress",)

    def __init__(self, config: Any) -> None:
        """`config`: of the algorithm that made the agent, to be recorded."""
        self.config, self.progress = config, Progress()

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)

    def updates_due(self) -> int:
        return 0

    def update(self) -> UpdateMetrics:
        return {}
