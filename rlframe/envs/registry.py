"""What an id or callable stands for, and how one Python environment of it is made without wrappers that cost time."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError

Target = EnvSpec | Callable[..., Any]

_EXTRAS = {"ale_py": "atari", "mujoco": "mujoco", "Box2D": "box2d", "pygame": "video", "envpool": "envpool"}
_EXTRA_OF_MODULE = {"gymnasium.envs.mujoco": "mujoco", "gymnasium.envs.box2d": "box2d", "ale_py": "atari"}


def name(id_: str | Callable[..., Any]) -> str:
    """`id_` as it is written."""
    if isinstance(id_, str):
        return id_
    function = id_.func if isinstance(id_, partial) else id_
    named = inspect.isroutine(function) or inspect.isclass(function)
    return f"{function.__module__}:{function.__qualname__}" if named else repr(id_)


def resolve(id_: str | Callable[..., Any]) -> Target:
    """The specification that Gymnasium has under `id_`, or the callable that it names.

    Raises:
        ConfigError: there is none; with the nearest ids.
    """
    if not isinstance(id_, str):
        if not callable(id_):
            raise ConfigError(f"env={id_!r} is neither a Gymnasium id, nor package.module:callable, nor a callable")
        return id_
    module, colon, rest = id_.rpartition(":")
    if colon and rest.isidentifier():
        return _callable(id_, module, rest)
    if colon:
        _import(id_, module)  # Gymnasium's own form, module:Id-v0: importing the module registers the id
    if rest.startswith("ALE/"):
        _require_atari(id_)
    if rest not in gymnasium.registry:
        raise _unknown(id_, rest)
    return gymnasium.registry[rest]


def _callable(id_: str, module: str, attribute: str) -> Callable[..., Any]:
    found = vars(_import(id_, module))
    if attribute not in found:
        public = [key for key, value in found.items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"env={id_}: {module} has no {attribute!r}{nearest(attribute, public)}")
    if not callable(found[attribute]):
        raise ConfigError(f"env={id_}: {attribute!r} is not callable but {found[attribute]!r}")
    return found[attribute]


def _import(id_: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name in _EXTRAS:
            raise ConfigError(_install(id_, _EXTRAS[error.name])) from error
        raise ConfigError(f"env={id_}: {error}; write package.module:callable, importable from here") from error
    except Exception as error:
        raise ConfigError(f"env={id_}: importing {module} raised {type(error).__name__}: {error}") from error


def _require_atari(id_: str) -> None:
    if importlib.util.find_spec("ale_py") is None:
        raise ConfigError(_install(id_, "atari"))
    register_atari()


def register_atari() -> None:
    """Make Gymnasium know Atari's ids, where ale_py is installed; otherwise nothing."""
    if importlib.util.find_spec("ale_py") is not None and "ALE/Pong-v5" not in gymnasium.registry:
        gymnasium.register_envs(importlib.import_module("ale_py"))


def _unknown(id_: str, rest: str) -> ConfigError:
    if not rest.startswith("ALE/"):
        register_atari()
    guess = nearest(rest, gymnasium.registry)
    return ConfigError(
        f"env={id_} is unknown to Gymnasium{guess} (an id that another package registers is written package:Id-v0)"
    )


def _install(what: str, extra: str) -> str:
    return f'env={what} needs a package that is not installed: pip install "rlframe[{extra}]"'


@contextlib.contextmanager
def missing_packages_named(target: Target) -> Iterator[None]:
    """Turn a missing package into one line that says what to install."""
    id_ = target.id if isinstance(target, EnvSpec) else name(target)
    try:
        yield
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        module = str(target.entry_point) if isinstance(target, EnvSpec) else ""
        extras = [extra for prefix, extra in _EXTRA_OF_MODULE.items() if module.startswith(prefix)]
        if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
            extras.insert(0, _EXTRAS[error.name])
        if not extras:
            raise ConfigError(f"env={id_} needs a package that is not installed: {error}") from error
        raise ConfigError(_install(id_, extras[0])) from error
    except ImportError as error:
        raise ConfigError(f"env={id_} cannot be made: {error}") from error


def maker(target: Target, kwargs: Mapping[str, Any]) -> tuple[Callable[[], gymnasium.Env], int]:
    """What makes one environment, and the time limit that the batch counts for it (0 for none).

    Raises:
        ConfigError: an argument is unknown, or no gymnasium.Env comes back (both when the maker is called).
    """
    if not isinstance(target, EnvSpec):
        return partial(_made, target, target, partial(target, **kwargs)), 0
    options = dict(kwargs)
    limit = options.pop("max_episode_steps", target.max_episode_steps or 0)
    if not isinstance(limit, int) or limit < 0:
        raise ConfigError(f"env_kwargs.max_episode_steps={limit!r} must be a whole number of steps, or 0 for no limit")
    spec = copy.deepcopy(target)
    spec.order_enforce, spec.disable_env_checker = False, True
    if target.additional_wrappers:  # which come outside the time limit, and may change what a step is
        spec.max_episode_steps, limit = limit or None, 0
    else:
        spec.max_episode_steps = None
    return partial(_made, target, _creator(target), partial(gymnasium.make, spec, **options)), limit


def _creator(spec: EnvSpec) -> Any:
    if not isinstance(spec.entry_point, str):
        return spec.entry_point
    with warnings.catch_warnings():
        # Of Box2D's SWIG wrapper, when it is imported; as an error it would crash the interpreter.
        warnings.filterwarnings("ignore", message="builtin type .wig", category=DeprecationWarning)
        return load_env_creator(spec.entry_point)


def _made(target: Target, creator: Any, make: partial[Any]) -> gymnasium.Env:
    id_ = target.id if isinstance(target, EnvSpec) else name(target)
    try:
        with missing_packages_named(target):
            env = make()
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[1] not in make.keywords:
            raise
        names = list(inspect.signature(creator).parameters)
        raise ConfigError(
            f"env_kwargs.{found[1]} is no argument of env={id_}{nearest(found[1], names)} (it has {', '.join(names)})"
        ) from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"env={id_} made something of type {type(env).__name__}, not a gymnasium.Env")
    return env
