"""Settings of rlframe.train with Python objects, as flat keys whose names bring their objects (core.objects).

A class, function or instance may stand wherever a key takes `module:name`, and a Config for a part or a group of keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import chz

from rlframe.core.errors import ConfigError, printable
from rlframe.core.flat import GROUPS, PARTS, config_name
from rlframe.core.objects import ObjectName, can_import, name_of
from rlframe.core.parts import find_attribute, find_config
from rlframe.envs.given import settings_of
from rlframe.envs.make import resolve
from rlframe.experiment.parts import OF_OWN, SHORT

_ENVS = ("env", "eval.env")
_LISTS = {  # and what their elements are
    "callbacks": "rlframe.runners.Callback, a class or an instance",
    "env.wrappers": "a wrapper's class, or a function of an environment",
    "sampler.statistics": "the class of a rlframe.rollout.EpisodeStatistic, or a function that makes one",
    "loggers": "a name, or a rlframe.record.Logger, its class or an instance",
}
_SINGLE = {
    "eval.function": "a function of (policy, make_env)",
    "model.encoder": "a name, or the class of a torch.nn.Module, or a function of the observation space",
    "model.distribution": "a name, or the class of a rlframe.distributions.Distribution, or a function of the shape",
    **{f"{part}.name": "a class" for part in OF_OWN},
}
_PART = "a name, or a Config of such a part: an instance, its class or its module"
_OWN_PARTS = {
    "algo.optimizer": "a name, the class of a torch.optim.Optimizer, or a Config of rlframe.optimizers",
    "algo.explore": "a name, the class of a QExploration or ActionNoise, or a Config of rlframe.exploration",
    "algo.replay": "a name, a class with the methods of rlframe.replay.Replay, or a Config of rlframe.replay",
}
_WANTED: Mapping[str, str] = {**_LISTS, **_SINGLE, **dict.fromkeys(PARTS, _PART), **_OWN_PARTS}
OF_POLICY = (*_ENVS, "env.wrappers", *_SINGLE, *PARTS)  # what a trained agent is made of


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings with names in the place of objects.

    Raises:
        ConfigError: an object where there can be none, or of the wrong kind; a key twice.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value in settings.items():
        for name, each in _named(f"algo.{key}" if key.partition(".")[0] in SHORT else key, value):
            if name in found:
                raise ConfigError(f"{name} is given twice, by {sources[name]} and {key}; give it in one of them")
            found[name], sources[name] = each, key
    return found


def _named(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if chz.is_chz(value) and not isinstance(value, type):
        if key in PARTS:
            yield key, _name(key, type(value))
        for name in chz.chz_fields(value):
            yield from _named(f"{GROUPS.get(key, key)}.{name}", getattr(value, name))
    elif key in OF_OWN and isinstance(value, partial) and not value.args:
        yield key, _name(key, value.func)
        yield f"{key}.kwargs", dict(value.keywords)
    elif key in _ENVS:
        yield from settings_of(value, key).items()
    elif key in _LISTS:
        each = value.strip("[] ").split(",") if isinstance(value, str) else value
        each = each if isinstance(each, list | tuple) else [each]
        yield key, [_name(key, one.strip() if isinstance(one, str) else one) for one in each if one != ""]
    elif key in _WANTED:
        yield key, _name(key, value)
    elif inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, partial | ModuleType):
        yield key, ObjectName(name_of(value), value, key)  # the key itself may be wrong: see check_objects
    else:
        yield key, value


def _name(key: str, value: Any) -> str:
    """The name of a value of a key that takes names."""
    if isinstance(value, str):
        module = value.rpartition(":")[0]
        here = module and not module.endswith(".py") and not can_import(module)
        return ObjectName(value, find_attribute(value, key), key) if here else value
    package = PARTS.get(key, "")
    if package and isinstance(value, ModuleType):
        value = vars(value).get("Config", value)
    if package and isinstance(value, type) and chz.is_chz(value):
        return ObjectName(config_name(value, package), value, key)
    plain = value is None or isinstance(value, bool | int | float | bytes | list | tuple | Mapping | ModuleType)
    if plain or (package and key not in OF_OWN):
        given = (
            f"{name_of(value)} is a class"
            if isinstance(value, type)
            else f"{value!r:.100} is of type {type(value).__name__}"
        )
        raise ConfigError(f"{key}={given}; give {_WANTED[key]}")
    return ObjectName(name_of(value), value, key)


def check_objects(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key that takes no objects has one."""
    for key, value in settings.items():
        if isinstance(value, ObjectName) and key not in (*_ENVS, *_WANTED):
            raise ConfigError(f"{key}={value} is an object, and this key takes none; give a plain value")


def is_object(value: Any) -> bool:
    """Whether a setting of `named` brings an object, or a list brings some."""
    return any(isinstance(each, ObjectName) for each in (value if isinstance(value, list) else [value]))


def is_same(given: Any, before: Any) -> bool:
    """Whether a value is the recorded one; of objects, whether their names can be of the same one."""
    if isinstance(given, list) and isinstance(before, list):
        return len(given) == len(before) and all(map(is_same, given, before))
    if given == before or not (isinstance(given, str) and isinstance(before, str) and ":" in before):
        return bool(given == before)
    (module, _, name), (old, _, known) = (each.removesuffix("()").rpartition(":") for each in (given, before))
    moved = "__main__" in (module, old)  # from a script or notebook into a module, or the other way
    return bool(module) and ("<lambda>" in known or (name == known and (module == old or moved)))


def recorded(
    config: Mapping[str, Any], given: Collection[str], source: str, keys: Collection[str] = ()
) -> dict[str, Any]:
    """A config read from the file `source`, whose names bring objects where other processes do not find them.

    Args:
        given: keys whose values are given anew.    keys: those to look at; default: all that take names.
    Raises:
        ConfigError: a name means nothing here; the message says which object to hand over.
    """
    found = dict(config)
    for key in keys or (*_ENVS, *_WANTED):
        if key in given or not config.get(key):
            continue
        for text in config[key] if isinstance(config[key], list) else [config[key]]:
            try:
                _find(key, str(text))
            except ConfigError as error:
                raise ConfigError(
                    printable(f"{source} names an object that is not here: {error}; hand it over: {_again(key, text)}")
                ) from None
        found[key] = dict(_named(key, config[key]))[key]
    return found


def _find(key: str, text: str) -> None:
    """Raise ConfigError if a name of an object means nothing here."""
    if key in PARTS and key not in OF_OWN:
        find_config(text, PARTS[key])
    elif ":" in text or text.endswith("()"):
        _ = resolve(text) if key in _ENVS else find_attribute(text, key)


def _again(key: str, text: str) -> str:
    """How to write a setting with the object of a name, in Python and on the command line."""
    name, key = text.rpartition(":")[2], key.removesuffix(".name")
    name = name if name.removesuffix("()").isidentifier() else "..."
    shown = f"[{name}]" if key in _LISTS else name
    python = f"{key}={shown}" if "." not in key else f'**{{"{key}": {shown}}}'
    return f"{python}, or {key}=./file.py:{name.removesuffix('()').strip('.') or 'NAME'} on the command line"
