"""Which rows are drawn: uniformly, or in proportion to their priorities by a sum tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.replay.columns import Choices

WIDTH = 64  # children of a node
_ROOT = 1024  # children of the root, at most: one cumulative sum of them serves a whole batch


class SumTree:
    """float64 priorities of `n` leaves. A parent is recomputed as the sum of its children, so nothing drifts.

    Four million leaves are three levels. Of widths from 16 to 256 none is faster for 32 out of a million: what takes
    time is the number of calls, then the cumulative sums.
    """

    def __init__(self, n: int) -> None:
        """Zeros."""
        self._levels: list[np.ndarray] = []  # [m, WIDTH] each, leaves first
        while not self._levels or n > _ROOT:
            n = -(-n // WIDTH)
            self._levels.append(np.zeros((n, WIDTH)))
        self._root = np.zeros(n)
        self.leaves = self._levels[0].reshape(-1)  # a view
        self._parents = [level.reshape(-1) for level in self._levels[1:]] + [self._root]

    @property
    def total(self) -> float:
        """The sum of all."""
        return float(self._root.cumsum()[-1])

    def set(self, index: np.ndarray, priority: np.ndarray | float) -> None:
        """Set leaves [n]; of several for the same leaf, the last counts."""
        self.leaves[index] = priority
        node = index // WIDTH
        for level, parent in zip(self._levels, self._parents, strict=True):
            if len(node) > WIDTH:
                node = np.unique(node)
            parent[node] = level.take(node, axis=0).sum(axis=1)
            node = node // WIDTH

    def find(self, share: np.ndarray) -> np.ndarray:
        """The leaves within whose parts of the total `share` [n] fall, from 0 to 1; never one of priority 0.

        Raises:
            ValueError: all are 0.
        """
        sums = self._root.cumsum()
        if not sums[-1] > 0:
            raise ValueError("every priority is 0; add a small constant to priorities")
        mass = np.minimum(share * sums[-1], np.nextafter(sums[-1], 0.0))
        node = sums.searchsorted(mass, side="right")
        mass -= sums[node] - self._root[node]
        rows = np.arange(len(mass))
        for level in reversed(self._levels):
            children = level.take(node, axis=0)  # [n, WIDTH]
            sums = children.cumsum(axis=1)
            mass = np.minimum(mass, np.nextafter(sums[:, -1], 0.0))[:, None]  # rounding may have left the node
            child = (sums > mass).argmax(axis=1)
            node = node * WIDTH + child
            if level is not self._levels[0]:
                mass = mass[:, 0] - (sums[rows, child] - children[rows, child])
        return node

    def load(self, leaves: np.ndarray) -> None:
        """Set all leaves."""
        self.leaves[: len(leaves)] = leaves
        for level, parent in zip(self._levels, self._parents, strict=True):
            parent[: len(level)] = level.sum(axis=1)


_LARGEST = 1e30  # of a priority: no sum overflows, nor is it above float32


class Selector(ABC):
    """Draws from `Choices`, which it is told the moves of."""

    rng: np.random.Generator

    @abstractmethod
    def __repr__(self) -> str:
        """What it is, so that a saved state is loaded by its like only."""

    @abstractmethod
    def move(self, choices: Choices, gone: np.ndarray) -> None:
        """`choices` has moved; `gone` are the slots no longer to be drawn."""

    @abstractmethod
    def draw(self, choices: Choices, n: int) -> np.ndarray:
        """n numbers [n] int64, with replacement; there is at least one to choose."""

    @abstractmethod
    def weight(self, choices: Choices, numbers: np.ndarray, beta: float) -> np.ndarray | None:
        """Importance weights [n] float32, at most 1; None where all are 1."""

    @abstractmethod
    def update(self, choices: Choices, numbers: np.ndarray, priority: np.ndarray) -> None:
        """Set the priorities [n] of those of `numbers` that may still be drawn.

        Raises:
            ValueError: a priority is negative, NaN or infinite.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The generator, and all else that decides what is drawn."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""


class Uniform(Selector):
    """Each with the same probability; priorities are checked and forgotten."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __repr__(self) -> str:
        return "Uniform()"

    def move(self, choices: Choices, gone: np.ndarray) -> None:
        """Nothing."""

    def draw(self, choices: Choices, n: int) -> np.ndarray:
        drawn = self._anywhere(choices, n)
        wrong = np.flatnonzero(~choices.eligible.take(drawn % choices.n_slots))
        while len(wrong):
            drawn[wrong] = again = self._anywhere(choices, len(wrong))
            wrong = wrong[~choices.eligible.take(again % choices.n_slots)]
        return drawn

    def _anywhere(self, choices: Choices, n: int) -> np.ndarray:
        # rng.integers takes 5.8 us for 256, this 2.5; a float's 53 bits are plenty for the 2**30 numbers there may be
        drawn = (self.rng.random(n) * (choices.hi - choices.lo)).astype(np.int64)
        drawn += choices.lo
        return drawn

    def weight(self, choices: Choices, numbers: np.ndarray, beta: float) -> np.ndarray | None:
        return None

    def update(self, choices: Choices, numbers: np.ndarray, priority: np.ndarray) -> None:
        _checked(priority)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Prioritized(Selector):
    """P(i) = p[i]^α / Σ p^α, weights (N P(i))^-β over their maximum in the batch; new rows have the highest p so far.

    (Schaul et al. 2016, arXiv 1511.05952, proportional variant, eq. 1, section 3.4 and algorithm 1.) The total is cut
    in n equal parts and one number drawn in each, as in their appendix B.2.1.
    """

    def __init__(self, rng: np.random.Generator, alpha: float, n_slots: int) -> None:
        """Args:
        alpha: α, above 0; 0 would be Uniform.    n_slots: of the choices.

        Raises:
            ValueError: alpha is not above 0 and at most 1.
        """
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha} must be above 0 (where Uniform does) and at most 1")
        self.rng, self.alpha = rng, alpha
        self._tree = SumTree(n_slots)
        self._n_slots = n_slots
        self._highest = 1.0  # p^α

    def __repr__(self) -> str:
        return f"Prioritized(alpha={self.alpha})"

    def move(self, choices: Choices, gone: np.ndarray) -> None:
        self._tree.set(gone, 0.0)
        self._tree.set(choices.newest % choices.n_slots, self._highest)

    def draw(self, choices: Choices, n: int) -> np.ndarray:
        slots = self._tree.find((np.arange(n) + self.rng.random(n)) / n)
        return choices.lo + (slots - choices.lo) % choices.n_slots

    def weight(self, choices: Choices, numbers: np.ndarray, beta: float) -> np.ndarray | None:
        if beta == 0.0:
            return None
        power = self._tree.leaves.take(numbers % choices.n_slots)
        return ((power / power.min()) ** -beta).astype(np.float32)  # N and the total cancel against the maximum

    def update(self, choices: Choices, numbers: np.ndarray, priority: np.ndarray) -> None:
        power = _checked(priority) ** self.alpha
        current = choices.among(numbers)
        if not current.all():
            numbers, power = numbers[current], power[current]
        if len(power):
            self._tree.set(numbers % choices.n_slots, power)
            self._highest = max(self._highest, float(power.max()))

    def state_dict(self) -> dict[str, Any]:
        leaves = self._tree.leaves[: self._n_slots]
        return {"rng": self.rng.bit_generator.state, "power": leaves, "highest": self._highest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self._tree.load(state["power"])
        self._highest = state["highest"]


def _checked(priority: np.ndarray) -> np.ndarray:
    """As float64.

    Raises:
        ValueError: one is negative, NaN or infinite.
    """
    if len(priority) and not (priority.min() >= 0 and priority.max() < _LARGEST):  # false with NaN
        wrong = priority[~((priority >= 0) & (priority < _LARGEST))]
        raise ValueError(
            f"{len(wrong)} of {len(priority)} priorities are negative, NaN or infinite (the first is {wrong[0]}); "
            f"is the loss finite?"
        )
    return priority.astype(np.float64)
