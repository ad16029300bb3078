"""Optimizers keep the settings that changed since a snapshot was saved, while its state is loaded into an algorithm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from rlframe.algos.base import Algorithm
from rlframe.algos.optimizer_step import OptimizerStep

_RATE = "lr"  # of torch's optimizers


@contextmanager
def keeping(algos: Sequence[Algorithm], changed: Collection[str]) -> Iterator[None]:
    """Load a state of algorithms within the block. Optimizers' settings that are `changed` stay as they were before it.

    An OptimizerStep saves no rate but one that a callback set, which then ends. A torch.optim.Optimizer that is an
    attribute of the algorithm saves all its settings: its own are known by the last part of a key, and `lr` by
    learning_rate.

    Args:
        changed: keys, such as algo.learning_rate.
    """
    parts = [part for algo in algos for part in vars(algo.unwrapped).values()] if changed else []
    steps = [part for part in parts if isinstance(part, OptimizerStep) and part.rate_key in changed]
    rates = [step.learning_rate for step in steps]
    names = {key.rpartition(".")[2] for key in changed}
    names |= {_RATE} if any(name.endswith("learning_rate") for name in names) else set()
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    kept = [[{k: x for k, x in group.items() if k in names} for group in each.param_groups] for each in optimizers]
    yield
    for step, rate in zip(steps, rates, strict=True):
        step.use_rate(rate)
    for each, groups in zip(optimizers, kept, strict=True):
        for group, own in zip(each.param_groups, groups, strict=True):
            group.update(own)
