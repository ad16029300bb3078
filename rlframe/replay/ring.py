"""Where rows lie: time since the beginning goes round a ring of L time steps of B environments; what may be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Ring:
    """Row (time, b) has the number time * B + b, for ever, and the slot number % (L * B), until it is overwritten.

    Rows before `t` are complete; row `t`, where the next batch starts, is written already, all but its action.
    """

    def __init__(self, L: int, B: int) -> None:
        self.L, self.B, self.n_slots = L, B, L * B
        self.t = 0

    @property
    def oldest(self) -> int:
        """The time of the oldest row that is not overwritten."""
        return max(0, self.t + 1 - self.L)

    @property
    def n_used(self) -> int:
        """Time steps of the ring that hold something, from its beginning."""
        return min(self.t + 1, self.L)


def spans(time: int, n: int, L: int) -> list[tuple[slice, slice]]:
    """Where to write n time steps from `time` on: one or two pairs of (places in the ring, part of the n)."""
    start = time % L
    fits = min(n, L - start)
    first = (slice(start, start + fits), slice(0, fits))
    return [first] if fits == n else [first, (slice(0, n - fits), slice(fits, n))]


def write_rows(grid: np.ndarray, time: int, values: Any) -> None:
    """Write values [n, ...] from `time` on into a ring of len(grid) time steps."""
    for places, part in spans(time, len(values), len(grid)):
        grid[places] = values[part]


def read_rows(grid: np.ndarray, time: int, n: int) -> np.ndarray:
    """n time steps [n, ...] from `time` on; a view, unless they go round the end of the ring."""
    parts = [grid[places] for places, _ in spans(time, n, len(grid))]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Choices:
    """What a selector draws from: the numbers lo..hi-1 but those that are not eligible. Moves forward only."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.lo = self.hi = 0
        self.eligible = np.zeros(n_slots, np.bool_)  # by number % n_slots; False outside of lo..hi-1
        self.n = 0  # eligible ones
        self.newest = np.zeros(0, np.int64)  # numbers that became eligible with the last move

    def move(self, lo: int, hi: int, eligible: np.ndarray) -> np.ndarray:
        """Go on to lo..hi-1, which may be none; returns the slots that are no longer to be drawn.

        Args:
            eligible: [hi - max(lo, hi before)] bool, of the new numbers.
        """
        first, last = self.lo, min(lo, self.hi)
        for places, _ in spans(first, max(0, last - first), self.n_slots):
            self.n -= int(np.count_nonzero(self.eligible[places]))
            self.eligible[places] = False
        new = max(lo, self.hi)
        write_rows(self.eligible, new, eligible)
        self.newest = np.flatnonzero(eligible) + new
        self.n += len(self.newest)
        self.lo, self.hi = lo, hi
        return np.arange(first, last) % self.n_slots

    def among(self, numbers: np.ndarray) -> np.ndarray:
        """Which of `numbers` may be drawn: [n] bool."""
        return (numbers >= self.lo) & (numbers < self.hi) & self.eligible[numbers % self.n_slots]

    def state_dict(self) -> dict[str, Any]:
        """All of it; arrays are views."""
        return {"lo": self.lo, "hi": self.hi, "eligible": self.eligible, "newest": self.newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same size."""
        self.lo, self.hi, self.newest = state["lo"], state["hi"], np.array(state["newest"])
        self.eligible[...] = state["eligible"]
        self.n = int(np.count_nonzero(self.eligible))
