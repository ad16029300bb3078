"""Saves an update that was skipped because its loss or a gradient was NaN or Inf, so that a user can look into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.algos.base import SkippedUpdate, UpdateMetrics
from rlframe.core.struct import Struct, Tree
from rlframe.record import current_run


def save_skipped_update(agent: Agent, algo: Algorithm, skipped: SkippedUpdate, metrics: UpdateMetrics) -> str:
    """Save its batch, the agent and the generators in the run directory; returns what was found as a sentence."""
    batch = _plain(skipped.batch)
    nonfinite = _not_finite(batch, "")
    gradients = _names(agent, skipped.parameters)
    facts = {
        "updates": skipped.updates,
        "env_steps": algo.progress.env_steps,
        **skipped.facts,
        "not_finite_in_batch": nonfinite,
        "not_finite_gradients": gradients,
        "metrics": {name: float(value) for name, value in metrics.items()},
    }
    state = {"batch": batch, "agent": agent.state_dict(), "generators": _generators(algo)}
    ranks = algo.progress.ranks
    name = f"nonfinite_{skipped.updates}" + (f"_rank_{ranks.rank}" if ranks.rank else "")
    path = current_run().dump(name, state, facts)
    in_batch = ", ".join(f"{place} ({n} values)" for place, n in nonfinite.items()) or "no value of the batch"
    return (
        f"update {skipped.updates:,} at env_steps {algo.progress.env_steps:,} was not applied: loss "
        f"{skipped.facts['loss']:g}, gradient norm {skipped.facts['grad_norm']:g}; NaN or Inf in {in_batch}"
        + (f"; its batch is in {path}" if path else "")
    )


def _plain(tree: Tree) -> Any:
    """A tree with Structs as dicts and tuples as lists."""
    if isinstance(tree, Struct):
        return {field.name: _plain(getattr(tree, field.name)) for field in fields(tree)}
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return [_plain(value) for value in tree]
    return tree


def _not_finite(tree: Any, path: str) -> dict[str, int]:
    """The number of values that are not finite, by the path of their array; arrays without any are left out."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            place: n for key, value in items for place, n in _not_finite(value, f"{path}.{key}".lstrip(".")).items()
        }
    n = int((~torch.as_tensor(tree).isfinite()).sum())
    return {path: n} if n else {}


def _names(agent: Agent, parameters: list[Tensor]) -> list[str]:
    names = {id(parameter): name for name, parameter in agent.named_parameters()}
    return [names.get(id(x), f"a parameter of the algorithm, of shape {list(x.shape)}") for x in parameters]


def _generators(algo: Algorithm) -> dict[str, Any]:
    """The states of the algorithm's own generators after the update, by attribute name."""
    found: dict[str, Any] = {}
    for name, value in vars(algo).items():
        if isinstance(value, torch.Generator):
            found[name] = value.get_state()
        elif isinstance(value, np.random.Generator):
            found[name] = value.bit_generator.state
    return found
