"""Episode: the record of one episode, as data sets hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlframe.core.struct import Tree


@dataclass(frozen=True, eq=False)
class Episode:
    """One episode of T env steps, canonical observations and actions (see core.spaces)."""

    observation: Tree  # [T+1, *obs] tree of NumPy arrays
    action: Tree  # [T, *act]
    reward: np.ndarray  # [T] float32
    terminated: np.ndarray  # [T] bool
    truncated: np.ndarray  # [T] bool
    info: Mapping[str, np.ndarray]  # [T, ...] such as log_prob [T], of the behaviour policy
