"""Counts observations outside the bounds that their space states: all of the first rows, then one row a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, leaves, map_tree

_STRICT_ROWS = 1000  # time steps that are looked at whole

_log = logging.getLogger("rlframe")


class BoundsWatch:
    """A bound that does not hold stops nothing, but spoils whatever is scaled by it: it is told once, and counted."""

    def __init__(self, space: Space) -> None:
        parts = action_parts(space, "observation")
        self._boxes = [(i, name, box) for i, (name, box) in enumerate(parts) if _is_bounded(box)]
        self._seen = 0  # rows
        self.n_outside = 0  # observations

    def look(self, observation: Tree) -> None:
        """Look at observations [T+1, B, ...] of a batch, whose last row is the next batch's first."""
        if not self._boxes:
            return
        T = len(leaves(observation)[0]) - 1
        row = self._seen // T % T
        rows = observation if self._seen < _STRICT_ROWS else map_tree(lambda x: x[row : row + 2], observation)
        self._seen += T
        arrays = leaves(rows)
        for i, name, box in self._boxes:
            self._look(arrays[i][:-1], name, box)

    def _look(self, array: np.ndarray, name: str, box: Any) -> None:
        outside = (array < box.low) | (array > box.high)
        if not np.count_nonzero(outside):
            return
        by_env = outside.reshape(*array.shape[:2], -1).any(axis=(0, 2))
        if self.n_outside == 0:
            env, at = int(np.argmax(by_env)), np.argwhere(outside)[0]
            _log.warning(
                f"environment {env}: {name} is {array[tuple(at)]} where its space allows {box.low[tuple(at[2:])]} to "
                f"{box.high[tuple(at[2:])]}; such observations are counted in sampler/out_of_space"
            )
        self.n_outside += int(outside.reshape(*array.shape[:2], -1).any(axis=2).sum())

    def state(self) -> dict[str, int]:
        """How much was looked at, and what was found."""
        return {"seen": self._seen, "outside": self.n_outside}

    def load(self, saved: Mapping[str, int]) -> None:
        """Go on from a saved state."""
        self._seen, self.n_outside = saved["seen"], saved["outside"]

    def counters(self) -> dict[str, float]:
        """The count, if there is one."""
        return {"sampler/out_of_space": self.n_outside} if self.n_outside else {}


def _is_bounded(space: Space) -> bool:
    """A float box with a bound that a value could miss; integers cannot leave the range of their dtype's images."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype != np.uint8
        and bool((np.isfinite(space.low) | np.isfinite(space.high)).any())
    )
