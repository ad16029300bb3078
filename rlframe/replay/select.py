"""Selectors: draw candidates uniformly, or in proportion to their priorities with a sum tree."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.replay.columns import Candidates

WIDTH = 64  # children per node
_ROOT = 1024  # children of the root at most: one cumulative sum of them serves a whole batch
PRIORITY_EPSILON = 1e-6  # added to priorities, so that every row may be drawn again (Schaul et al. 2016, section 3.3)
_MAX_PRIORITY = 1e30  # so that sums do not overflow and float32 holds it


class SumTree:
    """float64 priorities of `n` leaves. A parent is recomputed as the sum of its children, so errors do not add up.

    Four million leaves are three levels. No width from 16 to 256 draws 32 out of a million faster.
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


class Selector(ABC):
    """Draws from `Candidates`. Call `update_candidates` whenever they change."""

    rng: np.random.Generator

    @abstractmethod
    def __repr__(self) -> str:
        """Its kind and parameters; a saved state is loaded only by an equal selector."""

    @abstractmethod
    def update_candidates(self, candidates: Candidates, removed: np.ndarray) -> None:
        """Give `candidates.newest` a priority, and none to the slots `removed`."""

    @abstractmethod
    def draw(self, candidates: Candidates, n: int) -> np.ndarray:
        """n numbers [n] int64, drawn with replacement; there must be at least one candidate."""

    def weights(self, candidates: Candidates, numbers: np.ndarray, beta: float) -> np.ndarray | None:
        """Importance weights [n] float32, at most 1; None if all are 1."""
        return None

    @abstractmethod
    def set_priorities(self, candidates: Candidates, numbers: np.ndarray, priority: np.ndarray) -> None:
        """Set priorities [n] of the candidates among `numbers` [n]; raises ValueError for negative, NaN or infinite."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, and the priorities."""
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.rng.bit_generator.state = state["rng"]


class Uniform(Selector):
    """Draws every candidate with the same probability; priorities are checked and ignored."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __repr__(self) -> str:
        return "Uniform()"

    def update_candidates(self, candidates: Candidates, removed: np.ndarray) -> None:
        pass

    def draw(self, candidates: Candidates, n: int) -> np.ndarray:
        drawn = self._draw_window(candidates, n)
        wrong = np.flatnonzero(~candidates.eligible.take(drawn % candidates.n_slots))
        while len(wrong):
            drawn[wrong] = again = self._draw_window(candidates, len(wrong))
            wrong = wrong[~candidates.eligible.take(again % candidates.n_slots)]
        return drawn

    def _draw_window(self, candidates: Candidates, n: int) -> np.ndarray:
        """Any numbers of the window, eligible or not."""
        # 2.5 us for 256, rng.integers 5.8; a float's 53 bits are enough for the 2**30 numbers of a large window
        return (self.rng.random(n) * (candidates.hi - candidates.lo)).astype(np.int64) + candidates.lo

    def set_priorities(self, candidates: Candidates, numbers: np.ndarray, priority: np.ndarray) -> None:
        _check_priority(priority)


class Prioritized(Selector):
    """P(i) = p[i]^α / Σ p^α; weights (N P(i))^-β over their maximum in the batch; new rows get the highest p so far.

    (Schaul et al. 2016, arXiv 1511.05952, proportional variant, eq. 1, section 3.4 and algorithm 1.) The total is cut
    into n equal parts and one number is drawn from each, as in their appendix B.2.1.
    """

    def __init__(self, rng: np.random.Generator, alpha: float, n_slots: int) -> None:
        """`alpha`: α in (0, 1].    `n_slots`: that of the candidates."""
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha} must be above 0 and at most 1; use Uniform for 0")
        self.rng, self.alpha, self._n_slots, self._tree = rng, alpha, n_slots, SumTree(n_slots)
        self._highest = 1.0  # p^α

    def __repr__(self) -> str:
        return f"Prioritized(alpha={self.alpha})"

    def update_candidates(self, candidates: Candidates, removed: np.ndarray) -> None:
        self._tree.set(removed, 0.0)
        self._tree.set(candidates.newest % candidates.n_slots, self._highest)

    def draw(self, candidates: Candidates, n: int) -> np.ndarray:
        slots = self._tree.find((np.arange(n) + self.rng.random(n)) / n)
        return candidates.lo + (slots - candidates.lo) % candidates.n_slots

    def weights(self, candidates: Candidates, numbers: np.ndarray, beta: float) -> np.ndarray | None:
        if beta == 0.0:
            return None
        power = self._tree.leaves.take(numbers % candidates.n_slots)
        return ((power / power.min()) ** -beta).astype(np.float32)  # N and the total cancel against the maximum

    def set_priorities(self, candidates: Candidates, numbers: np.ndarray, priority: np.ndarray) -> None:
        power = _check_priority(priority) ** self.alpha
        current = candidates.contains(numbers)
        if not current.all():
            numbers, power = numbers[current], power[current]
        if len(power):
            self._tree.set(numbers % candidates.n_slots, power)
            self._highest = max(self._highest, float(power.max()))

    def state_dict(self) -> dict[str, Any]:
        leaves = self._tree.leaves[: self._n_slots]
        return {**super().state_dict(), "power": leaves, "highest": self._highest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._tree.load(state["power"])
        self._highest = state["highest"]


def _check_priority(priority: np.ndarray) -> np.ndarray:
    """The priorities as float64, at most _MAX_PRIORITY; raises ValueError if one is negative, NaN or infinite."""
    if len(priority) and not (priority.min() >= 0 and priority.max() < np.inf):  # false with NaN
        wrong = priority[~((priority >= 0) & (priority < np.inf))]
        raise ValueError(
            f"{len(wrong)} of {len(priority)} priorities are negative, NaN or infinite (the first is {wrong[0]}); "
            f"is the loss finite?"
        )
    return np.minimum(priority, _MAX_PRIORITY, dtype=np.float64)
