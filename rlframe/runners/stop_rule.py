"""StopRule: a condition on metrics that ends a training, `stop="eval/return_mean >= 475 and env_steps > 5e4"`."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.record import METRICS
from rlframe.record.metrics import without_learner

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_WORD = re.compile(r"\s*(>=|<=|==|!=|[<>()]|[^\s()<>=!]+|\S)")
_MAX_WORDS = 200
_FORM = "compare metrics with numbers, such as 'eval/return_mean >= 475 and env_steps > 5e4', with and, or, not, ( )"
_OPEN_GROUPS = ("env", "eval", "algo")  # parts of the user's own add to them

_FLIPPED = {">=": "<=", "<=": ">=", "==": "==", "!=": "!=", ">": "<", "<": ">"}  # with its sides exchanged
_OPPOSITE = {">=": "<", "<=": ">", "==": "!=", "!=": "==", ">": "<=", "<": ">="}
_COUNTED = ("env_steps", "updates")  # never negative, as are times
_MAX_WAYS = 200

Truth = bool | None  # None: not known, because a metric is missing or NaN
_Comparison = tuple[str | float, str, str | float]  # metric or number, symbol, metric or number
_Ways = list[list[_Comparison]]  # alternatives, in each of which all comparisons hold


@dataclass(frozen=True)
class _Node:
    """A condition, and in what ways it holds and fails."""

    truth: Callable[[Mapping[str, float]], Truth]
    holds: _Ways
    fails: _Ways


class StopRule:
    """Whether a condition holds for a row of metrics.

    A comparison with a missing metric neither holds nor fails, and nor does what depends on it.
    """

    def __init__(self, text: str) -> None:
        """Raises:
        ConfigError: it is not of the form above, or names a metric that no run has.
        """
        self.text = text
        self.names: list[str] = []  # of metrics
        self._words = [*reversed(_WORD.findall(text.strip())[: _MAX_WORDS + 1])]
        if len(self._words) > _MAX_WORDS:
            raise self._error(f"is longer than {_MAX_WORDS} words")
        self._tree = self._any()
        if self._words:
            raise self._error(f"has {self._words[-1]!r} where and, or, or its end should be")
        if not self.names:
            raise self._error("names no metric")
        if not self._tree.holds:
            raise self._error("can never hold")

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        return self._tree.truth(metrics) is True

    def missing(self, metrics: Mapping[str, float]) -> list[str]:
        """The metrics that it names and that are not there."""
        return [name for name in self.names if name not in metrics]

    def needs(self, group: str) -> str:
        """A metric of rlframe's in this group without one of which it cannot hold; empty if it can."""
        known = [name for name in self.names if name.startswith(f"{group}/") and without_learner(name) in METRICS]
        used = [[x for left, _, right in way for x in (left, right)] for way in self._tree.holds]
        return known[0] if known and all(any(name in way for name in known) for way in used) else ""

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"stop={self.text[:200]!r} {problem}; {_FORM}")

    def _next(self, *expected: str) -> str:
        """Take the next word if it is one of these; else empty."""
        return self._words.pop() if self._words and self._words[-1] in expected else ""

    def _any(self) -> _Node:
        parts = [self._all()]
        while self._next("or"):
            parts.append(self._all())
        return _Node(
            lambda metrics: _either([part.truth(metrics) for part in parts], True),
            [way for part in parts for way in part.holds],
            functools.reduce(_together, (part.fails for part in parts)),
        )

    def _all(self) -> _Node:
        parts = [self._one()]
        while self._next("and"):
            parts.append(self._one())
        return _Node(
            lambda metrics: _either([part.truth(metrics) for part in parts], False),
            functools.reduce(_together, (part.holds for part in parts)),
            [way for part in parts for way in part.fails],
        )

    def _one(self) -> _Node:
        if self._next("not"):
            part = self._one()
            return _Node(lambda metrics: _negation(part.truth(metrics)), part.fails, part.holds)
        if self._next("("):
            inside = self._any()
            if not self._next(")"):
                raise self._error("lacks a )")
            return inside
        left, symbol = self._value(), self._next(*_COMPARE)
        if not symbol:
            raise self._error("lacks a comparison: >, >=, <, <=, == or !=")
        right, compare = self._value(), _COMPARE[symbol]

        def truth(metrics: Mapping[str, float]) -> Truth:
            one, other = (metrics.get(x, math.nan) if isinstance(x, str) else x for x in (left, right))
            return None if math.isnan(one) or math.isnan(other) else compare(one, other)

        ways = ([[(left, each, right)]] for each in (symbol, _OPPOSITE[symbol]))
        return _Node(truth, *(list(filter(_is_possible, each)) for each in ways))

    def _value(self) -> str | float:
        """The name of a metric, or a number."""
        word = self._words.pop() if self._words else ""
        if not word or word in (*_COMPARE, "(", ")", "and", "or", "not", "=", "!"):
            raise self._error(f"has {word!r} where a metric or a number should be")
        try:
            number = float(word)
        except ValueError:
            self._check(word)
            self.names.append(word)
            return word
        if not math.isfinite(number):
            raise self._error(f"has {word!r} where a finite number should be")
        return number

    def _check(self, name: str) -> None:
        group = name.partition("/")[0]
        own = "/" in name and (group in _OPEN_GROUPS or not any(each.startswith(f"{group}/") for each in METRICS))
        of_learner = name.count("/") == 2 and without_learner(name) in METRICS
        if name not in METRICS and not own and not of_learner:
            raise ConfigError(f"stop={self.text[:200]!r}: there is no metric {name!r}{nearest(name, METRICS)}")


def _negation(truth: Truth) -> Truth:
    return None if truth is None else not truth


def _either(found: list[Any], decides: bool) -> Truth:
    """`decides` if one of them is that; else None if one is None; else not `decides`."""
    if decides in found:
        return decides
    return None if None in found else not decides


def _together(one: _Ways, other: _Ways) -> _Ways:
    """The ways in which both are so; one without comparisons, which is always possible, if there are very many."""
    if len(one) * len(other) > _MAX_WAYS:
        return [[]] if one and other else []
    return [way for a in one for b in other if _is_possible(way := a + b)]


def _is_possible(comparisons: list[_Comparison]) -> bool:
    """Whether some numbers fulfil all comparisons, as far as each metric alone tells."""
    limits: dict[str, list[tuple[str, float]]] = {}
    for left, symbol, right in comparisons:
        if isinstance(left, str) and isinstance(right, str):
            if left == right and not _COMPARE[symbol](0.0, 0.0):
                return False
        elif isinstance(left, str):
            limits.setdefault(left, []).append((symbol, float(right)))
        elif isinstance(right, str):
            limits.setdefault(right, []).append((_FLIPPED[symbol], left))
        elif not _COMPARE[symbol](left, right):
            return False
    return all(
        _has_number(each, 0.0 if name in _COUNTED or name.startswith("time/") else -math.inf)
        for name, each in limits.items()
    )


def _has_number(limits: list[tuple[str, float]], least: float) -> bool:
    """Whether a number from `least` on fulfils all limits: one of theirs, or one between or beyond them."""
    ends = sorted({value for _, value in limits} | {max(least, -1e308)})
    between = [a / 2 + b / 2 for a, b in itertools.pairwise(ends)]
    beyond = [math.nextafter(ends[0], -math.inf), math.nextafter(ends[-1], math.inf)]
    return any(
        x >= least and all(_COMPARE[symbol](x, value) for symbol, value in limits) for x in (*ends, *between, *beyond)
    )
