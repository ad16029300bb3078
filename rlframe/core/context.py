"""Context variables that are set for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def set_within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Context in which the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
