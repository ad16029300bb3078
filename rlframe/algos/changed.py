"""Optimizers keep the settings that changed since a snapshot was saved, while its state is loaded into an algorithm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from rlframe.algos.base import Algorithm
from rlframe.updates.optimizer_step import OptimizerStep

_RATE = "lr"  # of torch's optimizers


@contextmanager
def keeping(algos: Mapping[str, Algorithm], changed: Collection[str]) -> Iterator[None]:
    """Load a state of algorithms within the block. Optimizers' settings that are `changed` stay as they were before it.

    An OptimizerStep saves no rate but one that a callback set, which then ends. A torch.optim.Optimizer that is an
    attribute of the algorithm saves all its settings: its own are known by the last part of a key, and `lr` by
    learning_rate.

    Args:
        algos: by the name of their policies.
        changed: keys, such as algo.learning_rate, or agents.policies.red.algo.learning_rate of one of several policies.
    """
    with ExitStack() as kept:
        for name, algo in algos.items():
            own = {key.removeprefix(f"agents.policies.{name}.") for key in changed}
            kept.enter_context(_keeping(algo, {key for key in own if not key.startswith("agents.")}))
        yield


@contextmanager
def _keeping(algo: Algorithm, changed: Collection[str]) -> Iterator[None]:
    parts = list(vars(algo).values()) if changed else []
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
