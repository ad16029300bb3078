"""Reference scores: the returns that a dataset names, of a random policy and of an expert, and scores between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEYS = ("ref_min_score", "ref_max_score")  # in the metadata, as in Minari


@dataclass(frozen=True)
class ReferenceScores:
    """Mean returns of episodes."""

    random: float  # of a random policy
    expert: float

    def normalized(self, return_: Any) -> Any:
        """100 (G - random) / (expert - random), of returns of any shape: 0 is random, 100 the expert.

        (Fu et al. 2020, D4RL, arXiv 2004.07219, section 5; Minari's get_normalized_score is a hundredth of it)
        """
        return 100 * (return_ - self.random) / (self.expert - self.random)


def reference_scores(metadata: Mapping[str, Any]) -> ReferenceScores | None:
    """Those of a dataset's metadata; None if it has not two different numbers."""
    low, high = (metadata.get(key) for key in KEYS)
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e30 for x in (low, high))
    if low is None or high is None or not numbers or not math.isfinite(low + high) or low == high:
        return None
    return ReferenceScores(float(low), float(high))
