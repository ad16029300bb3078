"""The actions of running episodes, kept so that an episode can be played again from its start."""

from __future__ import annotations

from collections import deque

import numpy as np

from rlframe.core.struct import Tree, leaves, map_tree

_MOST = 100_000  # steps: longer episodes cannot be played again, for want of memory and patience


class Trail:
    """Of n environments that step together. Steps that no running episode needs are forgotten."""

    def __init__(self, n: int) -> None:
        self._steps: deque[Tree] = deque(maxlen=_MOST)  # [n, ...] each
        self._n_seen = 0  # steps so far
        self._starts = np.full(n, -1, np.int64)  # the step of each episode's first action; -1: before all that was seen
        self._before: list[Tree] = [()] * n  # actions [k, ...] of the episode before that step; () for none

    def add(self, action: Tree) -> None:
        """Keep a copy of the actions [n, ...] of one step."""
        self._steps.append(map_tree(np.copy, action))
        self._n_seen += 1

    def restart(self, index: int, before: Tree = ()) -> None:
        """The episode of environment `index` begins with the next step; or it goes on, after actions `before`."""
        self._starts[index], self._before[index] = self._n_seen, before
        oldest = int(self._starts.min())
        while self._steps and self._n_seen - len(self._steps) < oldest:
            self._steps.popleft()

    def actions(self, index: int) -> Tree | None:
        """Those of the running episode [k, ...]; None where its start was not seen or is too long ago."""
        start = int(self._starts[index])
        n = self._n_seen - start
        if start < 0 or n > len(self._steps):
            return None
        own = [map_tree(lambda x: x[index], action) for action in list(self._steps)[len(self._steps) - n :]]
        before = self._before[index]
        if not own:
            return before
        stacked = map_tree(lambda *each: np.stack(each), *own)
        return stacked if not leaves(before) else map_tree(lambda *each: np.concatenate(each), before, stacked)
