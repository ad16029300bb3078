"""InitialPriorities: n-step TD errors of new rows by the Q-values that acting computed, for their first priorities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.core.spaces import ACTION_MASK
from rlframe.core.struct import as_numpy
from rlframe.core.types import Samples
from rlframe.replay.columns import write_rows


class InitialPriorities:
    """|G[t] + γ^k max_a Q(row t+k, a) - Q(row t, a[t])|, where Q of a row is what the agent acted by there.

    (Horgan et al. 2018, arXiv 1803.00933, algorithm 1.) Holds Q of the newest rows only.
    """

    def __init__(self, n_times: int, B: int) -> None:
        """`n_times`: time steps held: more than those of a batch, of a return and between two batches together."""
        self._taken, self._best = (np.full((n_times, B), np.nan, np.float32) for _ in range(2))
        self._end = 0  # the time after the newest batch

    def append(self, samples: Samples, start: int) -> None:
        """Hold Q of a batch whose row 0 has the time `start`; `samples.info.q` is [T, B, A]."""
        q = as_numpy(samples.info.q)  # type: ignore[attr-defined]  # QInfo
        observation, choices = samples.inputs.observation, q
        if isinstance(observation, Mapping) and ACTION_MASK in observation:
            allowed = as_numpy(observation[ACTION_MASK])[:-1] != 0
            choices = np.where(allowed | ~allowed.any(-1, keepdims=True), q, -np.inf)
        unknown = np.full((start - self._end, q.shape[1]), np.nan, np.float32)  # nothing acted between the batches
        write_rows(self._best, self._end, unknown)
        write_rows(self._best, start, choices.max(-1))
        write_rows(self._taken, start, np.take_along_axis(q, as_numpy(samples.action)[..., None], -1)[..., 0])
        self._end = start + len(q)

    def of(self, time: np.ndarray, env: np.ndarray, steps: Any, return_: np.ndarray, bootstrap: np.ndarray) -> Any:
        """Errors [n] of the rows (time, env) [n]; NaN where the agent did not act at row t+k."""
        L = len(self._best)
        value = np.where(bootstrap > 0, bootstrap * self._best[(time + steps) % L, env], 0)
        return np.abs(return_ + value - self._taken[time % L, env])

    def state_dict(self) -> dict[str, Any]:
        """The Q-values held; arrays are views."""
        return {"taken": self._taken, "best": self._best, "end": self._end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of the same shapes."""
        self._taken[...], self._best[...], self._end = state["taken"], state["best"], state["end"]
