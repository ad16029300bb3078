"""Candidates, the rows that may be sampled, and selectors: draw them uniformly, or by priorities with a sum tree."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.core.errors import ConfigError, naming, warn_once
from rlframe.core.struct import as_numpy
from rlframe.core.types import Array
from rlframe.replay.arrays import StorageMemory, spans, write_rows

WIDTH = 64  # children per node
_ROOT = 1024  # children of the root at most: one cumulative sum of them serves a whole batch
PRIORITY_EPSILON = 1e-6  # added to priorities, so that every row may be drawn again (Schaul et al. 2016, section 3.3)
MAX_PRIORITY = 1e30  # so that sums do not overflow and float32 holds it


class SumTree:
    """float64 priorities of `n` leaves. A parent is recomputed as the sum of its children, so errors do not add up.

    Four million leaves are three levels.
    """

    def __init__(self, n: int) -> None:
        self._levels: list[np.ndarray] = []  # [m, WIDTH] each, leaves first
        while not self._levels or n > _ROOT:
            n = -(-n // WIDTH)
            self._levels.append(np.zeros((n, WIDTH)))
        self._root = np.zeros(n)
        self.leaves = self._levels[0].reshape(-1)  # a view
        self._parents = [level.reshape(-1) for level in self._levels[1:]] + [self._root]

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._root.cumsum()[-1])

    def set(self, index: np.ndarray, priority: np.ndarray | float) -> None:
        """Set the priorities of leaves [n]; the last one counts where an index is repeated."""
        self.leaves[index] = priority
        node = index // WIDTH
        for level, parent in zip(self._levels, self._parents, strict=True):
            if len(node) > WIDTH:
                node = np.unique(node)
            parent[node] = level.take(node, axis=0).sum(axis=1)
            node = node // WIDTH

    def find(self, share: np.ndarray) -> np.ndarray:
        """The leaves [n] at these shares [n] of the total, from 0 to 1; raises ValueError if all priorities are 0."""
        sums = self._root.cumsum()
        if not sums[-1] > 0:
            raise ValueError("every priority is 0; add a small constant to the priorities")
        mass = np.minimum(share * sums[-1], np.nextafter(sums[-1], 0.0))
        node = sums.searchsorted(mass, side="right")
        mass -= sums[node] - self._root[node]
        rows = np.arange(len(mass))
        for level in reversed(self._levels):
            children = level.take(node, axis=0)  # [n, WIDTH]
            sums = children.cumsum(axis=1)
            mass = np.minimum(mass, np.nextafter(sums[:, -1], 0.0))[:, None]  # rounding may have exceeded the node
            child = (sums > mass).argmax(axis=1)
            node = node * WIDTH + child
            if level is not self._levels[0]:
                mass = mass[:, 0] - (sums[rows, child] - children[rows, child])
        return node

    def load(self, leaves: np.ndarray) -> None:
        """Set all priorities."""
        self.leaves[: len(leaves)] = leaves
        for level, parent in zip(self._levels, self._parents, strict=True):
            parent[: len(level)] = level.sum(axis=1)


class Candidates:
    """What a selector may draw: the eligible numbers of the window lo..hi-1, which only moves forward.

    On a device nobody looks at their values, and `n` counts those of the window that are not eligible too.
    """

    def __init__(self, n_slots: int, memory: StorageMemory) -> None:
        self.n_slots, self._memory = n_slots, memory
        self.lo = self.hi = 0
        self.eligible = memory.zeros((n_slots,), np.bool_)  # by number % n_slots; False outside of the window
        self.n = 0  # eligible numbers
        self._counted: Tensor | None = None  # on a device, eligible ones up to each slot; None: not counted since
        self._new: tuple[int, Array] = 0, self.eligible[:0]  # that the last `advance` added: the first, eligible

    @property
    def newest(self) -> np.ndarray:
        """The numbers [n] that became eligible with the last `advance`."""
        start, eligible = self._new
        return np.flatnonzero(as_numpy(eligible)) + start

    def advance(self, lo: int, hi: int, eligible: Array) -> np.ndarray:
        """Move the window to lo..hi-1, with `eligible` of the new numbers [n] bool; returns the slots that left it."""
        first, last = self.lo, min(lo, self.hi)
        counts = not self._memory.on_device
        for places, _ in spans(first, max(0, last - first), self.n_slots):
            if counts:
                self.n -= int(np.count_nonzero(self.eligible[places]))
            self.eligible[places] = False
        eligible, new = self._memory.own(eligible), max(lo, self.hi)
        write_rows(self.eligible, new, eligible)
        self._new, self._counted = (new, eligible), None
        self.n = self.n + int(np.count_nonzero(eligible)) if counts else hi - lo
        self.lo, self.hi = lo, hi
        return np.arange(first, last) % self.n_slots

    def draw(self, rng: np.random.Generator, n: int) -> Array:
        """n eligible numbers [n] int64, each with the same probability, with replacement."""
        if self._memory.on_device:
            return self._draw_on_device(rng, n)
        drawn = self._draw_window(rng, n)
        if self.n == self.hi - self.lo:  # all are
            return drawn
        wrong = np.flatnonzero(~self.eligible.take(drawn % self.n_slots))
        while len(wrong):
            drawn[wrong] = again = self._draw_window(rng, len(wrong))
            wrong = wrong[~self.eligible.take(again % self.n_slots)]
        return drawn

    def _draw_window(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Any numbers of the window, eligible or not."""
        # 2.5 us for 256, rng.integers 5.8; a float's 53 bits are enough for the 2**30 numbers of a large window
        return (rng.random(n) * (self.hi - self.lo)).astype(np.int64) + self.lo

    def _draw_on_device(self, rng: np.random.Generator, n: int) -> Tensor:
        """By shares of the number of eligible ones, each found in the running count over all slots.

        Nothing waits for that number, so of a window without an eligible one it draws any; and streams divide a batch
        by the lengths of their windows.
        """
        if self._counted is None:
            self._counted = self.eligible.cumsum(0, dtype=torch.int32)
        shares = self._memory.own(rng.random(n))
        slots = torch.searchsorted(self._counted, (shares * self._counted[-1]).int(), right=True)
        return self.at_slots(slots.clamp(max=self.n_slots - 1)).clamp(max=self.hi - 1)

    def at_slots(self, slots: Array) -> Array:
        """The numbers [n] of the window that have these slots [n]."""
        return self.lo + (slots - self.lo) % self.n_slots

    def contains(self, numbers: np.ndarray) -> np.ndarray:
        """Which of `numbers` [n] may be drawn: [n] bool."""
        return (numbers >= self.lo) & (numbers < self.hi) & as_numpy(self.eligible[numbers % self.n_slots])

    def own(self, numbers: np.ndarray) -> Array:
        """Numbers where the candidates are."""
        return self._memory.own(numbers)

    def state_dict(self) -> dict[str, Any]:
        """The window; arrays are views."""
        start, new = self._new
        return {"lo": self.lo, "hi": self.hi, "n": self.n, "eligible": self.eligible, "start": start, "new": new}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of the same size."""
        self.lo, self.hi, self.n = state["lo"], state["hi"], state["n"]
        self.eligible[...] = self._memory.own(state["eligible"])
        self._new, self._counted = (state["start"], self._memory.own(state["new"])), None


Drawn = list[tuple[int, Array]]  # for each stream of which some were drawn: its place, and the numbers [n]


class Selector(ABC):
    """Draws from the candidates of each stream. Call `update_candidates` whenever they change."""

    rng: np.random.Generator
    least = 1  # candidates that a draw needs

    @abstractmethod
    def __repr__(self) -> str:
        """Its kind and parameters; a saved state is loaded only by an equal selector."""

    @abstractmethod
    def update_candidates(self, stream: int, candidates: Candidates, removed: np.ndarray) -> None:
        """Give `candidates.newest` of a stream a priority, and none to the slots `removed`."""

    @abstractmethod
    def draw(self, streams: Sequence[Candidates], n: int) -> Drawn:
        """n numbers, drawn with replacement unless its class says otherwise; there must be `least` candidates."""

    def weights(self, streams: Sequence[Candidates], drawn: Drawn, beta: float) -> np.ndarray | None:
        """Importance weights [n] float32 in the order of `drawn`, at most 1; None if all are 1."""
        return None

    def mass(self, streams: Sequence[Candidates]) -> float:
        """What the probability of each is a part of: the number of candidates, or the sum of their priorities^α."""
        return float(sum(candidates.n for candidates in streams))

    def probability(self, streams: Sequence[Candidates], drawn: Drawn) -> np.ndarray:
        """With which each of `drawn` is drawn: [n] float64."""
        return np.full(sum(len(numbers) for _, numbers in drawn), 1 / self.mass(streams))

    def raise_highest(self, priority: float) -> None:  # noqa: B027  # the uniform one has none
        """Give new candidates at least this priority."""

    @abstractmethod
    def set_priorities(self, stream: int, candidates: Candidates, numbers: np.ndarray, priority: np.ndarray) -> None:
        """Set priorities [n] of the candidates among `numbers` [n]; raises ValueError for negative, NaN or infinite."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, and the priorities."""
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.rng.bit_generator.state = state["rng"]


class Uniform(Selector):
    """Draws every candidate with the same probability; priorities are ignored. A subclass may `choose` otherwise."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def choose(self, candidates: Candidates, n: int) -> Array:
        """n numbers [n] int64 of a stream's rows, from `candidates.lo` to `hi` - 1 by age, oldest first.

        All must be such that `candidates.contains` them: the newest rows, and those at which nobody acted, have no
        next observation yet, or none at all.
        """
        return candidates.draw(self.rng, n)

    def update_candidates(self, stream: int, candidates: Candidates, removed: np.ndarray) -> None:
        pass

    def draw(self, streams: Sequence[Candidates], n: int) -> Drawn:
        if len(streams) == 1:
            return [(0, self._chosen(streams[0], n))]
        counts = np.array([candidates.n for candidates in streams])
        shares = self.rng.multinomial(n, counts / counts.sum()).tolist()
        return [(i, self._chosen(streams[i], share)) for i, share in enumerate(shares) if share]

    def _chosen(self, candidates: Candidates, n: int) -> Array:
        if type(self) is Uniform:
            return self.choose(candidates, n)
        name = type(self).__name__
        with naming(f"algo.replay.selector: {name}.choose failed"):
            numbers = np.asarray(as_numpy(self.choose(candidates, n)))
        if numbers.shape != (n,) or numbers.dtype.kind not in "iu":
            raise ConfigError(f"{name}.choose must return {n} integers, and gives {numbers.dtype}{list(numbers.shape)}")
        numbers = numbers.astype(np.int64)
        if wrong := numbers[~candidates.contains(numbers)].tolist():
            raise ConfigError(f"{name}.choose returns {wrong[0]}, which is none that `candidates.contains`")
        return candidates.own(numbers)

    def set_priorities(self, stream: int, candidates: Candidates, numbers: np.ndarray, priority: np.ndarray) -> None:
        check_priority(priority)
        warn_once("priorities change nothing, as this replay draws uniformly; make it with alpha above 0")


class Prioritized(Selector):
    """P(i) = p[i]^α / Σ p^α; weights (N P(i))^-β over their maximum in the batch; new rows get the highest p so far.

    (Schaul et al. 2016, arXiv 1511.05952, proportional variant, eq. 1, section 3.4 and algorithm 1.) The total is cut
    into n equal parts and one number is drawn from each, as in their appendix B.2.1. With `unique` all numbers of a
    draw differ: each is drawn by P among those not drawn yet. The weights are by P all the same, not by the probability
    of being among the n, which has no closed form; they agree where no row has much of the total.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        alpha: float,
        n_slots: int,
        n_streams: int = 1,
        unique: int = 0,
        initial: float = math.inf,
    ) -> None:
        """Args:
        alpha: α in (0, 1].    n_slots: that of the candidates of each stream.
        unique: most numbers of a draw, all different; 0: with replacement.
        initial: p of new rows; inf: the highest so far.
        """
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha} must be above 0 and at most 1; use Uniform for 0")
        self.rng, self.alpha, self.unique, self.initial, self._n_slots = rng, alpha, unique, initial, n_slots
        self.least = max(1, unique)
        self._n_leaves, self._tree = n_slots * n_streams, SumTree(n_slots * n_streams)
        self._highest = 1.0  # p^α

    def __repr__(self) -> str:
        unique = f", unique={self.unique}" if self.unique else ""
        initial = f", initial={self.initial:g}" if self.initial < math.inf else ""
        return f"Prioritized(alpha={self.alpha}{unique}{initial})"

    def update_candidates(self, stream: int, candidates: Candidates, removed: np.ndarray) -> None:
        self._tree.set(removed + stream * self._n_slots, 0.0)
        power = self._highest if self.initial == math.inf else self.initial**self.alpha
        self._tree.set(self._leaves(stream, candidates.newest), power)

    def _leaves(self, stream: int, numbers: np.ndarray) -> np.ndarray:
        return numbers % self._n_slots + stream * self._n_slots

    def draw(self, streams: Sequence[Candidates], n: int) -> Drawn:
        if self.unique:
            leaves = self._draw_unique(n, sum(candidates.n for candidates in streams))
        else:
            leaves = self._tree.find((np.arange(n) + self.rng.random(n)) / n)
        if len(streams) == 1:
            return [(0, streams[0].at_slots(leaves))]
        stream, slots = np.divmod(leaves, self._n_slots)
        return [(i, streams[i].at_slots(slots[stream == i])) for i in np.unique(stream).tolist()]

    def _draw_unique(self, n: int, n_candidates: int) -> np.ndarray:
        """n leaves [n], none twice: those drawn before have no priority while the others are drawn."""
        if n > n_candidates:
            raise ValueError(
                f"a batch of {n} rows without repetition needs as many rows that can be drawn, but there are "
                f"{n_candidates}; use algo.unique=false or a larger algo.replay.size"
            )
        found = _distinct(self._tree.find(self.rng.random(n)))
        if len(found) == n:
            return found
        power = self._tree.leaves[found]
        try:
            while len(found) < n:
                self._tree.set(found, 0.0)
                new = _distinct(self._tree.find(self.rng.random(n - len(found))))
                found, power = np.append(found, new), np.append(power, self._tree.leaves[new])
        finally:
            self._tree.set(found, power)
        return found

    def weights(self, streams: Sequence[Candidates], drawn: Drawn, beta: float) -> np.ndarray | None:
        if beta == 0.0:
            return None
        power = self._powers(drawn)
        return ((power / power.min()) ** -beta).astype(np.float32)  # N and the total cancel against the maximum

    def _powers(self, drawn: Drawn) -> np.ndarray:
        """p^α [n]."""
        parts = [self._tree.leaves.take(self._leaves(stream, numbers)) for stream, numbers in drawn]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def mass(self, streams: Sequence[Candidates]) -> float:
        return self._tree.total

    def probability(self, streams: Sequence[Candidates], drawn: Drawn) -> np.ndarray:
        return self._powers(drawn) / self._tree.total

    def raise_highest(self, priority: float) -> None:
        self._highest = max(self._highest, min(priority, MAX_PRIORITY) ** self.alpha)

    def set_priorities(self, stream: int, candidates: Candidates, numbers: np.ndarray, priority: np.ndarray) -> None:
        power = check_priority(priority) ** self.alpha
        current = candidates.contains(numbers)
        if not current.all():
            numbers, power = numbers[current], power[current]
        if len(power):
            self._tree.set(self._leaves(stream, numbers), power)
            self._highest = max(self._highest, float(power.max()))

    def state_dict(self) -> dict[str, Any]:
        leaves = self._tree.leaves[: self._n_leaves]
        return {**super().state_dict(), "power": leaves, "highest": self._highest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._tree.load(state["power"])
        self._highest = state["highest"]


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """The numbers without repetitions, in the order of their first places."""
    first = np.unique(numbers, return_index=True)[1]
    return numbers[np.sort(first)]


def check_priority(priority: np.ndarray) -> np.ndarray:
    """The priorities as float64, at most MAX_PRIORITY; raises ValueError if one is negative, NaN or infinite."""
    if len(priority) and not (priority.min() >= 0 and priority.max() < np.inf):  # false with NaN
        wrong = priority[~((priority >= 0) & (priority < np.inf))]
        raise ValueError(
            f"{len(wrong)} of {len(priority)} priorities are negative, NaN or infinite (the first is {wrong[0]}); "
            f"is the loss finite?"
        )
    return np.minimum(priority, MAX_PRIORITY, dtype=np.float64)
