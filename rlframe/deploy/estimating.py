"""`rlframe.evaluate RUN_DIR... estimate=wis,fqe dataset=PATH`: what trained policies are worth by a dataset."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rlframe.core.command_line import KeyValues
from rlframe.core.config import entries_of, nearest
from rlframe.core.errors import ConfigError, printable, shortened
from rlframe.core.files import prepare_json, write_output
from rlframe.core.multi_agent import JointSpace
from rlframe.deploy.load import load_chosen
from rlframe.evaluation.episode_rows import load_episodes
from rlframe.evaluation.estimate import METHODS, check_methods, estimate
from rlframe.evaluation.target_policy import target_policy
from rlframe.kernels.device import one_thread

KEYS = ("estimate", "dataset", "discount", "explore", "epsilon", "seed", "snapshot", "out", "device", "trust")


def estimate_runs(names: Sequence[str], words: KeyValues) -> int:
    """Print a table for each run, and write `out`; returns the exit status.

    Raises:
        ConfigError: a key is wrong; before a dataset is read.
    """
    if unknown := [key for key in words.remaining if key not in KEYS]:
        known = ", ".join(KEYS)
        raise ConfigError(f"{unknown[0]} has no meaning with estimate=, which has {known}{nearest(unknown[0], KEYS)}")
    methods, dataset = _methods(words.text("estimate")), words.text("dataset")
    if not dataset:
        raise ConfigError("estimate= needs dataset=PATH, the episodes to estimate from")
    explore, epsilon = words.flag("explore", True), words.number("epsilon", math.nan, 0, 1)
    discount, seed, out = words.number("discount", math.nan, 0, 1), words.count("seed", 0), words.text("out")
    device, trust, snapshot = words.text("device", "auto"), words.flag("trust"), words.text("snapshot")
    runs = [load_chosen(Path(name), snapshot, device, trust)[1] for name in names]
    for name, run in zip(names, runs, strict=True):
        if isinstance(run.observation_space, JointSpace):
            raise ConfigError(
                f"estimate= is for environments of a single agent so far, and env={run.env.id} of {name} has several; "
                f"leave it out, and the episodes are played"
            )
    policies = [target_policy(run.agent, run.observation_space, run.action_space, explore, epsilon) for run in runs]
    for policy in policies:
        check_methods(methods, policy)
    if out:
        prepare_json(Path(out))
    found = []
    for name, run, policy in zip(names, runs, policies, strict=True):
        episodes = load_episodes(dataset, run.observation_space, run.action_space)
        own = run.experiment.sampler_config().discount
        with one_thread():  # two threads took eight times the CPU time
            report = estimate(policy, episodes, own if math.isnan(discount) else discount, methods, seed)
        print(printable(f"{run.experiment.title()}: {run.snapshot}, trained for {run.trained_for}"))
        print(report.table())
        found.append({"run": name, **report.facts()})
    if out:
        write_output(Path(out), json.dumps(found if len(found) > 1 else found[0], indent=2) + "\n")
    return 0


def _methods(text: str) -> list[str]:
    try:
        return entries_of(text)
    except ValueError:
        raise ConfigError(f"estimate={shortened(text)!r} must be names, such as {','.join(METHODS)}") from None
