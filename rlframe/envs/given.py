"""Environments that are given as Python objects: classes and functions, specs, and instances, which are copied."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec

from rlframe.core.errors import ConfigError
from rlframe.core.names import find_attribute
from rlframe.core.objects import ObjectName, can_import, name_of, pickled
from rlframe.core.own_code import object_digest
from rlframe.envs import pettingzoo
from rlframe.envs.make import MADE, resolve

_KNOWN_EVERYWHERE = ("gymnasium.", "ale_py.")  # modules whose environments every process finds by their id


def settings_of(value: Any, key: str) -> dict[str, Any]:
    """The settings that a value of `key`, env or eval.env, stands for: its name, and the arguments that its spec has.

    Raises:
        ConfigError: it is no environment, or an instance that cannot be copied.
    """
    if isinstance(value, gymnasium.Env):
        spec = value.spec
        known = gymnasium.registry.get(spec.id) if spec else None
        if spec is None or known is None or not _same_but_arguments(spec, known):
            return {key: _copied(value, key)}
        value = spec
    if isinstance(value, EnvSpec):
        return _of_spec(value, key)
    if isinstance(value, pettingzoo.classes()):
        return {key: _copied(value, key)}
    if id_ := pettingzoo.name_of_function(value):
        return {key: id_}
    if isinstance(value, str):
        return {key: _named(value, key)}
    if isinstance(value, gymnasium.vector.VectorEnv) or not callable(value):
        raise ConfigError(
            f"{key}={value!r:.100} is of type {type(value).__name__}; give a Gymnasium id, package.module:callable, or "
            f"one environment: its class, a function that makes it, its EnvSpec or an instance"
        )
    return {key: ObjectName(name_of(value), value, key)}


def _same_but_arguments(spec: EnvSpec, known: EnvSpec) -> bool:
    """Whether specs are the same but for arguments and the time limit."""
    return (spec.entry_point, spec.additional_wrappers) == (known.entry_point, known.additional_wrappers)


def _of_spec(spec: EnvSpec, key: str) -> dict[str, Any]:
    known, spec = gymnasium.registry.get(spec.id), copy.copy(spec)
    # Environments are not rendered in training, and films choose the mode themselves.
    spec.kwargs = {name: x for name, x in spec.kwargs.items() if name != "render_mode"}
    itself = {key: ObjectName(f"{spec.id}()", _without_main(spec), key)}
    if known is None or not _same_but_arguments(spec, known):
        return itself
    arguments = {
        name: x
        for name, x in spec.kwargs.items()
        if name not in known.kwargs or (x is not known.kwargs[name] and repr(x) != repr(known.kwargs[name]))
    }
    if not _is_json(arguments):
        return itself
    if spec.max_episode_steps != known.max_episode_steps:
        arguments["max_episode_steps"] = max(spec.max_episode_steps or 0, 0)
    return {key: _named(spec.id, key), **({f"{key}_kwargs": arguments} if arguments else {})}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _named(name: str, key: str) -> str:
    """A name; with what it means here, if another process would not find that."""
    spec, module = gymnasium.registry.get(name), name.rpartition(":")[0]
    if spec is not None and not str(spec.entry_point).startswith(_KNOWN_EVERYWHERE):
        return ObjectName(name, _without_main(spec), key)
    if spec is None and module and not module.endswith(".py") and not can_import(module):
        return ObjectName(name, resolve(name), key)
    return name


def _without_main(spec: EnvSpec) -> EnvSpec:
    """The spec with the object of its entry point, if that is in a module that another process cannot import."""
    entry = spec.entry_point
    if not isinstance(entry, str) or can_import(entry.rpartition(":")[0]):
        return spec
    found = copy.copy(spec)
    found.entry_point = find_attribute(entry, f"the entry point of {spec.id}")
    return found


def _copied(env: Any, key: str) -> ObjectName:
    name = name_of(env)
    return ObjectName(name, CopiedEnv(name, object_digest(env), pickled(env, key, name)), key)


@dataclass(frozen=True, repr=False)
class CopiedEnv:
    """Makes copies of an environment that was given as an instance."""

    name: str
    digest: str  # of the environment, of which the payload differs between processes
    payload: bytes

    def __own_code__(self) -> str:
        return self.digest

    def __call__(self) -> Any:
        env = cloudpickle.loads(self.payload)
        vars(env.unwrapped).pop(MADE, None)  # of the instance, if a run made that
        return env

    def __repr__(self) -> str:
        return self.name
