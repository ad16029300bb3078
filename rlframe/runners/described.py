"""What debug.log says of batches: for each array its shape, type, range and mean, and values that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rlframe.core.struct import Struct, Tree
from rlframe.core.types import Samples
from rlframe.record.messages import debug_is_shown
from rlframe.record.metrics import of_learner

_logger = logging.getLogger("rlframe")


class DescribedBatches:
    """Describes the first batch, and where the console shows DEBUG messages one after each row of the log."""

    def __init__(self) -> None:
        self.n, self._due = 0, True  # batches described so far; the next one is

    def receive(self, batches: Mapping[str, Samples], clock: str, now: int) -> None:
        """Describe the batches of each learner, if it is time; `now`: by the runner's clock, with them."""
        if not self._due:
            return
        which = f"batch until {clock} {now:,}" if self.n else "first batch"
        for name, samples in batches.items():
            _logger.debug("%s:\n%s", which, "\n".join(describe_tree(samples, of_learner("samples", name))))
        self.n, self._due = self.n + 1, False

    def end_interval(self) -> None:
        """A row of the log is due."""
        self._due = self._due or debug_is_shown()


def plain_tree(tree: Tree) -> Any:
    """A tree with Structs as dicts and tuples as lists."""
    if isinstance(tree, Struct):
        return {field.name: plain_tree(getattr(tree, field.name)) for field in fields(tree)}
    if isinstance(tree, Mapping):
        return {key: plain_tree(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return [plain_tree(value) for value in tree]
    return tree


def named_arrays(plain: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The arrays of a `plain_tree`, each with its path after the name."""
    if isinstance(plain, dict | list):
        for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from named_arrays(value, f"{name}.{key}".lstrip("."))
    else:
        yield name, torch.as_tensor(plain)


def describe_tree(tree: Tree, name: str) -> list[str]:
    """A line for each array: its name, shape, type, range and mean, and how many values are not finite."""
    return [_described(x, path) for path, x in named_arrays(plain_tree(tree), name)]


def _described(x: Tensor, name: str) -> str:
    finite = (x[x.isfinite()] if x.is_floating_point() else x).double()
    of = f"{finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}" if finite.numel() else "no finite values"
    n_nan, n_infinite = int(x.isnan().sum()), int(x.isinf().sum())
    wrong = "".join(f", {n:,} {what}" for n, what in ((n_nan, "NaN"), (n_infinite, "infinite")) if n)
    return f"  {name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}: {of}{wrong}"
