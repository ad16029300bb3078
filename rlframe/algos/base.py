"""Interface of algorithms: every runner calls `receive`, `updates_due` and `update`."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlframe.core.ranks import Ranks, current_ranks
from rlframe.core.struct import Tree, as_numpy
from rlframe.core.types import Samples

UpdateMetrics = Mapping[str, Tensor | float]  # by name, without the group "algo/"; tensors become floats at the log


@dataclass(frozen=True)
class SkippedUpdate:
    """A gradient step that was skipped because its loss or gradient was NaN or Inf; parameters are unchanged."""

    updates: int  # updates before it, skipped ones included
    batch: Tree  # the training batch; () if the algorithm did not pass it on
    facts: Mapping[str, float]  # loss and gradient norm
    parameters: list[Tensor]  # those found to have a non-finite gradient


@dataclass
class Progress:
    """How far training has come. The algorithm owns it; runners and schedules read it."""

    env_steps: int = 0  # valid rows received, over all ranks
    updates: int = 0  # gradient steps
    scheduled: int = 0  # env_steps before the newest batch, for schedules: the last batch still learns
    ranks: Ranks = field(default_factory=current_ranks, repr=False, compare=False)
    learned: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # all optimized parameters
    skipped: int = 0  # gradient steps that were not finite
    skipped_updates: list[SkippedUpdate] = field(default_factory=list, repr=False, compare=False)  # for the runner
    checks: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)  # see OptimizerStep

    def skip(self, update: SkippedUpdate) -> None:
        """Count a skipped step; the first is kept until the runner takes it."""
        self.skipped += 1
        if not self.skipped_updates:
            self.skipped_updates.append(update)

    def count(self, samples: Samples) -> None:
        """Count the valid rows of a batch on all ranks."""
        self.scheduled = self.env_steps
        self.env_steps += self.ranks.sum(int(np.count_nonzero(as_numpy(samples.valid))))

    def state_dict(self) -> dict[str, int]:
        """The counts, once the outcome of every step is known."""
        for check in self.checks:
            check()
        counts = {"env_steps": self.env_steps, "updates": self.updates, "skipped": self.skipped}
        return {**counts, "scheduled": self.scheduled}  # for a run stopped between the updates of a batch

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counts."""
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        self.skipped, self.scheduled = state["skipped"], state["scheduled"]


class Saved(Protocol):
    """A part of an algorithm saved in snapshots, such as a module, optimizer or replay."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class SavedGenerator:
    """A saved random generator of torch or NumPy."""

    def __init__(self, generator: torch.Generator | np.random.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> Any:
        """The generator's state."""
        if isinstance(self.generator, np.random.Generator):
            return self.generator.bit_generator.state
        return self.generator.get_state()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a saved state; from a seed derived from it if it was saved on another kind of device."""
        if isinstance(self.generator, np.random.Generator):
            self.generator.bit_generator.state = state
        elif state.numel() == self.generator.get_state().numel():
            self.generator.set_state(state.cpu())
        else:
            digest = hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=8).digest()
            self.generator.manual_seed(int.from_bytes(digest, "little") >> 1)


class Algorithm(ABC):
    """Learns from batches. Updates the agent's parameters in place; owns target networks and critics."""

    progress: Progress
    saved: Mapping[str, Saved]  # all state besides the agent, by name: optimizer, counts, generators

    def prefetch(self) -> None:  # noqa: B027
        """Optional hook before sampling: start work on the next update. Not every runner calls it."""

    @abstractmethod
    def receive(self, samples: Samples) -> None:
        """Receive a batch; it is the sampler's memory, valid until its next `collect`."""

    @abstractmethod
    def updates_due(self) -> int:
        """How many calls of `update` are due.

        Batches may be received while several are due, so an algorithm that learns from the batch itself, not from
        replay, makes all its gradient steps in one call.
        """

    @abstractmethod
    def update(self) -> UpdateMetrics:
        """Learn once; returns statistics by name."""

    def drop_updates(self) -> None:  # noqa: B027
        """Drop the due updates of a replay ratio."""

    def facts(self) -> dict[str, str]:
        """Facts by name, for the log at the start of a run."""
        return {}

    def counters(self) -> dict[str, float]:
        """Metrics of the algorithm's state, named with their groups, for each row of the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """States of all `saved` parts: arrays and plain values."""
        return {name: part.state_dict() for name, part in self.saved.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name, part in self.saved.items():
            part.load_state_dict(state[name])
