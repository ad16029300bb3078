"""What a config's class declares of its fields: that they do nothing, or that saved states depend on them."""

from collections.abc import Collection
from typing import Any

import chz

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, qualified_name

FieldsBeside = dict[str, tuple[str, tuple[Any, ...]]]  # fields, and the values of another beside which it holds


def idle_while(*names: str, **values: Any) -> FieldsBeside:
    """For `IDLE` of a config's class: fields that do nothing while another has this value, or one of these."""
    ((other, given),) = values.items()
    return dict.fromkeys(names, (other, given if isinstance(given, tuple) else (given,)))


def in_state(*names: str, **values: Any) -> FieldsBeside:
    """For `IN_STATE` of a config's class: fields that saved states depend on, or only while another has this value.

    A run cannot change them when it continues from a saved state: see `rlframe.restore` and population-based training.
    """
    return idle_while(*names, **values) if values else dict.fromkeys(names, ("", ()))


def declared_in(config: type, attribute: str) -> FieldsBeside:
    """What a config's class and those that it inherits from say in `IDLE` or `IN_STATE`; a field has one condition.

    Raises:
        ConfigError: it names what is no field, or is of another form.
    """
    found: FieldsBeside = {}
    for cls in reversed(config.__mro__):
        own = vars(cls).get(attribute, {})
        if not isinstance(own, dict):
            raise ConfigError(f"{attribute} of {qualified_name(cls)} is made by idle_while(...) or in_state(...)")
        found |= own
    known = chz.chz_fields(config) if found else {}
    if wrong := [name for name in (*found, *(other for other, _ in found.values())) if name and name not in known]:
        raise ConfigError(
            f"{attribute} of {qualified_name(config)} names {wrong[0]}, which is no field{nearest(wrong[0], known)}"
        )
    return found


def idle_fields(config: Any) -> dict[str, str]:
    """Fields that do nothing beside the value of another field, and that other."""
    return _holding(config, "IDLE")


def state_fields(config: Any) -> Collection[str]:
    """Fields that saved states of what this config makes depend on."""
    return _holding(config, "IN_STATE")


def _holding(config: Any, attribute: str) -> dict[str, str]:
    """Fields whose condition holds, and the other field that it is of; empty without one."""
    found = declared_in(type(config), attribute)
    return {name: other for name, (other, values) in found.items() if not other or getattr(config, other) in values}
