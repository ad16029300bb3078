"""How far training has come, and the gradient steps that were skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat

from torch import Tensor

from rlframe.core.ranks import Ranks, current_ranks
from rlframe.core.struct import Tree
from rlframe.core.types import Samples


@dataclass(frozen=True)
class SkippedUpdate:
    """A gradient step that was skipped because its loss or gradient was NaN or Inf; parameters are unchanged."""

    updates: int  # updates before it, skipped ones included
    batch: Tree  # the training batch; () if the algorithm did not pass it on
    facts: Mapping[str, float]  # loss and gradient norm
    parameters: list[Tensor] | None  # of non-finite gradients; None: a compiled step, or a GPU's, keeps no gradients
    rate: str  # key of its learning rate


def do_nothing() -> None:
    """Do nothing."""


@dataclass
class Progress:
    """How far training has come. The algorithm owns it; runners and schedules read it."""

    env_steps: int = 0  # of the batches received, over all ranks
    agent_steps: int = 0  # valid rows of them, if several agents share an environment
    updates: int = 0  # gradient steps
    scheduled: int = 0  # env_steps before the newest batch, for schedules: the last batch still learns; or updates
    ranks: Ranks = field(default_factory=current_ranks, repr=False, compare=False)
    learned: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # all optimized parameters
    unreached: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # by the first loss, to be told
    rates: list[str] = field(default_factory=list, repr=False, compare=False)  # the key of the learning rate of each
    skipped: int = 0  # gradient steps that were not finite
    skipped_updates: list[SkippedUpdate] = field(default_factory=list, repr=False, compare=False)  # for the runner
    checks: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)  # see OptimizerStep
    followers: list[Callable[[int], None]] = field(default_factory=list, repr=False, compare=False)  # of `scheduled`
    between_steps: Callable[[], None] = field(default=do_nothing, repr=False, compare=False)  # gradient steps

    def skip(self, update: SkippedUpdate) -> None:
        """Count a skipped step; the first is kept until the runner takes it."""
        self.skipped += 1
        if not self.skipped_updates:
            self.skipped_updates.append(update)

    def count(self, samples: Samples) -> None:
        """Count the env steps of a batch on all ranks."""
        self.schedule(self.env_steps)
        self.env_steps += self.ranks.sum(samples.n_env_steps)
        if samples.n_valid >= 0:
            self.agent_steps += self.ranks.sum(samples.n_valid)

    @property
    def clock(self) -> int:
        """env_steps of the batches received, or updates where a runner counts in them."""
        return max(self.env_steps, self.scheduled)

    @property
    def column_steps(self) -> int:
        """Steps of all columns of batches so far: of agents, where several share an environment."""
        return self.agent_steps or self.env_steps

    def schedule(self, now: int) -> None:
        """Set all schedules to their numbers at `now`: env_steps, or updates where a runner counts in them."""
        self.scheduled = now
        for follow in self.followers:
            follow(now)

    def diverged(self, others: Iterable[Tensor]) -> str:
        """The key of the learning rate of a parameter that is NaN or Inf, also of `others`; empty if none is."""
        rates = zip([*self.learned, *others], chain(self.rates, repeat("algo.learning_rate")), strict=False)
        return next((rate for x, rate in rates if not bool(x.isfinite().all())), "")

    def state_dict(self) -> dict[str, int]:
        """The counts, once the outcome of every step is known."""
        for check in self.checks:
            check()
        counts = {"env_steps": self.env_steps, "updates": self.updates, "skipped": self.skipped}
        counts["agent_steps"] = self.agent_steps
        return {**counts, "scheduled": self.scheduled}  # for a run stopped between the updates of a batch

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counts."""
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        self.skipped, self.agent_steps = state["skipped"], state["agent_steps"]
        self.schedule(state["scheduled"])
