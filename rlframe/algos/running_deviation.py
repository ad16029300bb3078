"""The running deviation of discounted sums of rewards or bonuses, and returns of replay divided by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.core.ranks import current_ranks
from rlframe.core.struct import as_numpy
from rlframe.core.types import Array, Samples
from rlframe.kernels.device import to_device
from rlframe.models.normalize import RunningNorm
from rlframe.replay import Transitions

_EPSILON = 1e-8  # of the variance


class RunningDeviation:
    """The deviation of discounted sums of a number, over all steps, environments and ranks so far.

    It counts one sum of 0 at the start, so that the first numbers divided by it are not huge. All is computed on the
    device of the numbers.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.largest = torch.zeros((), dtype=torch.float64)  # |sum| so far
        self.sums: dict[int, Array] = {}  # [B] float64 of each stream, of its environments' newest rows
        self.statistics = RunningNorm(())  # of all sums
        self.statistics.variance.zero_()
        self.statistics.count.fill_(1.0)

    @property
    def value(self) -> Tensor:
        """Float64 []."""
        return (self.statistics.variance + _EPSILON).sqrt()

    def update(self, x: Tensor, samples: Samples, over_ends: bool) -> None:
        """Add the numbers [T, B] of a batch; with `over_ends`, sums go on from one episode to the next."""
        found, valid = self._discounted(x, samples, over_ends), samples.valid.to(x.device)
        self.statistics.to(x.device)
        n, counted = valid.sum().clamp(min=1), found.where(valid, 0.0)
        mean = counted.sum() / n
        variance = (found - mean).where(valid, 0.0).square().sum() / n
        self.largest = torch.cat([self.largest.to(x.device).view(1), counted.abs().flatten()]).amax()  # perhaps of none
        for *moments, largest in current_ranks().stack(
            torch.stack([valid.sum().double(), mean, variance, self.largest])
        ):
            self.statistics.merge(*moments)
            self.largest = torch.maximum(self.largest, largest)

    def _discounted(self, x: Tensor, samples: Samples, over_ends: bool) -> Tensor:
        """The sums [T, B] float64 up to each row."""
        tensors = x.double(), samples.valid.to(x.device), (samples.terminated | samples.truncated).to(x.device)
        on_host = x.is_cpu  # where NumPy takes a third of the time
        numbers, valid, ends = map(as_numpy, tensors) if on_host else tensors
        xp: Any = np if on_host else torch
        running = self.sums.get(samples.stream, 0 * numbers[0])
        running, found = running if on_host else torch.as_tensor(running, device=x.device), xp.empty_like(numbers)
        for t in range(len(numbers)):
            found[t] = running = xp.where(valid[t], self.discount * running + numbers[t], running)
            if not over_ends:
                running = xp.where(ends[t], 0.0, running)
        self.sums[samples.stream] = running
        return torch.as_tensor(found)

    def state_dict(self) -> dict[str, Any]:
        sums = {stream: as_numpy(each).copy() for stream, each in self.sums.items()}
        return {"sums": sums, "statistics": self.statistics.state_dict(), "largest": self.largest}

    def load_state_dict(self, state: Mapping[str, Any], reasons: Sequence[str] = ()) -> None:
        """Continue from a saved state; from 0 in environments that were restarted for a reason, if they are given."""
        self.sums = {stream: np.array(each) for stream, each in state["sums"].items()}
        restarted = np.array([bool(reason) for reason in reasons])
        if len(self.sums) == 1 and reasons:
            n = len(self.sums[next(iter(self.sums))]) // len(restarted)  # agents of an environment, side by side
            self.sums = {stream: np.where(restarted.repeat(n), 0.0, each) for stream, each in self.sums.items()}
        self.statistics.load_state_dict(state["statistics"])
        self.largest = state["largest"].clone()


class ScaledReturns:
    """Returns of replay divided by the deviation, now, of the return G: r / max(sqrt(Var + 1e-8), max |G| / c).

    Rewards stay in replay as they are, so all are scaled alike, whenever they were received; an n-step return is
    divided once it is summed (XQC and SimbaV2, arXiv 2509.25174 and 2502.15280; no mean is subtracted).
    """

    def __init__(self, discount: float, limit: float = math.inf) -> None:
        """`limit`: c, the largest scaled |G|; inf: any (XQC)."""
        self.deviation, self.limit = RunningDeviation(discount), limit

    def receive(self, samples: Samples) -> None:
        """Learn from the rewards of a batch."""
        self.deviation.update(samples.reward, samples, over_ends=False)

    def __call__(self, batch: Transitions) -> Transitions:
        """The batch with scaled returns."""
        scale = self.deviation.value
        if self.limit < math.inf:
            scale = torch.maximum(scale, self.deviation.largest / self.limit)
        deviation = to_device(scale.to(batch.return_.dtype), batch.return_.device)
        return replace(batch, return_=batch.return_ / deviation)

    def state_dict(self) -> dict[str, Any]:
        return self.deviation.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.deviation.load_state_dict(state)
