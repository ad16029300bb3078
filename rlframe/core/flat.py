"""Configs as flat keys of the command line, as in params.json: flatten."""

import math
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import chz

from rlframe.core.errors import ConfigError
from rlframe.core.objects import name_of
from rlframe.core.parts import kinds_of
from rlframe.core.schedule import Schedule

# Keys that name a module with a class Config, and the package that short names are looked up in.
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "algo": "rlframe.algos",
        "algo.optimizer": "rlframe.optimizers",
        "algo.explore": "rlframe.exploration",
        "algo.replay": "rlframe.replay",
        "sampler": "rlframe.samplers",
        "runner": "rlframe.runners",
        "reward.bonus": "rlframe.rewards",
    }
)

_NAMED = (*PARTS, "explore", "replay", "env", "eval.env")  # groups of keys that have a name of their own

# Fields whose keys stand below another name: `env` is a value, and has fields beside it.
GROUPS: Mapping[str, str] = MappingProxyType({"env_options": "env"})


def part_name(config: object, package: str) -> str:
    """The value of algo=, sampler= or runner= that names this config; short inside `package`."""
    return config_name(type(config), package)


def config_name(cls: type, package: str) -> str:
    """The name of a config's class: its kind, module or file; module:Class if that alone does not lead to it."""
    if package in sys.modules and (kind := next((name for name, each in kinds_of(package).items() if each is cls), "")):
        return kind
    module = cls.__module__
    known = vars(sys.modules[module]) if module in sys.modules else {}
    file = known.get("__file__")
    if module.startswith(f"{package}."):
        return module.removeprefix(f"{package}.")
    if known.get("Config") is not cls or (module == "__main__" and not file):
        return name_of(cls)
    return str(file) if "." not in module and file else module


def flatten(**fields: Any) -> dict[str, Any]:
    """Configs and values as JSON-able keys of the command line, for example for `logger_context(config=...)`.

    flatten(algo=ppo.Config(clip=0.2), env="CartPole-v1") gives {"algo": "ppo", "algo.clip": 0.2, ..., "env": ...}.
    """
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if key in PARTS:
            flat[key] = part_name(value, PARTS[key])
        if chz.is_chz(value):
            group = GROUPS.get(key, key)
            flat |= flatten(**{f"{group}.{name}": getattr(value, name) for name in chz.chz_fields(value)})
        elif key not in PARTS:
            flat[key] = _plain(value)
    return flat


def dotted(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings with nested dicts as flat keys: algo={"name": "ppo", "clip": 0.2} has the keys algo and algo.clip.

    Raises:
        ConfigError: a key is given twice.
    """
    flat: dict[str, Any] = {}
    for key, value in settings:
        below = {key: value}
        if isinstance(value, Mapping) and not key.endswith("kwargs"):  # whose keys are not rlframe's
            below = dotted((_key_in(key, name), each) for name, each in value.items())
        if twice := below.keys() & flat.keys():
            raise ConfigError(f"{min(twice)} is given twice; leave one of them out")
        flat |= below
    return flat


def _key_in(group: str, name: str) -> str:
    if name == "name" and group in _NAMED:
        return group
    return f"{group}_kwargs" if name == "kwargs" and group in ("env", "eval.env") else f"{group}.{name}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # not in JSON; the command line reads the text as the same number
    if isinstance(value, Schedule):
        return value.text
    return list(value) if isinstance(value, tuple) else value
