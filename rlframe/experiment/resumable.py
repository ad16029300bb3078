"""What a run may change when it continues from a saved state: as the same run, or restored as one of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlframe.core.errors import ConfigError
from rlframe.experiment.changes import WHAT_CAN, can_change
from rlframe.experiment.objects import is_same
from rlframe.experiment.settings import from_flat, to_flat

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
    if fixed:
        raise ConfigError(
            f"resume continues the run as it is: {', '.join(fixed)} cannot change "
            f"(what can: {', '.join(_ADJUSTABLE)}, but not {', '.join(_FIXED)}); "
            f"for a new run from its weights use init={run}"
        )


def check_fits_state(run: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a run of its own can continue with these keys from the state of the one in `run`.

    Beside what a resumed run may change, these are what `can_change` names. They hold from the restored state on.

    Args:
        config: of the run.    given: all keys of the new one, or those in the place of the other's.
    """
    own = {**config, **{key: value for key, value in given.items() if is_same(value, config.get(key))}}  # with objects
    before, after = to_flat(from_flat(own)), to_flat(from_flat(own, given))
    changed = [key for key in {**before, **after} if not is_same(after.get(key), before.get(key))]
    wrong = [key for key in changed if is_fixed(key) and after.get(key) != "auto" and not can_change(key, after)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} cannot change from the state of {run}, only {WHAT_CAN}; "
            f"for a new run from its weights use init={run}"
        )
