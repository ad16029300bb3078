"""What becomes of an update whose loss or gradient is NaN or Inf: it is saved, and ends the run or is skipped."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch

from rlframe.algos import Algorithm
from rlframe.algos.base import UpdateMetrics
from rlframe.record import current_run
from rlframe.runners.described import named_arrays, plain_tree
from rlframe.runners.learner import Diverged, Learner
from rlframe.updates.progress import SkippedUpdate

_logger = logging.getLogger("rlframe")


def skip_update(learner: Learner, metrics: UpdateMetrics, nonfinite: str, first: bool) -> None:
    """Save the update that was skipped, if it is the first one, and warn.

    Raises:
        Diverged: `nonfinite` is stop.
    """
    skipped = learner.algo.progress.skipped_updates.pop()
    if nonfinite == "stop":
        newest = current_run().newest_snapshot()
        look = "" if skipped.updates else "; as it is the first update, look at its loss and observations too"
        raise Diverged(
            f"{save_skipped_update(learner, skipped, metrics)}. "
            f"The last good snapshot is {newest or 'none'}. Try a lower learning rate ({skipped.rate}) or "
            f"smaller rewards{look}; runner.nonfinite=skip skips such updates"
        )
    if first:
        _logger.warning("%s; runner.nonfinite=skip continues", save_skipped_update(learner, skipped, metrics))


def save_skipped_update(learner: Learner, skipped: SkippedUpdate, metrics: UpdateMetrics) -> str:
    """Save its batch, the agent and the generators in the run directory; returns a sentence that describes it."""
    agent, algo = learner.agent, learner.algo
    batch = plain_tree(skipped.batch)
    counts = {path: int((~x.isfinite()).sum()) for path, x in named_arrays(batch)}
    nonfinite = {path: n for path, n in counts.items() if n}
    names = {id(parameter): name for name, parameter in agent.named_parameters()}

    def name_of(parameter: torch.Tensor) -> str:
        return names.get(id(parameter), f"a parameter of the algorithm, of shape {list(parameter.shape)}")

    facts: dict[str, Any] = {
        "updates": skipped.updates,
        "env_steps": algo.progress.env_steps,
        **skipped.facts,
        "not_finite_in_batch": nonfinite,
        **({} if skipped.parameters is None else {"not_finite_gradients": [*map(name_of, skipped.parameters)]}),
        "metrics": {name: float(value) for name, value in metrics.items()},
    }
    state = {"batch": batch, "agent": agent.state_dict(), "generators": _generators(algo)}
    ranks = algo.progress.ranks
    whose = f"_{learner.name}" if learner.name else ""
    name = f"nonfinite{whose}_{skipped.updates}" + (f"_rank_{ranks.rank}" if ranks.rank else "")
    path = current_run().dump(name, state, facts)
    in_batch = ", ".join(f"{place} ({n} values)" for place, n in nonfinite.items()) or "none of the batch's values"
    in_metrics = ", ".join(f"algo/{name}" for name, x in facts["metrics"].items() if not math.isfinite(x))
    return (
        f"update {skipped.updates:,}{learner.of} at env_steps {algo.progress.env_steps:,} was not applied: loss "
        f"{skipped.facts['loss']:g}, gradient norm {skipped.facts['grad_norm']:g}; NaN or Inf in {in_batch}"
        + (f", and in {in_metrics}" if in_metrics else "")
        + (f"; its batch is in {path}" if path else "")
    )


def _generators(algo: Algorithm) -> dict[str, Any]:
    """The states of the algorithm's own generators after the update, by attribute name."""
    found: dict[str, Any] = {}
    for name, value in vars(algo).items():
        if isinstance(value, torch.Generator):
            found[name] = value.get_state()
        elif isinstance(value, np.random.Generator):
            found[name] = value.bit_generator.state
    return found
