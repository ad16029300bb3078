"""Which settings a run may change at a snapshot: numbers of its algorithm that have no part in the saved state."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlframe.core.errors import ConfigError
from rlframe.core.parts import Part, known_keys
from rlframe.core.schedule import accepts_schedule
from rlframe.experiment.config import Experiment
from rlframe.experiment.objects import long_key
from rlframe.experiment.settings import to_flat
from rlframe.record.branch import changes_of

_GROUPS = ("algo.", "reward.")
_COUNTS = ("algo.epochs", "algo.minibatches", "algo.policy_interval", "algo.target_interval")  # no sizes of the state
_IN_STATE = (
    "algo.v_min",
    "algo.v_max",
    "algo.explore.log_std",
    "algo.optimizer.momentum",
)  # numbers that the state is of


def check_changeable(experiment: Experiment, keys: Iterable[str], prefix: str = "") -> set[str]:
    """Returns those of the keys that take a schedule.

    Args:
        prefix: of the keys on the command line, for the message.
    Raises:
        ConfigError: a run cannot change one of them at a snapshot; the message says which it can.
    """
    given, scheduled = to_flat(experiment), set()
    known = known_keys(Experiment, given)
    in_state = (*_IN_STATE, *(["algo.temperature"] if given.get("algo.learn_temperature") else []))
    for key in keys:
        long = long_key(key)
        field = known.get(long)
        is_part = field is None or isinstance(field, Part | type)
        varies = not is_part and accepts_schedule(field)
        kind = None if field is None or is_part else field.final_type
        is_number = long.startswith(_GROUPS) and (varies or kind is float) and long not in in_state
        if not (is_number or long in _COUNTS):
            raise ConfigError(
                f"{prefix}{key}: a run cannot change {key} at a snapshot, only numbers of {' and '.join(_GROUPS)} that "
                f"its state does not depend on, such as algo.learning_rate, and {', '.join(_COUNTS)}; remove it"
            )
        scheduled |= {key} if varies else set()
    return scheduled


def changed_at(run: Path, env_steps: int) -> set[str]:
    """The keys that a run changed at its snapshot of `env_steps`."""
    notes = [note for note in changes_of(run) if note.get("env_steps") == env_steps]
    return {str(key) for note in notes if isinstance(note.get("changed"), list) for key in note["changed"]}
