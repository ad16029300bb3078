"""How a batch of environments is chosen and made: which backend serves which id, and what is refused."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.envs import atari, envpool, gymnasium_vector, registry
from rlframe.envs.base import EnvConfig, Envs
from rlframe.envs.python import PythonEnvs
from rlframe.system.machine import n_cpus

BACKENDS = ("auto", "native", "envpool", "python")

# A vector environment in NumPy costs the same for 1 as for 64 environments. CartPole on one core, in thousands of env
# steps a second through `Envs.step`, native against Python: 4: 86 / 119, 6: 128 / 129, 8: 170 / 137, 64: 1198 / 154.
# EnvPool's threads cost 50 us a step, which 8 environments of those it is chosen for repay.
MIN_BATCH = 8  # environments from which a native vector environment or EnvPool is chosen; ALE always is


def make_envs(config: EnvConfig, n: int, seeds: Sequence[int], first: int = 0) -> Envs:
    """The fastest available batch of `n` environments, one seed each, or the backend that `config` names.

    The choice depends on the id, its arguments, `n` and what is installed, never on a measurement. Messages number the
    environments from `first` on.

    Raises:
        ConfigError: an unknown id, backend or argument, a missing package, an unsupported space.
        EnvError: the environment's constructor raised.
        ValueError: not `n` seeds, or n < 1.
    """
    if n < 1 or len(seeds) != n:
        raise ValueError(f"n={n} environments need n >= 1 and as many seeds, got {len(seeds)}")
    seeds = [int(seed) for seed in seeds]
    target = registry.resolve(config.id)
    try:
        with registry.missing_packages_named(target):
            return _make(_chosen(config, target, n), config, target, seeds, first)
    except ValueError as error:  # from core.spaces
        raise ConfigError(f"env={registry.name(config.id)}: {error}") from error


def fixed_backend(config: EnvConfig, n: int) -> str:
    """The backend that serves a batch of `n`: for parts of a batch, which must not choose by their own size.

    Raises:
        ConfigError: an unknown id or backend.
    """
    return _chosen(config, registry.resolve(config.id), n)


def can_split(config: EnvConfig, n: int) -> bool:
    """Whether parts of the batch in different processes are what the whole would be.

    Gymnasium's own vector environments draw for all their environments from one generator, so theirs are not.
    """
    return fixed_backend(config, n) != "native" or _is_ale(registry.resolve(config.id))


def steps_on_threads(config: EnvConfig, n: int) -> bool:
    """Whether the batch is stepped by threads of its own."""
    backend = fixed_backend(config, n)
    return backend == "envpool" or (backend == "native" and _is_ale(registry.resolve(config.id)))


def _is_ale(target: registry.Target) -> bool:
    return isinstance(target, EnvSpec) and is_atari(target)


def _make(backend: str, config: EnvConfig, target: registry.Target, seeds: list[int], first: int) -> Envs:
    n_threads = config.n_threads or min(len(seeds), n_cpus())
    if isinstance(target, EnvSpec) and backend == "native":
        if is_atari(target):
            return atari.make_atari(target, {"num_threads": n_threads, **config.kwargs}, seeds)
        return gymnasium_vector.make_native(target, config.kwargs, seeds, first)
    if isinstance(target, EnvSpec) and backend == "envpool":
        return envpool.make_envpool(target.id, {"num_threads": n_threads, **config.kwargs}, seeds, first)
    maker, time_limit = registry.maker(target, config.kwargs)
    return PythonEnvs([maker] * len(seeds), seeds, time_limit, first)


def _chosen(config: EnvConfig, target: registry.Target, n: int) -> str:
    if config.backend not in BACKENDS:
        raise ConfigError(
            f"env_backend={config.backend!r} is not one of {', '.join(BACKENDS)}{nearest(config.backend, BACKENDS)}"
        )
    available = backends(target)
    if config.backend == "auto":
        return _fastest(config, target, n, available)
    if config.backend not in available:
        raise ConfigError(
            f"env_backend={config.backend} is not available for env={registry.name(config.id)}; "
            f"available: {', '.join(available)}{_hint(config.backend)}"
        )
    return config.backend


def _hint(backend: str) -> str:
    missing = backend == "envpool" and not envpool.is_installed()
    return ' (pip install "rlframe[envpool]" adds EnvPool)' if missing else ""


def backends(target: registry.Target) -> list[str]:
    """The backends that serve `target` here."""
    if not isinstance(target, EnvSpec):
        return ["python"]
    known = target.id in envpool.CHECKED
    return [
        *(["native"] if target.vector_entry_point is not None and not _needs_jax(target) else []),
        *(["envpool"] if known and envpool.is_installed() else []),
        *(["python"] if target.entry_point is not None else []),
    ]


def _fastest(config: EnvConfig, target: registry.Target, n: int, available: list[str]) -> str:
    if available == ["python"] or not isinstance(target, EnvSpec):
        return "python"
    if "python" not in available or is_atari(target):
        return available[0]
    if n < MIN_BATCH:
        return "python"
    if "native" in available and _takes(target, config):
        return "native"
    if "envpool" in available and target.id in envpool.FASTER and not config.kwargs:
        return "envpool"
    return "python"


def _takes(spec: EnvSpec, config: EnvConfig) -> bool:
    """Whether the vector environment knows all of `config.kwargs` by name, and need not draw."""
    entry = spec.vector_entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    known = inspect.signature(creator).parameters if creator is not None else {}
    return all(name in known and name != "render_mode" for name in config.kwargs)


def is_atari(spec: EnvSpec) -> bool:
    """Whether this is a game of ALE's vector environment."""
    return spec.namespace == "ALE" and spec.vector_entry_point is not None


def _needs_jax(spec: EnvSpec) -> bool:
    return "Jax" in str(spec.vector_entry_point) and importlib.util.find_spec("jax") is None


def registered_ids() -> list[str]:
    """Gymnasium's ids, with Atari's where ale_py is installed."""
    registry.register_atari()
    return sorted(gymnasium.registry)
