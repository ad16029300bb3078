"""Short keys of an algorithm's own parts, such as its optimizer, and which of them another algorithm keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chz

from rlframe.core.errors import ConfigError
from rlframe.core.flat import PARTS
from rlframe.core.objects import ObjectName
from rlframe.core.parts import find_config
from rlframe.exploration.base import FITTING

OPTIMIZER, EXPLORE, REPLAY = "algo.optimizer", "algo.explore", "algo.replay"
OF_OWN = (OPTIMIZER, EXPLORE, REPLAY)  # parts that module:Class may name
SHORT = ("explore", "replay")  # the keys of these parts may be written without algo.


def spelled_out(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer with explore= as algo.explore=, and algo.optimizer=module:Class as algo.optimizer=own and its name.

    replay= is short for algo.replay= too.
    """
    found: dict[str, Any] = {}
    for key, value in layer.items():
        long = f"algo.{key}" if str(key).partition(".")[0] in SHORT else key
        if long in found or (long != key and long in layer):
            raise ConfigError(f"{key} is short for {long}; give one of them")
        found[long] = value
    if found.get(EXPLORE) == "random":
        raise ConfigError(
            f"{EXPLORE}=random: random first steps of ddpg, td3 and sac are algo.random_steps, those of dqn and r2d1 a "
            f"schedule such as explore.epsilon=linear(1,0.1,0.02)"
        )
    if f"{REPLAY}.memory" in found:
        place = str(found[f"{REPLAY}.memory"])
        raise ConfigError(f"{REPLAY}.memory={place:.40} is written {REPLAY}={'memory' if place == 'cpu' else place}")
    if "writers" in found:
        raise ConfigError(f"writers={found['writers']} is written loggers={found['writers']}")
    for part in OF_OWN:
        if ":" in str(found.get(part, "")) and not _is_config(found[part]):
            found |= {part: "own", f"{part}.name": found[part]}
    return found


def _is_config(name: Any) -> bool:
    """Whether it is the name of a Config that was given as an object, rather than of a class without one."""
    return isinstance(name, ObjectName) and isinstance(name.value, type) and chz.is_chz(name.value)


def kept_parts(given: Mapping[str, Any], algo: str) -> tuple[str, ...]:
    """The parts that stay as given when `algo` takes another's place: those that were named, and fit."""
    try:
        fields: Mapping[str, Any] = chz.chz_fields(find_config(algo, PARTS["algo"]))
    except (ConfigError, AttributeError, TypeError):  # reported when the config is made
        fields = {}
    kinds = fields["explore"].metadata[FITTING] if "explore" in fields else ()
    explores = given.get(EXPLORE) in kinds
    fits = {OPTIMIZER: OPTIMIZER in given, EXPLORE: explores, REPLAY: REPLAY in given and "replay" in fields}
    return tuple(part for part, stays in fits.items() if stays)
