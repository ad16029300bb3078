"""How the values of a metric become one number: by their mean, or by what its name ends in: _sum, _last, _min, _max."""

import operator
from collections.abc import Callable, Mapping

Reduction = Callable[[float, float], float]  # (so far, another value) -> so far


def _last(before: float, value: float) -> float:
    return value


_REDUCTIONS: Mapping[str, Reduction] = {"sum": operator.add, "last": _last, "min": min, "max": max}


def reduction_of(name: str) -> Reduction | None:
    """None for the mean."""
    return _REDUCTIONS.get(name.rpartition("_")[2]) if "_" in name else None
