"""Variants of one test: the fast ones are of every run, the others are marked slow."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def variants(names: Iterable[str], fast: Container[str]) -> list[Any]:
    """Parameters in their order; those that are not in `fast` are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
