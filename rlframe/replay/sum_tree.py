"""A wide sum tree: numbers drawn in proportion to their priorities, all of a batch at once in NumPy."""

from __future__ import annotations

import numpy as np

WIDTH = 64  # children of a node
_ROOT = 1024  # children of the root, at most: one cumulative sum of them serves a whole batch


class SumTree:
    """float64 priorities of `n` leaves. A parent is recomputed as the sum of its children, so nothing drifts.

    Four million leaves are three levels. Of widths from 16 to 256 none is faster for 32 out of a million: what takes
    time is the number of calls, then the cumulative sums.
    """

    def __init__(self, n: int) -> None:
        """Zeros."""
        self._levels: list[np.ndarray] = []  # [m, WIDTH] each, leaves first
        while not self._levels or n > _ROOT:
            n = -(-n // WIDTH)
            self._levels.append(np.zeros((n, WIDTH)))
        self._root = np.zeros(n)
        self.leaves = self._levels[0].reshape(-1)  # a view
        self._parents = [level.reshape(-1) for level in self._levels[1:]] + [self._root]

    @property
    def total(self) -> float:
        """The sum of all."""
        return float(self._root.cumsum()[-1])

    def set(self, index: np.ndarray, priority: np.ndarray | float) -> None:
        """Set leaves [n]; of several for the same leaf, the last counts."""
        self.leaves[index] = priority
        node = index // WIDTH
        for level, parent in zip(self._levels, self._parents, strict=True):
            if len(node) > WIDTH:
                node = np.unique(node)
            parent[node] = level.take(node, axis=0).sum(axis=1)
            node = node // WIDTH

    def find(self, share: np.ndarray) -> np.ndarray:
        """The leaves within whose parts of the total `share` [n] fall, from 0 to 1; never one of priority 0.

        Raises:
            ValueError: all are 0.
        """
        sums = self._root.cumsum()
        if not sums[-1] > 0:
            raise ValueError("every priority is 0; add a small constant to priorities")
        mass = np.minimum(share * sums[-1], np.nextafter(sums[-1], 0.0))
        node = sums.searchsorted(mass, side="right")
        mass -= sums[node] - self._root[node]
        rows = np.arange(len(mass))
        for level in reversed(self._levels):
            children = level.take(node, axis=0)  # [n, WIDTH]
            sums = children.cumsum(axis=1)
            mass = np.minimum(mass, np.nextafter(sums[:, -1], 0.0))[:, None]  # rounding may have left the node
            child = (sums > mass).argmax(axis=1)
            node = node * WIDTH + child
            if level is not self._levels[0]:
                mass = mass[:, 0] - (sums[rows, child] - children[rows, child])
        return node

    def load(self, leaves: np.ndarray) -> None:
        """Set all leaves."""
        self.leaves[: len(leaves)] = leaves
        for level, parent in zip(self._levels, self._parents, strict=True):
            parent[: len(level)] = level.sum(axis=1)
