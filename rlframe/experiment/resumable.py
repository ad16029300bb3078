"""What a run may change when it continues from a saved state: as the same run, or restored as one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import chz

from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import state_fields
from rlframe.core.parts import ConfigField, fields_of, known_keys
from rlframe.core.schedule import accepts_schedule
from rlframe.experiment.agents import without_policy
from rlframe.experiment.config import Experiment
from rlframe.experiment.objects import is_same, long_key
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.experiment.study_keys import SEARCH
from rlframe.record.branch import changes_of

_GROUPS = ("algo.", "reward.")
_COUNTS = tuple(  # no sizes of the state
    f"algo.{name}"
    for name in ("epochs", "minibatches", "batch_size", "replay_ratio", "policy_interval", "target_interval")
)
WHAT_CAN = f"numbers of {' and '.join(_GROUPS)} that the saved state does not depend on, such as algo.learning_rate, "
WHAT_CAN += f"and {', '.join(_COUNTS)}; of each policy, if they have names (agents.policies.red.algo.learning_rate)"
_ADJUSTABLE = (  # in a resumed run
    *("runner.", "eval.", "stop", "snapshot_", "device", "threads", "affinity", "sampler", "loggers", "log_level"),
    *("compile", "sync", "env_vars"),
)
_FIXED = (
    *("sampler.batch_T", "sampler.batch_B", "sampler.decorrelation_steps", "sampler.complete_episodes"),
)  # although sampler is adjustable

CheckResumed = Callable[[str, Mapping[str, Any], Mapping[str, Any]], None]  # of a run, its config, and the keys given


def is_fixed(key: str) -> bool:
    """Whether a resumed run cannot change the key."""
    return not key.startswith(_ADJUSTABLE) or key in _FIXED


def check_same_run(run: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run in the directory `run` would not be the same run with these keys.

    Args:
        config: of the run.    given: keys in the place of its own.
    """
    fixed = [key for key in given if is_fixed(key) and not (key in config and is_same(given[key], config[key]))]
    if fixed and all(key in config for key in fixed):  # perhaps the same value, written otherwise
        with suppress(ConfigError):
            after = to_flat(from_flat({**config, **{key: given[key] for key in fixed}}))
            fixed = [key for key in fixed if not is_same(after.get(key), config[key])]
    if set(fixed) - set(known_keys(Experiment, {**config, **given})):
        from_flat(config, given)  # raises ConfigError with the key that is meant
    if fixed:
        own, restores = from_flat(config), ", and for its whole state with other numbers rlframe.restore"
        raise ConfigError(
            f"resume continues the run as it is: {', '.join(fixed)} cannot change "
            f"(what can: {', '.join(_ADJUSTABLE)}, but not {', '.join(_FIXED)}); "
            f"for a new run from its weights use init={run}{restores * all(can_change(key, own) for key in fixed)}"
        )


def check_fits_state(run: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a run of its own can continue with these keys from the state of the one in `run`.

    Beside what a resumed run may change, these are what `can_change` names. They hold from the restored state on.

    Args:
        config: of the run.    given: all keys of the new one, or those in the place of the other's.
    """
    own = {**config, **{key: value for key, value in given.items() if is_same(value, config.get(key))}}  # with objects
    experiment = from_flat(own, given)
    before, after = to_flat(from_flat(own)), to_flat(experiment)
    changed = [key for key in {**before, **after} if not is_same(after.get(key), before.get(key))]
    wrong = [key for key in changed if is_fixed(key) and after.get(key) != "auto" and not can_change(key, experiment)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} cannot change from the state of {run}, only {WHAT_CAN}; "
            f"for a new run from its weights use init={run}"
        )


def can_change(key: str, experiment: Experiment) -> bool:
    """Whether such a run can change a key at a snapshot; `key`: its full name.

    Where policies have names, their own keys are in the place of the run's.
    """
    config, field = _place(experiment, key)
    if field is None or field.part or field.below or (experiment.agents.policies and key.startswith("algo.")):
        return False
    if key.rpartition(".")[2] in state_fields(config):
        return False
    is_number = accepts_schedule(field.chz) or field.chz.final_type is float
    return without_policy(key) in _COUNTS or (is_number and without_policy(key).startswith(_GROUPS))


def _place(experiment: Experiment, key: str) -> tuple[Any, ConfigField | None]:
    """The config that has a key, and the key's field there; None: there is no such key."""
    *around, name = key.split(".")
    config: Any = experiment
    for each in around:
        config = config.get(each) if isinstance(config, Mapping) else getattr(config, each, None)
    return config, fields_of(type(config)).get(name) if chz.is_chz(config) else None


def check_changeable(experiment: Experiment, keys: Iterable[str]) -> set[str]:
    """Returns those of the searched keys that take a schedule.

    Raises:
        ConfigError: a run cannot change one of them at a snapshot; the message says which it can.
    """
    scheduled = set()
    for key in keys:
        if not can_change(long_key(key), experiment):
            raise ConfigError(f"{SEARCH}{key}: a run cannot change {key} at a snapshot, only {WHAT_CAN}; remove it")
        if (field := _place(experiment, long_key(key))[1]) and accepts_schedule(field.chz):
            scheduled.add(key)
    return scheduled


def changed_at(run: Path, env_steps: int) -> set[str]:
    """The keys that a run changed at its snapshot of `env_steps`."""
    notes = [note for note in changes_of(run) if note.get("env_steps") == env_steps]
    return {str(key) for note in notes if isinstance(note.get("changed"), list) for key in note["changed"]}
