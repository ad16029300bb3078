"""The interface of an algorithm: three verbs - receive, updates_due, update - by which every runner drives it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.core.ranks import Ranks, current_ranks
from rlframe.core.struct import Tree, as_numpy
from rlframe.core.types import Samples

UpdateMetrics = Mapping[str, Tensor | float]  # by name, without the group "algo/"; tensors become floats at the log


@dataclass(frozen=True)
class SkippedUpdate:
    """A gradient step that was skipped since its loss or gradient was NaN or Inf; parameters are as before it."""

    updates: int  # made or skipped before it
    batch: Tree  # the training batch; () where the algorithm did not pass it on
    facts: Mapping[str, float]  # loss and gradient norm
    parameters: list[Tensor]  # those whose gradient was not finite, as far as that was looked at


@dataclass
class Progress:
    """How far training has come. The algorithm owns it; runners and schedules read it."""

    env_steps: int = 0  # valid rows received, over all ranks
    updates: int = 0  # gradient steps
    scheduled: int = 0  # env_steps before the newest batch: where schedules stand, so that the last batch still learns
    ranks: Ranks = field(default_factory=current_ranks, repr=False, compare=False)
    learned: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # all optimized parameters
    skipped: int = 0  # gradient steps that were not finite
    skipped_updates: list[SkippedUpdate] = field(default_factory=list, repr=False, compare=False)  # the runner takes it
    checks: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)  # see OptimizerStep

    def skip(self, update: SkippedUpdate) -> None:
        """Count a step that was skipped; the first is kept until the runner takes it."""
        self.skipped += 1
        if not self.skipped_updates:
            self.skipped_updates.append(update)

    def count(self, samples: Samples) -> None:
        """Count the valid rows of a batch, and of the other ranks' batches."""
        self.scheduled = self.env_steps
        self.env_steps += self.ranks.sum(int(np.count_nonzero(as_numpy(samples.valid))))

    def state_dict(self) -> dict[str, int]:
        """The counts, once the outcome of every step is known."""
        for check in self.checks:
            check()
        counts = {"env_steps": self.env_steps, "updates": self.updates, "skipped": self.skipped}
        return {**counts, "scheduled": self.scheduled}  # of a batch that a stop has left half learned

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counts."""
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        self.skipped, self.scheduled = state["skipped"], state["scheduled"]


class Algorithm(ABC):
    """Learns from batches. Updates the agent's parameters in place; owns whatever never acts (targets, critics)."""

    progress: Progress
    saved: Sequence[str]  # attributes that decide the future, but for the agent: optimizer, counts, generators, replay

    def prefetch(self) -> None:  # noqa: B027
        """Optional hook before sampling: start work on the next update. Not every runner calls it."""

    @abstractmethod
    def receive(self, samples: Samples) -> None:
        """Take in a batch; it is the sampler's memory, valid until its next `collect`."""

    @abstractmethod
    def updates_due(self) -> int:
        """How many calls of `update` the data received so far call for.

        Other batches may be received while several are due; an algorithm that learns from the batch itself, not from
        replay, does all of its gradient steps in one call.
        """

    @abstractmethod
    def update(self) -> UpdateMetrics:
        """Learn once; returns statistics by name."""

    def drop_updates(self) -> None:  # noqa: B027
        """Drop the updates that are due, where they are counted by a replay ratio."""

    def facts(self) -> dict[str, str]:
        """What a run's log says of the algorithm at its start, by name."""
        return {}

    def counters(self) -> dict[str, float]:
        """Metrics of the algorithm's own state, with their groups, for each row of the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The states of all that is `saved`: arrays and plain values."""
        return {name: _state_of(vars(self)[name]) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name in self.saved:
            _load(vars(self)[name], state[name])


def _state_of(part: Any) -> Any:
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def _load(part: Any, state: Any) -> None:
    """Set a part to a saved state; a generator to what follows from it, if it is of another kind of device."""
    if isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif not isinstance(part, torch.Generator):
        part.load_state_dict(state)
    elif state.numel() == part.get_state().numel():
        part.set_state(state.cpu())
    else:
        digest = hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=8).digest()
        part.manual_seed(int.from_bytes(digest, "little") >> 1)
