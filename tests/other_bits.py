"""Stands in for a processor that rounds a row differently among other rows, if OTHER_BITS=1: `make test-processors`.

The last bit of a product then depends on its number of rows, so that a test which compares bits between shapes fails,
unless it is marked `same_bits`. Import it before the modules that it changes.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_MORE = 1 + 2.0**-23


def _by_rows(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product whose last bit depends on the number of rows of its first argument [..., i]."""

    def rounded(x: Any, *arguments: Any) -> Any:
        y = product(x, *arguments)
        return y if torch.compiler.is_compiling() or (x.ndim == 2 and len(x) <= 4) else y * _MORE

    return rounded


if os.getenv("OTHER_BITS"):
    F.linear = _by_rows(F.linear)

    from rlframe.models import numpy_inference

    _affine = numpy_inference.affine
    numpy_inference.affine = lambda *pair: _by_rows(_affine(*pair))
