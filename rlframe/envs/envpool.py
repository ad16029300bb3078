"""EnvPool's C++ environments (optional), for the ids that were checked to behave like Gymnasium's."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.struct import Tree, map_tree
from rlframe.envs.gymnasium_vector import NativeEnvs

# Checked with Gymnasium 1.4 and EnvPool 1.2.5: same spaces, time limit and NEXT_STEP autoreset. One difference: an end
# on the very step of the time limit is reported as truncated only. Thousands of env steps a second through
# `Envs.step`, 8 environments, EnvPool on 1 and 2 threads / Python: Acrobot 76, 95 / 30, LunarLander 35, 50 / 32,
# BipedalWalker 16, 22 / 7, Hopper 13, 20 / 10.
_MUJOCO = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
    *("InvertedPendulum", "Reacher", "Swimmer", "Walker2d"),
)
FASTER = frozenset(
    {
        *("Acrobot-v1", "BipedalWalker-v3", "BipedalWalkerHardcore-v3", "LunarLander-v3", "LunarLanderContinuous-v3"),
        *(f"{name}-v4" for name in _MUJOCO),
        *(f"{name}-v5" for name in (*_MUJOCO, "Pusher")),
    }
)
# Used only with env_backend=envpool: passing work to a thread takes as long as the work (Pendulum 64, 78 / 78).
NOT_FASTER = frozenset(
    {"CartPole-v0", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"}
    | {"FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1"}
)
CHECKED = FASTER | NOT_FASTER
_BOOKKEEPING = frozenset({"env_id", "elapsed_step", "players"})  # EnvPool's own entries in `info`


def is_installed() -> bool:
    """Whether EnvPool can be imported (without importing it, which takes a second)."""
    return importlib.util.find_spec("envpool") is not None


def make_envpool(id_: str, kwargs: Mapping[str, Any], seeds: Sequence[int], first: int = 0) -> NativeEnvs:
    """Make EnvPool's environments for an id in CHECKED. Raises ConfigError if `kwargs` are not accepted."""
    import envpool

    n_threads = int(kwargs["num_threads"])
    known = envpool.make_spec(id_).config._fields
    for name in kwargs:
        if name not in known or name in ("num_envs", "batch_size", "seed", "env_seed"):
            raise ConfigError(f"EnvPool's {id_} has no argument env_kwargs.{name}{nearest(name, known)}")
    make = partial(envpool.make, id_, env_type="gymnasium", num_envs=len(seeds), **kwargs)
    try:
        pool = _Pool(make, list(seeds))
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"EnvPool's {id_} cannot be made with env_kwargs {dict(kwargs)}: {error}") from error
    with _without_precision_warnings():
        return NativeEnvs(pool, list(seeds), list(seeds), f"envpool, {pluralize(n_threads, 'thread')}", first)


@contextlib.contextmanager
def _without_precision_warnings() -> Iterator[None]:
    """Ignore the warning that EnvPool causes each time it declares float32 boxes with float64 bounds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting", category=UserWarning)
        yield


class _Pool(VectorEnv):
    """EnvPool as a Gymnasium vector environment: takes its seeds when made, and actions in one exact dtype."""

    def __init__(self, make: Callable[..., Any], seeds: list[int]) -> None:
        self._make, self._unused_seeds = make, seeds  # empty after the first reset
        self._env = env = self._make_pool(seeds)
        self.num_envs = env.num_envs
        self.metadata = env.metadata
        with _without_precision_warnings():
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self._dtype = env.spec.action_array_spec["action"].dtype

    def _make_pool(self, seeds: list[int]) -> Any:
        with _without_precision_warnings():
            return self._make(seed=seeds)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Reset; with new seeds, EnvPool has to be made again."""
        if seed is not None and seed != self._unused_seeds:
            self._env.close()
            self._env = self._make_pool(seed)
        self._unused_seeds = []
        return self._env.reset()

    def step(self, actions: Tree) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        typed = map_tree(lambda x: x.astype(self._dtype, copy=False), actions)
        observation, reward, terminated, truncated, infos = self._env.step(typed)
        own = {name: value for name, value in infos.items() if name not in _BOOKKEEPING}
        return observation, reward, terminated, truncated, own

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()
