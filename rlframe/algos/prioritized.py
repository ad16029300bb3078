"""The keys of prioritized replay that DQN, DDPG, TD3 and R2D1 share, and their checks."""

from __future__ import annotations

from typing import Any

from rlframe.core.config import key_of, plain_field
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import in_state
from rlframe.replay.select import MAX_PRIORITY

# For IN_STATE: what is stored of priorities is p^α, and `unique` makes the replay for batches of one size
PRIORITIES = in_state("alpha", prioritized=True) | in_state("batch_size", unique=True)


def initial_priority(td: str) -> Any:
    """A field for the priority of new rows, in text: max, td or a number; `td`: the error that it means."""

    def check(config: Any, name: str) -> None:
        given = getattr(config, name)
        try:
            valid = given in ("max", "td") or 0 < float(given) <= MAX_PRIORITY
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise ConfigError(
                f"{key_of(config, name)}={given!s:.60} must be max, td, or a number above 0 up to {MAX_PRIORITY:g}"
            )

    doc = f"max | td | NUMBER: priority of new rows: the highest so far, {td}, or this number"
    return plain_field("max", doc, check)


def check_priorities(config: Any) -> None:
    """Raise ConfigError if keys of prioritized replay are given without it."""
    if config.initial_priority != "max" and not config.prioritized:
        raise ConfigError(
            f"algo.initial_priority={config.initial_priority} needs algo.prioritized=true; set both, or use max"
        )
    check_unique(config)


def check_unique(config: Any) -> None:
    """Raise ConfigError if batches are to have no row twice that are not drawn by priority."""
    if config.unique and not (config.prioritized and config.alpha):
        raise ConfigError(
            "algo.unique=true is for prioritized replay; add algo.prioritized=true, and algo.alpha above 0"
        )
