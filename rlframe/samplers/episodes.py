"""Episodes: adds up scores and lengths from the rows of each batch and keeps the episodes that ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlframe.core.types import Trajectory
from rlframe.envs.rows import Rows
from rlframe.envs.stepper import Events


class EpisodeTracker:
    """Follows every environment's running episode, a batch at a time; the same in every sampler."""

    def __init__(self, n: int) -> None:
        self.return_ = np.zeros(n)
        self.length = np.zeros(n, np.int64)
        self.partial = np.zeros(n, bool)  # others than the agent have acted in the running episode
        self.finished: list[Trajectory] = []

    def follow(self, rows: Rows, events: Iterable[Events]) -> None:
        """Account for a batch; finished episodes in the order of their end, then of their environment."""
        events = list(events)
        if not np.count_nonzero(rows.ended) and not any(each.cuts for each in events):
            self._go_on(rows)
            return
        diagnostics = {(note.t, note.env): note.means for each in events for note in each.diagnostics}
        cuts = {(cut.t, env) for each in events for cut in each.cuts for env in range(cut.lo, cut.hi)}
        ends = [(int(t), int(env)) for t, env in np.argwhere(rows.ended)]
        start = np.zeros(len(self.length), np.int64)  # rows before are accounted for
        for t, env in sorted({*ends, *cuts}):
            self._add(rows, env, int(start[env]), t + 1)
            start[env] = t + 1
            if (t, env) not in cuts and not self.partial[env]:
                return_, length = float(self.return_[env]), int(self.length[env])
                terminated = bool(rows.terminated[t, env])
                self.finished.append(Trajectory(return_, length, terminated, env, diagnostics.get((t, env), {})))
            self.return_[env], self.length[env], self.partial[env] = 0.0, 0, False
        for env, begin in enumerate(start.tolist()):
            self._add(rows, env, begin, rows.T)

    def _go_on(self, rows: Rows) -> None:
        """All episodes."""
        self.return_ += np.add.reduce(rows.score, axis=0, dtype=np.float64)
        self.length += np.add.reduce(rows.valid, axis=0, dtype=np.int64)

    def _add(self, rows: Rows, env: int, start: int, end: int) -> None:
        self.return_[env] += rows.score[start:end, env].sum(dtype=np.float64)
        self.length[env] += np.count_nonzero(rows.valid[start:end, env])

    def state(self) -> dict[str, Any]:
        """The running episodes."""
        return {"return": self.return_.copy(), "length": self.length.copy(), "partial": self.partial.copy()}

    def load(self, saved: Mapping[str, Any], begun: np.ndarray) -> None:
        """Go on with saved ones, but for the environments whose episodes have just `begun`."""
        for own, name in ((self.return_, "return"), (self.length, "length"), (self.partial, "partial")):
            own[...] = np.where(begun, 0, saved[name])

    def pop(self) -> list[Trajectory]:
        """The finished episodes; forgets them."""
        finished, self.finished = self.finished, []
        return finished
