"""Means over an episode of the numbers that environments report in their infos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_NUMBERS = (int, float, np.bool_, np.integer, np.floating)  # bool is an int
# Those that a float sum takes as they are: an int may be too large for it, and float32 would make it a float32.
_PLAIN = frozenset({float, bool, np.bool_, np.float64, np.int64, np.int32})
_AT_ONCE = 32  # infos


class Means:
    """Running means by name, of one environment. Entries may appear and vanish; what is not a number is skipped."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # name: [sum, count]
        self._pending: list[dict[Any, Any]] = []

    def add(self, info: Any) -> None:
        """Count one step's info; never raises.

        Several are counted at once: by themselves, between steps of a simulator that fill the caches with its own,
        the four numbers of HalfCheetah take 3.7 us.
        """
        if isinstance(info, dict):
            self._pending.append(dict(info))  # which the environment may use again
            if len(self._pending) >= _AT_ONCE:
                self._count()

    def _count(self) -> None:
        sums = self._sums
        for info in self._pending:
            for name, value in info.items():
                entry = sums.get(name)
                if entry is not None and type(value) in _PLAIN:  # 2 us become 0.6 for the four entries of HalfCheetah
                    entry[0] += value
                    entry[1] += 1.0
                elif isinstance(value, _NUMBERS):
                    self._count_number(str(name), value)
        self._pending.clear()

    def _count_number(self, name: str, value: Any) -> None:
        """An int too large for a float is skipped."""
        try:
            number = float(value)
        except OverflowError:
            return
        entry = self._sums.get(name)
        if entry is None:
            self._sums[name] = [number, 1.0]
        else:
            entry[0] += number
            entry[1] += 1.0

    def clear(self) -> None:
        """Forget everything."""
        self._sums = {}
        self._pending.clear()

    def pop(self) -> dict[str, float]:
        """The means so far; forgets them."""
        self._count()
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means

    def state(self) -> dict[str, list[float]]:
        """Sum and count by name."""
        self._count()
        return {name: [float(total), float(count)] for name, (total, count) in self._sums.items()}

    def load(self, saved: Mapping[str, Sequence[float]]) -> None:
        """Go on from a saved state."""
        self.clear()
        self._sums = {name: list(entry) for name, entry in saved.items()}


class BatchMeans:
    """The same for the infos of a vector environment: arrays [n], with Gymnasium's `_name` masks where given."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._sums: dict[str, np.ndarray] = {}  # name: [2, n], sums above counts

    def add(self, infos: Any, valid: np.ndarray) -> None:
        """Count one step's infos where `valid` [n]; never raises."""
        for name, values in infos.items():
            is_mask = name.startswith("_") and name[1:] in infos
            if is_mask or not self._is_numeric(values):
                continue
            mask = infos.get(f"_{name}")
            counted = valid & mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else valid
            entry = self._sums.setdefault(name, np.zeros((2, self._n)))
            np.add(entry[0], values, out=entry[0], where=counted)
            entry[1] += counted

    def _is_numeric(self, values: Any) -> bool:
        return isinstance(values, np.ndarray) and values.shape == (self._n,) and values.dtype.kind in "biuf"

    def clear(self, which: np.ndarray) -> None:
        """Forget the environments where `which` [n]."""
        for entry in self._sums.values():
            entry[:, which] = 0.0

    def pop(self, index: int) -> dict[str, float]:
        """The means of environment `index` so far; forgets them."""
        means: dict[str, float] = {}
        for name, (sums, counts) in self._sums.items():
            if counts[index]:
                means[name] = float(sums[index] / counts[index])
                sums[index] = counts[index] = 0.0
        return means

    def state(self) -> dict[str, np.ndarray]:
        """Sums above counts [2, n], by name."""
        return {name: entry.copy() for name, entry in self._sums.items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        """Go on from a saved state."""
        self._sums = {name: entry.copy() for name, entry in saved.items()}
