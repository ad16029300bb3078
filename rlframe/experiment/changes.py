"""Which settings a run may change at a snapshot: numbers of its algorithm that have no part in the saved state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError
from rlframe.core.parts import Part, known_keys
from rlframe.core.schedule import accepts_schedule
from rlframe.experiment.agents import OF_POLICY, named_policies
from rlframe.experiment.config import Experiment
from rlframe.experiment.objects import long_key
from rlframe.experiment.settings import to_flat
from rlframe.record.branch import changes_of

_GROUPS = ("algo.", "reward.")
_COUNTS = tuple(  # no sizes of the state
    f"algo.{name}"
    for name in ("epochs", "minibatches", "batch_size", "replay_ratio", "policy_interval", "target_interval")
)
_IN_STATE = (  # numbers that the state is of
    *("algo.v_min", "algo.v_max", "algo.explore.log_std", "algo.optimizer.momentum"),
)
WHAT_CAN = f"numbers of {' and '.join(_GROUPS)} that the saved state does not depend on, such as algo.learning_rate, "
WHAT_CAN += f"and {', '.join(_COUNTS)}; of each policy, if they have names (agents.policies.red.algo.learning_rate)"


def can_change(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a run with this flat config can change a key at a snapshot; `key`: its full name.

    Where policies have names, their own keys are in the place of the run's.
    """
    field = known_keys(Experiment, config).get(key)
    if field is None or isinstance(field, Part | type):
        return False
    of_policy, policies = OF_POLICY.fullmatch(key), named_policies(config)
    if of_policy:
        prefix, key = key.removesuffix(of_policy[2]), of_policy[2]
        config = {name.removeprefix(prefix): x for name, x in config.items() if name.startswith(prefix)}
    elif policies and key.startswith("algo."):
        return False
    is_number = accepts_schedule(field) or field.final_type is float
    in_state = {*_IN_STATE, *(["algo.temperature"] if config.get("algo.learn_temperature") else [])}
    in_state |= {"algo.discount"} if "algo.replay" in config else set()  # of the returns in stored rows
    return key in _COUNTS or (is_number and key.startswith(_GROUPS) and key not in in_state)


def check_changeable(experiment: Experiment, keys: Iterable[str], prefix: str = "") -> set[str]:
    """Returns those of the keys that take a schedule.

    Args:
        prefix: of the keys on the command line, for the message.
    Raises:
        ConfigError: a run cannot change one of them at a snapshot; the message says which it can.
    """
    given, scheduled = to_flat(experiment), set()
    known = known_keys(Experiment, given)
    for key in keys:
        if not can_change(long := long_key(key), given):
            raise ConfigError(f"{prefix}{key}: a run cannot change {key} at a snapshot, only {WHAT_CAN}; remove it")
        scheduled |= {key} if accepts_schedule(known[long]) else set()
    return scheduled


def changed_at(run: Path, env_steps: int) -> set[str]:
    """The keys that a run changed at its snapshot of `env_steps`."""
    notes = [note for note in changes_of(run) if note.get("env_steps") == env_steps]
    return {str(key) for note in notes if isinstance(note.get("changed"), list) for key in note["changed"]}
