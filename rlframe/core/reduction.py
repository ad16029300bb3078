"""How the values of a metric become one number: by their mean, or by what its name ends in: _sum, _last, _min, _max.

And how the counters of several samplers become those of one.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence

Reduction = Callable[[float, float], float]  # (so far, another value) -> so far


def _last(before: float, value: float) -> float:
    return value


def _min(before: float, value: float) -> float:
    """NaN if one of them is, which Python's min has only where it comes first."""
    return value if value < before or value != value else before


def _max(before: float, value: float) -> float:
    """As `_min`."""
    return value if value > before or value != value else before


LARGEST = ("time/slowest_worker",)  # metrics of which that of several processes is the largest
_REDUCTIONS: Mapping[str, Reduction] = {"sum": operator.add, "last": _last, "min": _min, "max": _max}


@functools.cache
def reduction_of(name: str) -> Reduction | None:
    """None for the mean."""
    return _REDUCTIONS.get(name.rpartition("_")[2]) if "_" in name else None


def combined(name: str, values: Sequence[float]) -> float:
    """The values of a metric, at least one, as one: their mean, or what its name ends in."""
    reduce = reduction_of(name)
    return functools.reduce(reduce, values) if reduce else sum(values) / len(values)


def over_samplers(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The counters of several samplers as one's: sums, means of fractions, and the largest of LARGEST."""
    found: dict[str, list[float]] = {}
    for own in counters:
        for name, value in own.items():
            found.setdefault(name, []).append(value)
    return {
        name: max(values) if name in LARGEST else sum(values) / (len(values) if "fraction" in name else 1)
        for name, values in found.items()
    }
