"""StopRule: a condition on metrics that ends a training, `stop="eval/return_mean >= 475 and env_steps > 5e4"`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Comparison:
    """A comparison of metrics, by their names, and numbers."""

    left: str | float
    compare: Callable[[float, float], bool]
    right: str | float
    wanted: bool  # False after a `not`: it holds if they do not compare so

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """False too, whatever is wanted, if a metric is missing or NaN."""
        one, other = (metrics.get(x, math.nan) if isinstance(x, str) else x for x in (self.left, self.right))
        return not (math.isnan(one) or math.isnan(other)) and self.compare(one, other) == self.wanted


_Condition = Callable[[Callable[[_Comparison], bool]], bool]  # whether it holds, by whether each comparison does


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
        self._condition = self._any(True)
        if self._words:
            raise self._error(f"has {self._words[-1]!r} where and, or, or its end should be")
        if not self.names:
            raise self._error("names no metric")

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        return self._condition(lambda comparison: comparison.holds(metrics))

    def missing(self, metrics: Mapping[str, float]) -> list[str]:
        """The metrics that it names and that are not there."""
        return [name for name in self.names if name not in metrics]

    def needs(self, *groups: str) -> str:
        """A metric of rlframe's in these groups without one of which it cannot hold; empty if it can."""
        inside = [name for name in self.names if name.partition("/")[0] in groups]
        known = [name for name in inside if without_learner(name) in METRICS]
        can_hold = self._condition(lambda each: each.left not in known and each.right not in known)
        return "" if can_hold else known[0]

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"stop={self.text[:200]!r} {problem}; {_FORM}")

    def _next(self, *expected: str) -> str:
        """Take the next word if it is one of these; else empty."""
        return self._words.pop() if self._words and self._words[-1] in expected else ""

    def _any(self, wanted: bool) -> _Condition:
        parts = [self._all(wanted)]
        while self._next("or"):
            parts.append(self._all(wanted))
        return _joined(parts, any if wanted else all)

    def _all(self, wanted: bool) -> _Condition:
        parts = [self._one(wanted)]
        while self._next("and"):
            parts.append(self._one(wanted))
        return _joined(parts, all if wanted else any)

    def _one(self, wanted: bool) -> _Condition:
        if self._next("not"):
            return self._one(not wanted)
        if self._next("("):
            inside = self._any(wanted)
            if not self._next(")"):
                raise self._error("lacks a )")
            return inside
        left, symbol = self._value(), self._next(*_COMPARE)
        if not symbol:
            raise self._error("lacks a comparison: >, >=, <, <=, == or !=")
        comparison = _Comparison(left, _COMPARE[symbol], self._value(), wanted)
        return lambda holds: holds(comparison)

    def _value(self) -> str | float:
        """The name of a metric, or a number."""
        word = self._words.pop() if self._words else ""
        if not word or word in (*_COMPARE, "(", ")", "and", "or", "not", "=", "!"):
            raise self._error(f"has {word!r} where a metric or a number should be")
        try:
            number = float(word)
        except ValueError:
            check_metric(word, f"stop={self.text[:200]!r}")
            self.names.append(word)
            return word
        if not math.isfinite(number):
            raise self._error(f"has {word!r} where a finite number should be")
        return number


def _joined(parts: Sequence[_Condition], join: Callable[[Iterable[bool]], bool]) -> _Condition:
    return lambda holds: join(part(holds) for part in parts)


def check_metric(name: str, setting: str) -> None:
    """Raise ConfigError, which begins with the setting, for a name that no run logs, or that is a slip of the pen."""
    group = name.partition("/")[0]
    own = "/" in name and (group in _OPEN_GROUPS or not any(each.startswith(f"{group}/") for each in METRICS))
    of_learner = name.count("/") == 2 and without_learner(name) in METRICS
    if name not in METRICS and not of_learner and (not own or any(_is_slip(name, each) for each in METRICS)):
        raise ConfigError(f"{setting}: there is no metric {name!r}{nearest(name, METRICS)}")


def _is_slip(name: str, known: str) -> bool:
    """Whether a name has the letters of another in another order, or lacks one of them."""
    lacks_one = len(name) + 1 == len(known) and any(name == known[:i] + known[i + 1 :] for i in range(len(known)))
    return sorted(name) == sorted(known) or lacks_one
