"""EnvPool's C++ environments (optional), where they have been checked to be Gymnasium's."""

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
from rlframe.core.errors import ConfigError, counted
from rlframe.core.struct import Tree, map_tree
from rlframe.envs.gymnasium_vector import NativeEnvs

# Checked against Gymnasium 1.4: the same spaces, time limit and NEXT_STEP autoreset (EnvPool 1.2.5). One difference is
# known: an end that falls on the time limit's very step is reported as truncated only. In thousands of env steps a
# second through `Envs.step`, 8 environments, EnvPool on 1 and 2 threads against Python: Acrobot 76, 95 / 30,
# LunarLander 35, 50 / 32, BipedalWalker 16, 22 / 7, Hopper 13, 20 / 10.
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
# Available by env_backend=envpool, and not faster than Python's: handing work to a thread takes longer than the work
# (Pendulum 64, 78 / 78).
NOT_FASTER = frozenset(
    {"CartPole-v0", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"}
    | {"FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1"}
)
CHECKED = FASTER | NOT_FASTER
_BOOKKEEPING = frozenset({"env_id", "elapsed_step", "players"})  # infos that are not of the environment


def is_installed() -> bool:
    """Whether EnvPool can be imported (without importing it, which takes a second)."""
    return importlib.util.find_spec("envpool") is not None


def make_envpool(id_: str, kwargs: Mapping[str, Any], seeds: Sequence[int], first: int = 0) -> NativeEnvs:
    """EnvPool's task of this very name and version; `kwargs` has at least num_threads.

    Raises:
        ConfigError: it is not among those checked, or refuses `kwargs`.
    """
    if id_ not in CHECKED:
        raise ConfigError(
            f"backend=envpool has not been checked to behave as Gymnasium for {id_}; use backend=auto, or one of "
            f"{', '.join(sorted(CHECKED))}"
        )
    import envpool

    n_threads = int(kwargs["num_threads"])
    known = envpool.make_spec(id_).config._fields
    for name in kwargs:
        if name not in known or name in ("num_envs", "batch_size", "seed", "env_seed"):
            raise ConfigError(f"env_kwargs.{name} is no argument of EnvPool's {id_}{nearest(name, known)}")
    make = partial(envpool.make, id_, env_type="gymnasium", num_envs=len(seeds), **kwargs)
    try:
        pool = _Pool(make, list(seeds))
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"EnvPool's {id_} cannot be made with env_kwargs {dict(kwargs)}: {error}") from error
    with _without_precision_warnings():
        return NativeEnvs(pool, list(seeds), list(seeds), f"envpool, {counted(n_threads, 'thread')}", first)


@contextlib.contextmanager
def _without_precision_warnings() -> Iterator[None]:
    """EnvPool states float32 boxes by float64 bounds, at each construction."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting", category=UserWarning)
        yield


class _Pool(VectorEnv):
    """EnvPool as a Gymnasium vector environment: seeds given when it is made, actions in the dtype it insists on."""

    def __init__(self, make: Callable[..., Any], seeds: list[int]) -> None:
        self._make, self._unused = make, seeds  # the seeds, as long as nobody has reset it
        self._env = env = self._made(seeds)
        self.num_envs = env.num_envs
        self.metadata = env.metadata
        with _without_precision_warnings():
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self._dtype = env.spec.action_array_spec["action"].dtype

    def _made(self, seeds: list[int]) -> Any:
        with _without_precision_warnings():
            return self._make(seed=seeds)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """From these seeds, for which it is made anew; or on from where it is."""
        if seed is not None and seed != self._unused:
            self._env.close()
            self._env = self._made(seed)
        self._unused = []
        return self._env.reset()

    def step(self, actions: Tree) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        typed = map_tree(lambda x: x.astype(self._dtype, copy=False), actions)
        observation, reward, terminated, truncated, infos = self._env.step(typed)
        return observation, reward, terminated, truncated, _own(infos)

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()


def _own(infos: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in infos.items() if name not in _BOOKKEEPING}
