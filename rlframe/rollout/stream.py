"""BatchStream: a batch that is filled again and again, and what continues from one filling to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.core.types import Samples
from rlframe.envs.observations import BoundsCheck
from rlframe.rollout.buffer import BatchBuffer, numbered
from rlframe.rollout.episodes import EpisodeTracker
from rlframe.rollout.stepper import BatchEvents

_BREAK = 2**40  # time steps; no stream is that long


class BatchStream:
    """The running episodes of B environments, and the time of their rows."""

    def __init__(self, batch: BatchBuffer, observation_space: Space) -> None:
        self.batch, self.samples = batch, batch.samples()
        self.tracker, self.bounds = EpisodeTracker(batch.rows.B), BoundsCheck(observation_space)
        self.complete = True  # False after a batch was interrupted, when environments are at different rows
        self.end = 0  # time of row T in the stream

    def fill(self, take_steps: Callable[[], Sequence[BatchEvents]]) -> Samples:
        """Fill the batch by `take_steps`, which says what happened, and update the running episodes."""
        start = self.end + (not self.complete)  # rows of an interrupted batch are lost
        self.complete = False
        self.tracker.update(self.batch.rows, take_steps())
        self.bounds.check(self.batch.rows.observation)
        self.complete = True
        self.samples, self.end = numbered(self.samples, self.batch.rows, start), start + self.batch.rows.T
        return self.samples

    def restart(self, partial: bool) -> None:
        """All episodes have begun anew; `partial`: by random steps, so that they are not reported."""
        self.tracker.forget()
        self.tracker.partial[:] = partial
        self.end -= _BREAK  # its rows continue none, nor those of the process from which a run is resumed

    def running_state(self) -> dict[str, Any]:
        """What continues, except the environments' own state."""
        row = [np.copy(x) for x in self.batch.last_row()]
        return {"row": row, "episodes": self.tracker.state(), "bounds": self.bounds.state(), "end": self.end}

    def load_running_state(self, saved: Mapping[str, Any], reasons: Sequence[str]) -> None:
        """Continue from `running_state`, but the row, except the episodes that were restarted for a reason."""
        self.tracker.load(saved["episodes"], np.array([bool(reason) for reason in reasons]))
        self.bounds.load(saved["bounds"])
        self.end = saved["end"] + any(reasons)
