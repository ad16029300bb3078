"""`make_envs`: resolve an environment id, choose the fastest backend for it, and make the batch."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode

from rlframe.core.arguments import checked
from rlframe.core.config import check_one_of, nearest
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import JointSpace
from rlframe.core.names import find_attribute, split_call
from rlframe.core.objects import ObjectName
from rlframe.envs import atari, envpool, gymnasium_vector, none, pettingzoo
from rlframe.envs.base import EnvConfig, Envs, reward_transform
from rlframe.envs.ids import nearest_id
from rlframe.envs.multi_agent import make_multi_agent
from rlframe.envs.options import EnvOptions
from rlframe.envs.python import PythonEnvs
from rlframe.envs.wrappers import load_wrappers, wrapped
from rlframe.system.machine import n_cpus

Target = EnvSpec | Callable[..., Any]  # what an id stands for

NO_ENV = none.NAME
BACKENDS = ("auto", "native", "envpool", "python")
_EXTRAS = {"ale_py": "atari", "mujoco": "mujoco", "Box2D": "box2d", "pygame": "video", "envpool": "envpool"}
_OF_NAMESPACE = {"ALE": ("ale_py", "atari"), "MinAtar": ("minatar", "minatar")}  # package and extra of ids
_EXTRA_OF_MODULE = {"gymnasium.envs.mujoco": "mujoco", "gymnasium.envs.box2d": "box2d", "ale_py": "atari"}
MADE = "_rlframe_made"  # attribute of environments that a run has

# A NumPy vector environment takes the same time for 1 as for 64 environments. CartPole on one core, thousands of env
# steps a second through `Envs.step`, native / Python: 4: 86 / 119, 6: 128 / 129, 8: 170 / 137, 64: 1198 / 154.
# EnvPool's threads cost 50 us a step, which pays off from about 8 environments.
MIN_BATCH = 8  # smallest batch for which auto chooses a native vector environment or EnvPool; ALE is always native


@checked
def make_envs(config: EnvConfig, n: int, seeds: Sequence[int], first: int = 0) -> Envs:
    """Make a batch of `n` environments with the fastest available backend, or with the one in `config`.

    The choice depends on the id, its arguments, `n` and the installed packages, never on a measurement. `first` is the
    index of the first environment in error messages.

    Raises:
        ConfigError: an unknown id, backend or argument, a missing package, or an unsupported space.
        EnvError: the environment's constructor raised.    ValueError: n < 1, or not `n` seeds.
    """
    if n < 1 or len(seeds) != n:
        raise ValueError(f"n={n} environments need n >= 1 and one seed each, got {len(seeds)} seeds")
    seeds = [int(seed) for seed in seeds]
    target = resolve(config.id)
    try:
        with explain_missing_package(target, _named(config, target)):
            backend = _choose_backend(config, target, n)
            envs, options = _make(backend, config, target, seeds, first), reward_options(config, target, backend)
            several = isinstance(envs.observation_space, JointSpace)  # then it has changed their agents' rewards
            if options.changes_rewards and not (options.normalize_reward or several):
                envs.transform = reward_transform(options)
            envs.env = config
            return envs
    except ValueError as error:  # from core.spaces
        raise ConfigError(f"env={env_name(config.id)}: {error}") from error


def make_env(config: EnvConfig) -> gymnasium.Env:
    """One environment as Gymnasium has it, with its time limit; Atari's without the preprocessing of training.

    Raises:
        ConfigError: as `make_envs`.
    """
    make, time_limit = env_maker(resolve(config.id), config)
    env = make()
    return gymnasium.wrappers.TimeLimit(env, time_limit) if time_limit else env


def fixed_backend(config: EnvConfig, n: int) -> str:
    """The backend of a batch of `n`. Workers use it for their parts, so that the split does not change the choice."""
    return _choose_backend(config, resolve(config.id), n)


def can_split(config: EnvConfig, n: int) -> bool:
    """Whether processes can share the batch with the same samples. Native vector environments share one generator."""
    return fixed_backend(config, n) != "native" or is_atari(resolve(config.id))


def steps_on_threads(config: EnvConfig, n: int) -> bool:
    """Whether the backend steps the batch with its own threads."""
    backend = fixed_backend(config, n)
    return backend == "envpool" or (backend == "native" and is_atari(resolve(config.id)))


def _make(backend: str, config: EnvConfig, target: Target, seeds: list[int], first: int) -> Envs:
    n_threads = config.n_threads or min(len(seeds), n_cpus())
    if isinstance(target, EnvSpec) and backend == "native":
        if is_atari(target):
            return atari.make_atari(target, {"num_threads": n_threads, **config.kwargs}, config.options, seeds)
        return gymnasium_vector.make_native(target, _vector_arguments(config, target), seeds, first)
    if isinstance(target, EnvSpec) and backend == "envpool":
        return envpool.make_envpool(
            target.id, {"num_threads": n_threads, **_vector_arguments(config, target)}, seeds, first
        )
    made = [env_maker(target, config, seed, index) for index, seed in enumerate(seeds, first)]
    return PythonEnvs([maker for maker, _ in made], seeds, made[0][1], first, config.restarts)


def reward_options(config: EnvConfig, target: Target, backend: str) -> EnvOptions:
    """The options by which rewards are changed for learning; ALE's vector environment clips them by default."""
    clips = is_atari(target) and backend == "native"
    return atari.with_own_clipping(config.kwargs, config.options) if clips else config.options


def _vector_arguments(config: EnvConfig, target: EnvSpec) -> dict[str, Any]:
    """The arguments of a native vector environment or of EnvPool, with the time limit that is given."""
    given = config.options.max_episode_steps or "max_episode_steps" in config.kwargs
    limit = _limit(config, target) or 2**31 - 1  # an int32's largest: none
    return {**config.kwargs, "max_episode_steps": limit} if given else dict(config.kwargs)


def _needs_python(config: EnvConfig, target: Target) -> str:
    """The key that only Python environments can fulfil; empty if there is none."""
    options = config.options
    of_images = {"grayscale": options.grayscale, "resize": options.resize, "frame_stack": options.frame_stack > 1}
    changed = {"wrappers": options.wrappers, **({} if is_atari(target) else of_images)}
    of_sampler = {"sampler.complete_episodes": config.whole_episodes, "sampler.env_restarts": config.restarts}
    keys = {**{f"env.{name}": value for name, value in changed.items()}, **of_sampler}
    return next((key for key, value in keys.items() if value), "")


def _limit(config: EnvConfig, target: EnvSpec) -> int:
    """Steps after which its episodes are truncated; 0: none. Raises ConfigError for a wrong limit, or two of them."""
    limit, of_id = config.options.max_episode_steps, max(0, target.max_episode_steps or 0)  # -1 is none in Gymnasium
    own = config.kwargs.get("max_episode_steps", of_id)
    if limit and "max_episode_steps" in config.kwargs:
        raise ConfigError(f"give env.max_episode_steps={limit} or env_kwargs.max_episode_steps={own}, the same limit")
    if not isinstance(own, int) or own < 0:
        raise ConfigError(f"env_kwargs.max_episode_steps={own!r} must be a whole number of steps, or 0 for no limit")
    return limit or own


def _choose_backend(config: EnvConfig, target: Target, n: int) -> str:
    check_one_of("env_backend", config.backend, BACKENDS)
    load_wrappers(config.options)
    if isinstance(target, EnvSpec):
        _limit(config, target)
    available, key = backends(target), _needs_python(config, target)
    if key and (config.backend in ("native", "envpool") or (is_atari(target) and config.backend == "auto")):
        raw = ", which gives raw frames to it" if is_atari(target) else " or auto"
        raise ConfigError(
            f"{key} needs Python environments, and those of env={env_name(config.id)} step all at once; "
            f"use env_backend=python{raw}"
        )
    if config.backend == "auto" and isinstance(target, EnvSpec) and gives_raw_frames(target):
        game = str(target.kwargs.get("game", "Game")).title().replace("_", "")
        raise ConfigError(
            f"env={env_name(config.id)} gives raw frames, 210x160 pixels in colour; use env=ALE/{game}-v5 with the "
            f"usual preprocessing, or set env_backend=python to have the raw frames"
        )
    if config.backend == "auto":
        return _fastest(config, target, n, available)
    if config.backend not in available:
        missing = config.backend == "envpool" and not envpool.is_installed()
        hint = ' (pip install "rlframe[envpool]" adds EnvPool)' if missing else ""
        raise ConfigError(
            f"env_backend={config.backend} is not available for env={env_name(config.id)}; "
            f"available: {', '.join(available)}{hint}"
        )
    return config.backend


def backends(target: Target) -> list[str]:
    """The backends available for `target`."""
    if not isinstance(target, EnvSpec):
        return ["python"]
    needs_jax = "Jax" in str(target.vector_entry_point) and importlib.util.find_spec("jax") is None
    return [
        *(["native"] if target.vector_entry_point is not None and not needs_jax else []),
        *(["envpool"] if target.id in envpool.CHECKED and envpool.is_installed() else []),
        *(["python"] if target.entry_point is not None else []),
    ]


def _fastest(config: EnvConfig, target: Target, n: int, available: list[str]) -> str:
    if available == ["python"] or not isinstance(target, EnvSpec):
        return "python"
    if "python" not in available or is_atari(target):
        return available[0]
    if n < MIN_BATCH or _needs_python(config, target):
        return "python"
    if "native" in available and _serves(target, config):
        return "native"
    if "envpool" in available and target.id in envpool.FASTER and not _vector_arguments(config, target):
        return "envpool"
    return "python"


def _serves(target: EnvSpec, config: EnvConfig) -> bool:
    """Whether the vector environment accepts all of `config.kwargs`, and its class names no other autoreset mode."""
    entry = target.vector_entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    known = inspect.signature(creator).parameters if creator is not None else {}
    given = _vector_arguments(config, target)
    mode = getattr(creator, "metadata", {}).get("autoreset_mode", AutoresetMode.NEXT_STEP)
    resets = mode == AutoresetMode.NEXT_STEP or "autoreset_mode" in given
    return resets and all(name in known and name != "render_mode" for name in given)  # it cannot render


def gives_raw_frames(spec: EnvSpec) -> bool:
    """Whether it is an Atari game under one of its old ids for images, such as PongNoFrameskip-v4."""
    images = str(spec.entry_point).startswith("ale_py") and spec.namespace != "ALE"
    return images and spec.kwargs.get("obs_type") != "ram"


def is_atari(target: Target) -> bool:
    """Whether ALE's vector environment supports this environment."""
    return isinstance(target, EnvSpec) and target.namespace == "ALE" and target.vector_entry_point is not None


def env_name(id_: str | Callable[..., Any]) -> str:
    """The id of an environment, or the importable name of a callable, for messages."""
    if isinstance(id_, str):
        return id_
    function = id_.func if isinstance(id_, partial) else id_
    named = inspect.isroutine(function) or inspect.isclass(function)
    return f"{function.__module__}:{function.__qualname__}" if named else repr(id_)


def _named(config: EnvConfig, target: Target) -> str:
    """The id of an environment, or the name of the object that makes it, for messages."""
    if isinstance(target, EnvSpec):
        return target.id
    return env_name(target if isinstance(config.id, ObjectName) else config.id)


def resolve(id_: str | Callable[..., Any]) -> Target:
    """Gymnasium's specification for an id, or the callable that it names. Raises ConfigError if there is none."""
    if isinstance(id_, ObjectName):
        return id_.value
    if not isinstance(id_, str):
        if not callable(id_):
            raise ConfigError(f"env={id_!r} is not a Gymnasium id, package.module:callable, or a callable")
        return id_
    called, arguments = split_call(id_)
    if arguments:
        raise ConfigError(f"env={id_}: write env={called} env_kwargs.{arguments.partition('=')[0].strip()}=VALUE")
    module, colon, rest = id_.rpartition(":")
    if colon and (module.endswith(".py") or rest.isidentifier()):
        return _checked(id_, rest, _find(id_, id_))
    if id_.endswith(".py"):
        raise ConfigError(f"env={id_} names no class of the file; write env={id_}:NAME, with that of the environment")
    namespace = rest.partition("/")[0]
    package, extra = _OF_NAMESPACE.get(namespace, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(_install_message(id_, extra))
    if colon:
        _find(id_, f"{module}:__name__")  # Gymnasium's form module:Id-v0: importing the module registers the id
    if rest not in gymnasium.registry:
        atari.register_atari()
    if rest not in gymnasium.registry and not pettingzoo.has(rest):
        _register_plugins(namespace)
    if rest not in gymnasium.registry and (several := pettingzoo.find_multi_agent(rest)):
        return several
    if rest not in gymnasium.registry:
        raise ConfigError(
            f"env={id_} is not registered with Gymnasium{nearest_id(rest)}; "
            f"write package:Id-v0 for another package's id, or module:callable for an environment of your own"
        )
    return gymnasium.registry[rest]


def _checked(id_: str, attribute: str, found: Any) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigError(f"env={id_}: {attribute!r} is {found!r}, which is not callable")
    if isinstance(found, type) and not issubclass(found, (gymnasium.Env, *pettingzoo.classes())):
        raise ConfigError(f"env={id_}: the class {attribute} is not a subclass of {pettingzoo.base_of(found)}")
    return found


def _find(id_: str, name: str) -> Any:
    """What module:name is. Raises ConfigError, with what to install if the module needs a package of an extra."""
    try:
        return find_attribute(name, "")
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name in _EXTRAS:
            raise ConfigError(_install_message(id_, _EXTRAS[cause.name])) from cause
        raise ConfigError(f"env={id_}: {error}") from cause


def _register_plugins(namespace: str) -> None:
    """Register the ids of installed packages that declare them for this namespace, as MinAtar does.

    They do so by an entry point of the group gymnasium.envs, which Gymnasium reads no more since 1.0.
    """
    for entry in entry_points(group="gymnasium.envs"):
        if entry.name in (namespace, "__root__"):
            entry.load()()


def _install_message(what: str, extra: str) -> str:
    return f'env={what} needs a package that is not installed: pip install "rlframe[{extra}]"'


@contextlib.contextmanager
def explain_missing_package(target: Target, id_: str) -> Iterator[None]:
    """Turn a missing package into a ConfigError that says what to install; `id_`: of the environment, for messages."""
    try:
        yield
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        module = str(target.entry_point) if isinstance(target, EnvSpec) else ""
        extras = [extra for prefix, extra in _EXTRA_OF_MODULE.items() if module.startswith(prefix)]
        if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
            extras.insert(0, _EXTRAS[error.name])
        if not extras:
            raise ConfigError(f"env={id_} needs a package that is not installed: {error}") from error
        raise ConfigError(_install_message(id_, extras[0])) from error
    except ImportError as error:
        raise ConfigError(f"env={id_} cannot be made: {error}") from error


def env_maker(
    target: Target, config: EnvConfig, seed: int = 0, index: int = 0
) -> tuple[Callable[[], gymnasium.Env], int]:
    """What makes environment `index` or raises ConfigError, and the limit that PythonEnvs counts (0: none)."""
    options, given = config.options, dict(config.kwargs)
    if not isinstance(target, EnvSpec):
        arguments = {**_creator_arguments(target, config, seed, index), **given}
        make = partial(_make_checked, target, target, partial(target, **arguments), config)
        return partial(wrapped, make, options, _named(config, target)), options.max_episode_steps
    given.pop("max_episode_steps", None)
    spec = copy.deepcopy(target)
    spec.order_enforce, spec.disable_env_checker, spec.max_episode_steps = False, True, None
    limit, inside = _limit(config, target), target.additional_wrappers or options.wrappers
    if inside and not options.max_episode_steps:  # they wrap the time limit, and may change what a step is
        spec.max_episode_steps, limit = limit or None, 0
    make = partial(_make_checked, target, _creator(target), partial(gymnasium.make, spec, **given), config)
    return partial(wrapped, make, options, target.id), limit


def _creator_arguments(creator: Callable[..., Any], config: EnvConfig, seed: int, index: int) -> dict[str, Any]:
    """What a callable is told of the environment that it makes: those of four arguments that it names, and lacks."""
    told = {"env_index": index, "rank": config.own_rank(), "seed": seed, "mode": config.mode}
    try:
        known = inspect.signature(creator).parameters
    except (TypeError, ValueError):  # of some callables in C
        return {}
    given = creator.keywords if isinstance(creator, partial) else {}
    return {name: value for name, value in told.items() if name in known and name not in given}


def _creator(spec: EnvSpec) -> Any:
    if not isinstance(spec.entry_point, str):
        return spec.entry_point
    with warnings.catch_warnings():
        # Importing Box2D's SWIG wrapper warns; turned into an error, the warning would crash the interpreter.
        warnings.filterwarnings("ignore", message="builtin type .wig", category=DeprecationWarning)
        return load_env_creator(spec.entry_point)


def _make_checked(target: Target, creator: Any, make: partial[Any], config: EnvConfig) -> gymnasium.Env:
    id_ = _named(config, target)
    try:
        with explain_missing_package(target, id_):
            env = make()
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[1] not in make.keywords:
            raise
        names = [x.name for x in inspect.signature(creator).parameters.values() if x.kind is not x.VAR_KEYWORD]
        has = f"{nearest(found[1], names)} (it has {', '.join(names)})" if names else ""
        has += "; films need it, and a render() that gives images" if found[1] == "render_mode" else ""
        raise ConfigError(f"env={id_} has no argument env_kwargs.{found[1]}{has}") from error
    if isinstance(env, pettingzoo.classes()):
        env = make_multi_agent(env, config.policies, config.options, id_)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"env={id_} returned a value of type {type(env).__name__}, not a {pettingzoo.base_of(env)}")
    for name in ("observation_space", "action_space"):
        if not hasattr(env, name):
            raise ConfigError(f"env={id_} has no {name}; set it in the environment's constructor")
    if MADE in vars(env.unwrapped):
        raise ConfigError(
            f"env={id_} gives the same environment again; write a function that makes a new one at each call, or give "
            f"the environment itself, which is copied"
        )
    setattr(env.unwrapped, MADE, True)
    return env
