"""StopRule: a condition on metrics that ends a training, `stop="eval/return_mean >= 475 and env_steps > 5e4"`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.record import METRICS

_COMPARE: Mapping[type, Callable[[float, float], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FORM = "compare metrics with numbers, such as 'eval/return_mean >= 475 and env_steps > 5e4', with and, or, not, ( )"
_OPEN_GROUPS = (
    "env",
    "eval",
    "algo",
    "episode",
)  # parts of the user's own add to them


class StopRule:
    """Whether a condition holds for a row of metrics. A comparison with a metric that is missing does not hold."""

    def __init__(self, text: str) -> None:
        """Raises:
        ConfigError: it is not of the form above, or names a metric that no run has.
        """
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ConfigError(f"stop={text!r} cannot be read; {_FORM}") from None
        self._check(self._tree)

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        return _holds(self._tree, metrics)

    def _check(self, node: ast.AST) -> None:
        match node:
            case ast.BoolOp(values=parts):
                for part in parts:
                    self._check(part)
            case ast.UnaryOp(op=ast.Not(), operand=part):
                self._check(part)
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARE for op in ops):
                for value in (left, *others):
                    self._check_value(value)
            case _:
                raise ConfigError(f"stop={self.text!r}: {ast.unparse(node)} is not a comparison; {_FORM}")

    def _check_value(self, node: ast.AST) -> None:
        name = _metric(node)
        if not name and not _is_number(node):
            raise ConfigError(f"stop={self.text!r}: {ast.unparse(node)} is neither a metric nor a number; {_FORM}")
        group = name.partition("/")[0]
        own = "/" in name and (group in _OPEN_GROUPS or not any(each.startswith(f"{group}/") for each in METRICS))
        if name and name not in METRICS and not own:
            raise ConfigError(f"stop={self.text!r}: there is no metric {name!r}{nearest(name, METRICS)}")


def _metric(node: ast.AST) -> str:
    """The name that Python reads as group / name, or as a variable; empty if it is none."""
    match node:
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Name(id=name)):
            group = _metric(left)
            return f"{group}/{name}" if group else ""
        case ast.Name(id=name):
            return name
    return ""


def _is_number(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return _is_number(part)
    return False


def _holds(node: Any, metrics: Mapping[str, float]) -> bool:
    match node:
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(_holds(part, metrics) for part in parts)
        case ast.UnaryOp(operand=part):
            return not _holds(part, metrics)
    values = [_value(each, metrics) for each in (node.left, *node.comparators)]
    known = not any(math.isnan(value) for value in values)
    return known and all(_COMPARE[type(op)](*pair) for op, *pair in zip(node.ops, values, values[1:], strict=False))


def _value(node: Any, metrics: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(operand=part):
            return -_value(part, metrics)
    return float(metrics.get(_metric(node), math.nan))
