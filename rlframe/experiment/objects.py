"""Settings of rlframe.train with Python objects, as flat keys whose names bring their objects (core.objects).

A class, function or instance may stand wherever a key takes `module:name`, and a Config for a part or a group of keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import chz

from rlframe.core.config import split_values
from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import read_json
from rlframe.core.names import find_attribute, split_call
from rlframe.core.objects import ObjectName, can_import, name_of
from rlframe.core.parts import GROUPS, Part, known_keys, part_at, part_name, values_of
from rlframe.envs.given import settings_of
from rlframe.envs.make import resolve
from rlframe.experiment.agents import without_policy
from rlframe.experiment.config import Experiment

_ENVS = ("env", "eval.env")
_LISTS = {  # and what their elements are
    "callbacks": "rlframe.runners.Callback, a class or an instance",
    "env.wrappers": "a wrapper's class, or a function of an environment",
    "sampler.statistics": "the class of a rlframe.rollout.EpisodeStatistic, or a function that makes one",
    "loggers": "a name, or a rlframe.record.Logger, its class or an instance",
    "eval.opponents": "random, or a function of (observation, action_space, rng) that returns an action",
}
_SINGLE = {
    "eval.function": "a function of (policy, make_env)",
    "model.encoder": "a name, or the class of a torch.nn.Module, or a function of the observation space",
    "model.distribution": "a name, or the class of a rlframe.distributions.Distribution, or a function of the shape",
    "sampler.collector": "a subclass of rlframe.rollout.collector.Collector",
    "agents.map_function": "policies of agents by name, or a function of (agent, episode) that returns a policy",
    "record_transform": "a function of a rlframe.data.Episode that returns it, changed or not, or None",
    "algo.replay.selector": "a subclass of rlframe.replay.Uniform, or a function of a generator that makes one",
    "algo.replay.transform": "a function of a rlframe.data.Episode that returns it, changed or not, or None",
    "agents.global_state": "true, or a function of the agents' observations, {agent: observation}, for critics alone",
}
_WANTED: Mapping[str, str] = {**_LISTS, **_SINGLE}
_MAP = "agents.map"
# The keys with names that trained agents do without.
NOT_OF_POLICY = (
    "callbacks",
    "sampler.statistics",
    "sampler.collector",
    "loggers",
    "record_transform",
    "algo.replay.selector",
    "algo.replay.transform",
    "algo.optimizer",
)
SHORT_KEYS = ("explore", "replay")  # the keys of these parts may be written without algo.


def long_key(key: str) -> str:
    """The full name of a key: explore= is short for algo.explore=, and replay= for algo.replay=."""
    return f"algo.{key}" if key.partition(".")[0] in SHORT_KEYS else key


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings with names in the place of objects.

    Raises:
        ConfigError: an object where there can be none, or of the wrong kind; a key twice.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    long = {long_key(key): value for key, value in settings.items()}
    known = known_keys(Experiment, long)
    for key, value in settings.items():
        for name, each in _named(long_key(key), value, _part_of(long_key(key), value, long, known)):
            if name in found:
                raise ConfigError(f"{name} is given twice, by {sources[name]} and {key}; give it in one of them")
            found[name], sources[name] = each, key
    return found


def _part_of(key: str, value: Any, settings: Mapping[str, Any], known: Mapping[str, Any]) -> Part | None:
    """The part that a key is; with an object, also that of another kind around it, which a preset may name."""
    if isinstance(found := known.get(key), Part):
        return found
    is_plain = _is_plain(value) or (isinstance(value, str) and ":" not in value)
    return None if is_plain else part_at(Experiment, key, settings)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | bytes | list | tuple | Mapping)


def _named(key: str, value: Any, part: Part | None) -> Iterator[tuple[str, Any]]:
    """A setting with names in the place of objects; several for a Config."""
    if part:
        yield from _named_part(key, value, part)
    elif chz.is_chz(value) and not isinstance(value, type):
        yield from _named_fields(GROUPS.get(key, key), value)
    elif key in _ENVS:
        yield from settings_of(value, key).items()
    elif key == _MAP and not isinstance(value, str | Mapping):
        yield f"{_MAP}_function", _name(key, value, _SINGLE[f"{_MAP}_function"])
    elif key == "agents.global_state" and isinstance(value, bool):
        yield key, str(value).lower()
    elif key in _LISTS:
        each = split_values(value.strip("[] ")) if isinstance(value, str) else value
        each = each if isinstance(each, list | tuple) else [each]
        names = [one.strip() if isinstance(one, str) else one for one in each if one != ""]
        yield key, [_name(key, name, _LISTS[key]) for name in names]
    elif (own := without_policy(key)) in _SINGLE:
        yield key, _name(key, value, _SINGLE[own])
    elif inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, partial | ModuleType):
        yield key, ObjectName(name_of(value), value, key)  # the key itself may be wrong: see check_objects
    else:
        yield key, value


def _named_part(key: str, value: Any, part: Part) -> Iterator[tuple[str, Any]]:
    value = vars(value).get("Config", value) if isinstance(value, ModuleType) else value
    if part.is_of_own(value) and value.name:
        yield key, value.name
        yield from ((name, each) for name, each in _named_fields(key, value) if name != f"{key}.name")
    elif chz.is_chz(value):
        cls = value if isinstance(value, type) else type(value)
        yield key, ObjectName(part_name(cls, part.package), cls, key)
        yield from _named_fields(key, value) if cls is not value else ()
    elif isinstance(value, partial) and not value.args and part.is_own(value.func):
        yield key, _name(key, value.func, part.classes)
        yield f"{key}.kwargs", dict(value.keywords)
    elif part.classes:
        yield key, _name(key, value, f"a name, {part.classes}, or a Config of {part.package}")
    else:
        wanted = "a name, or a Config of such a part: an instance, its class or its module"
        if not isinstance(value, str):
            _refuse(key, value, wanted)
        yield key, _name(key, value, wanted)


def _named_fields(key: str, config: Any) -> Iterator[tuple[str, Any]]:
    of_own = ""
    for name, value, field in values_of(config, f"{key}."):
        if field.part:
            of_own = f"{name}.name" if field.part.is_of_own(value) else ""
            yield next(_named_part(name, value, field.part))  # what is below it follows
        elif name != of_own:
            yield from _named(name, value, None)


def _name(key: str, value: Any, wanted: str) -> str:
    """The name of a value of a key that takes names."""
    if isinstance(value, str):
        module = split_call(value)[0].rpartition(":")[0]
        here = module and not module.endswith(".py") and not can_import(module)
        return ObjectName(value, find_attribute(value, key), key) if here else value
    if _is_plain(value) or isinstance(value, ModuleType):
        _refuse(key, value, wanted)
    return ObjectName(name_of(value), value, key)


def _refuse(key: str, value: Any, wanted: str) -> NoReturn:
    is_class = isinstance(value, type)
    what = f"{name_of(value)} is a class" if is_class else f"{value!r:.100} is of type {type(value).__name__}"
    raise ConfigError(f"{key}={what}; give {wanted}")


def check_objects(settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key that takes no objects has one. `known`: see known_keys."""
    for key, value in settings.items():
        around = known.get(key.removesuffix(".name"))
        takes_one = without_policy(key) in (*_ENVS, *_WANTED) or isinstance(around, Part)
        if isinstance(value, ObjectName) and not takes_one:
            raise ConfigError(f"{key}={value} is an object, and this key takes none; give a plain value")


def is_object(value: Any) -> bool:
    """Whether a setting of `named` brings an object, or a list brings some."""
    return any(isinstance(each, ObjectName) for each in (value if isinstance(value, list) else [value]))


def is_same(given: Any, before: Any) -> bool:
    """Whether a value is the recorded one; of objects, whether their names can be of the same one."""
    if isinstance(given, list) and isinstance(before, list):
        return len(given) == len(before) and all(map(is_same, given, before))
    if given == before or not (isinstance(given, str) and isinstance(before, str)):
        return bool(given == before)
    (module, name), (old, known) = map(_place_and_name, (given, before))
    moved = "__main__" in (module, old)  # from a script or notebook into a module, or the other way
    moved |= old.endswith(".py") and Path(old).name == Path(module).name and not Path(old).expanduser().exists()
    moved |= module.endswith(".py") and Path(module).stem == old.rpartition(".")[2]
    return bool(module) and ("<lambda>" in known or (name == known and (module == old or moved)))


def _place_and_name(text: str) -> tuple[str, str]:
    """Module or file, empty for a name of rlframe's own, and the name in it, empty for that of a file's Config."""
    text = text.removesuffix("()")
    place = split_call(text)[0].rpartition(":")[0]
    return (text, "") if text.endswith(".py") else (place, text.removeprefix(f"{place}:"))


def recorded(config: Mapping[str, Any], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A config read from the file `source`, whose names bring objects where other processes do not find them.

    Args:
        given: settings in the place of its own.
    Raises:
        ConfigError: a name means nothing here; the message says which object to hand over.
    """
    found, known = dict(config), known_keys(Experiment, {**config, **given})
    for key, value in config.items():
        part = x if isinstance(x := known.get(key), Part) else None
        if key in given or not value or not (part or without_policy(key) in (*_ENVS, *_WANTED)):
            continue
        for text in value if isinstance(value, list) else [value]:
            try:
                _find(key, str(text), part)
            except ConfigError as error:
                raise ConfigError(
                    printable(f"{source} names an object that is not here: {error}; hand it over: {_again(key, text)}")
                ) from None
        found[key] = dict(_named(key, value, part))[key]
    return found


@contextmanager
def naming_start(record: Path) -> Iterator[None]:
    """Errors inside also say where what this params.json or experiment.json describes was started, if not here."""
    try:
        yield
    except ConfigError as error:
        place = ""
        with suppress(ConfigError):
            place = str(read_json(record).get("started_in", ""))
        if not place or not Path(place).is_dir() or Path(place).samefile(Path.cwd()):
            raise
        raise ConfigError(
            printable(f"{error} (it was started in {place}: names of code and files are looked up from there)")
        ) from None


def _find(key: str, text: str, part: Part | None) -> None:
    """Raise ConfigError if a name of an object means nothing here."""
    if part and not part.is_own(text):
        part.find(text)
    elif ":" in text or text.endswith("()"):
        _ = resolve(text) if key in _ENVS else find_attribute(text, key)


def _again(key: str, text: str) -> str:
    """How to write a setting with the object of a name, in Python and on the command line."""
    place, _ = _place_and_name(text)
    if place.endswith(".py"):
        return f"{key}=DIR/{Path(place).name}{text.removeprefix(place)}, where it is now"
    name = split_call(text)[0].rpartition(":")[2]
    name = name if name.removesuffix("()").isidentifier() else "..."
    shown = f"[{name}]" if key in _LISTS else name
    python = f"{key}={shown}" if "." not in key else f'**{{"{key}": {shown}}}'
    if key == "callbacks":  # which a resumed run has as they were, with the same arguments
        return f"rlframe.train(resume=..., {python})"
    return f"{python}, or {key}=./file.py:{name.removesuffix('()').strip('.') or 'NAME'} on the command line"
