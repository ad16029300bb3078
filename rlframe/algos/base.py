"""What an algorithm is: three verbs that run every algorithm in every runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rlframe.core.ranks import Ranks, current_ranks
from rlframe.core.struct import Tree, as_numpy
from rlframe.core.types import Samples

UpdateMetrics = Mapping[str, Tensor | float]  # by name, without the group "algo/"; tensors become floats at the log


@dataclass(frozen=True)
class Refusal:
    """An update that was not made: its loss or a gradient was NaN or Inf. Parameters and optimizer are as before it."""

    updates: int  # made or refused before it
    batch: Tree  # that it would have learned from; () where the algorithm did not tell
    facts: Mapping[str, float]  # loss and gradient norm
    parameters: list[Tensor]  # whose gradients were not finite, as far as that was looked at


@dataclass
class Progress:
    """How far training has come. Owned by the algorithm; read by runners and schedules."""

    env_steps: int = 0  # valid rows received, over all ranks
    updates: int = 0  # gradient steps
    scheduled: int = 0  # env_steps before the newest batch: where schedules stand, so that the last batch still learns
    ranks: Ranks = field(default_factory=current_ranks, repr=False, compare=False)
    learned: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # by Updaters; equal on all ranks
    refused: int = 0  # gradient steps of an Updater that were not made, as they were not finite
    refusals: list[Refusal] = field(default_factory=list, repr=False, compare=False)  # for the runner to take
    settles: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)  # by Guards; see there

    def refuse(self, refusal: Refusal) -> None:
        """Count an update that was not made; only the first is kept until somebody takes it."""
        self.refused += 1
        if not self.refusals:
            self.refusals.append(refusal)

    def count(self, samples: Samples) -> None:
        """Count the valid rows of a batch, and of the other ranks' batches."""
        self.scheduled = self.env_steps
        self.env_steps += self.ranks.sum(int(np.count_nonzero(as_numpy(samples.valid))))

    def state_dict(self) -> dict[str, int]:
        """The counts, of every step that was launched."""
        for settle in self.settles:
            settle()
        counts = {"env_steps": self.env_steps, "updates": self.updates, "refused": self.refused}
        return {**counts, "scheduled": self.scheduled}  # of a batch that a stop has left half learned

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from saved counts."""
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        self.refused = state.get("refused", 0)  # which snapshots had not at first
        self.scheduled = state.get("scheduled", self.env_steps)


class Algorithm(ABC):
    """Learns from batches. Updates the agent's parameters in place; owns whatever never acts (targets, critics)."""

    progress: Progress

    def prepare(self) -> None:  # noqa: B027
        """A batch will be collected now: begin what the next update can begin without it. Not every runner asks."""

    @abstractmethod
    def receive(self, samples: Samples) -> None:
        """Take in a batch; it is the sampler's memory, valid until its next `collect`."""

    @abstractmethod
    def updates_due(self) -> int:
        """How many calls of `update` the data at hand call for.

        Other batches may be received while several are due: an algorithm that learns from the batch itself, not from
        replay, does all of it in one.
        """

    @abstractmethod
    def update(self) -> UpdateMetrics:
        """Learn once; returns statistics by name."""

    def facts(self) -> dict[str, str]:
        """What a run's log says of it at its start, by name."""
        return {}

    def counters(self) -> dict[str, float]:
        """Metrics of the algorithm's own state, with their groups, for the log; none where there is nothing to tell."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but the agent that decides the future: optimizer, counts, generators. Arrays and plain values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
