"""The running deviation of discounted sums of rewards or bonuses, and returns of replay divided by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.core.ranks import current_ranks
from rlframe.core.struct import as_numpy, fill
from rlframe.core.types import Array, Samples
from rlframe.replay import Transitions

_EPSILON = 1e-8  # of the variance
_MOMENTS = ("count", "mean", "variance", "largest")  # in snapshots
_START: tuple[Any, ...] = (1.0, 0.0, 0.0, 0.0)


class RunningDeviation:
    """The deviation of discounted sums of a number, over all steps, environments and ranks so far.

    It counts one sum of 0 at the start, so that the first numbers divided by it are not huge. Sums are computed on the
    device of the numbers.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.sums: dict[int, Array] = {}  # [B] float64 of each stream, of its environments' newest rows
        # Of all sums, on a device as tensors []; the largest is of |sum|.
        self.count, self.mean, self.variance, self.largest = _START

    @property
    def value(self) -> Tensor:
        """Float64 []."""
        variance = self.variance + _EPSILON
        return (
            variance.sqrt() if isinstance(variance, Tensor) else torch.tensor(math.sqrt(variance), dtype=torch.float64)
        )

    def update(self, x: Tensor, samples: Samples, over_ends: bool) -> None:
        """Add the numbers [T, B] of a batch; with `over_ends`, sums go on from one episode to the next."""
        moments = self._moments_on_host if x.is_cpu else self._moments_on_device
        for of_rank in current_ranks().stack(moments(x, samples, over_ends)):
            self._merge(*(of_rank.tolist() if x.is_cpu else of_rank))

    def _moments_on_host(self, x: Tensor, samples: Samples, over_ends: bool) -> Tensor:
        """Of the batch: number of sums, mean, variance and largest |sum|; in NumPy, which takes a third of the time."""
        numbers, acted = as_numpy(x).astype(np.float64), as_numpy(samples.valid)
        first, ends = as_numpy(samples.inputs.first), as_numpy(samples.terminated) | as_numpy(samples.truncated)
        found = self._discounted(np, numbers, acted, first, ends, samples.stream, over_ends)[acted]
        if not (n := len(found)):
            return torch.zeros(4, dtype=torch.float64)
        with np.errstate(all="ignore"):  # of numbers that are not finite, which are left out
            away = found - (mean := found.sum() / n)
            return torch.from_numpy(np.array([n, mean, np.square(away).sum() / n, np.abs(found).max()]))

    def _moments_on_device(self, x: Tensor, samples: Samples, over_ends: bool) -> Tensor:
        """The same without a look at any number."""
        acted, first, ends = (
            each.to(x.device) for each in (samples.valid, samples.inputs.first, samples.terminated | samples.truncated)
        )
        found = self._discounted(torch, x.double(), acted, first, ends, samples.stream, over_ends)
        n, counted = acted.sum(), found.where(acted, 0.0)
        mean = counted.sum() / n.clamp(min=1)
        variance = (found - mean).where(acted, 0.0).square().sum() / n.clamp(min=1)
        largest = torch.cat([0 * mean.view(1), counted.abs().flatten()]).amax()  # perhaps of none
        return torch.stack([n.double(), mean, variance, largest])

    def _discounted(
        self, xp: Any, numbers: Array, valid: Array, first: Array, ends: Array, stream: int, over_ends: bool
    ) -> Array:
        """The sums [T, B] float64 up to each row.

        Episodes begin after `ends`, and where they are `first`: after a restart nothing ended, and a team may end
        while its environment goes on.
        """
        running, found = self.sums.get(stream, ()), xp.empty_like(numbers)
        if len(running) != len(numbers[0]):  # its first batch, or the resumed run divides environments otherwise
            running = 0 * numbers[0]
        running = running if xp is np else torch.as_tensor(running, device=numbers.device)
        for t in range(len(numbers)):
            before = running if over_ends else xp.where(first[t], 0.0, running)
            found[t] = running = xp.where(valid[t], self.discount * before + numbers[t], before)
            running = running if over_ends else xp.where(ends[t], 0.0, running)
        self.sums[stream] = xp.where(xp.isfinite(running), running, 0.0)  # else no later batch would count
        return found

    def _merge(self, n: Any, mean: Any, variance: Any, largest: Any) -> None:
        """Merge the moments of n sums (Chan, Golub & LeVeque 1979), unless one of them is not finite."""
        total, delta = self.count + n, mean - self.mean
        spread = self.variance * self.count + variance * n + delta * delta * self.count * n / total
        merged = total, self.mean + delta * n / total, spread / total
        if not isinstance(mean, Tensor):
            if math.isfinite(mean + variance):
                self.count, self.mean, self.variance = merged
                self.largest = max(self.largest, largest)
            return
        finite, largest = (mean + variance).isfinite(), torch.maximum(largest, 0 * largest + self.largest)
        kept = self.count, self.mean, self.variance, self.largest
        self.count, self.mean, self.variance, self.largest = (
            torch.where(finite, new, old) for new, old in zip((*merged, largest), kept, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        sums = {stream: as_numpy(each).copy() for stream, each in self.sums.items()}
        return {"sums": sums, "statistics": {name: float(vars(self)[name]) for name in _MOMENTS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.sums = {stream: np.array(each) for stream, each in state["sums"].items()}
        vars(self).update({name: float(state["statistics"][name]) for name in _MOMENTS})


class ScaledReturns:
    """Returns of replay divided by the deviation, now, of the return G: r / max(sqrt(Var + 1e-8), max |G| / c).

    Rewards stay in replay as they are, so all are scaled alike, whenever they were received; an n-step return is
    divided once it is summed (XQC and SimbaV2, arXiv 2509.25174 and 2502.15280; no mean is subtracted). G begins anew
    after the last step of an episode; in the codes of XQC and FlashSAC at it, where G is the last reward alone.
    """

    def __init__(self, discount: float, limit: float = math.inf, device: torch.device | str = "cpu") -> None:
        """`limit`: c, the largest scaled |G|; inf: any (XQC).    device: of the returns."""
        self.deviation, self.limit = RunningDeviation(discount), limit
        self._scale = torch.zeros((), device=device)  # in place, where graphs read it
        self._follow()

    def receive(self, samples: Samples) -> None:
        """Learn from the rewards of a batch."""
        self.deviation.update(samples.reward, samples, over_ends=False)
        self._follow()

    def _follow(self) -> None:
        scale, largest = self.deviation.value, self.deviation.largest
        if self.limit < math.inf:
            scale = torch.maximum(scale, torch.as_tensor(largest, dtype=torch.float64) / self.limit)
        if scale.is_cpu:
            fill(self._scale, scale.item())
        else:
            self._scale.copy_(scale)

    def __call__(self, batch: Transitions) -> Transitions:
        """The batch with scaled returns."""
        return replace(batch, return_=batch.return_ / self._scale)

    def state_dict(self) -> dict[str, Any]:
        return self.deviation.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.deviation.load_state_dict(state)
        self._follow()

    def begin_with(self, state: Mapping[str, Any]) -> None:
        """Scale returns as in a saved state, whose critics learned them so; the episodes are others."""
        self.load_state_dict({**state, "sums": {}})
