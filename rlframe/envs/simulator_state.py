"""The states of simulators that Python cannot see into: ALE's games and MuJoCo's worlds."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from rlframe.envs.object_codec import Known, Opaque, full_name

ALE = "ale_py._ale_py.ALEInterface"  # the full name of its type

_SURE = 1e-18  # the chance of a wrong action before, in games with sticky actions, when it has been repeated away


class Game:
    """An ALEInterface: emulator, counts and generator, by its own serialization."""

    def take(self, value: Any) -> Any:
        return np.frombuffer(value.cloneState(include_rng=True).serialize(), np.uint8)

    def put(self, value: Any, saved: Any) -> None:
        from ale_py import ALEState

        settle(value)
        value.restoreState(ALEState(np.asarray(saved, np.uint8).tobytes()))


def settle(ale: Any) -> None:
    """Make the action that sticky actions repeat be 0, no-op: it is part of no state, and no reset changes it."""
    stickiness = _stickiness(ale)
    if 0.0 < stickiness < 1.0:
        for _ in range(math.ceil(math.log(_SURE) / math.log(stickiness))):
            ale.act(0)


def game_of(env: Any) -> Any:
    """The ALEInterface of an Atari game; None for other environments."""
    inner = vars(env.unwrapped).get("ale")
    return inner if inner is not None and full_name(type(inner)) == ALE else None


def is_sticky(ale: Any) -> bool:
    """Whether a game repeats actions by chance."""
    return _stickiness(ale) > 0.0


def _stickiness(ale: Any) -> float:
    return float(ale.getFloat("repeat_action_probability"))


class World:
    """MjData: all of its arrays, for what is computed from the state lags a step behind it, and rewards read that."""

    def take(self, value: Any) -> Any:
        import mujoco

        spec = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(value.model, spec))
        mujoco.mj_getState(value.model, value, state, spec)
        arrays = _arrays(value)
        return {
            "state": state,
            "names": list(arrays),
            "sizes": [array.nbytes for array in arrays.values()],
            "bytes": np.concatenate([np.frombuffer(array.tobytes(), np.uint8) for array in arrays.values()]),
        }

    def put(self, value: Any, saved: Any) -> None:
        import mujoco

        spec = mujoco.mjtState.mjSTATE_INTEGRATION
        if len(saved["state"]) != mujoco.mj_stateSize(value.model, spec):
            raise Opaque("was saved of another MuJoCo model")
        mujoco.mj_setState(value.model, value, np.asarray(saved["state"]), spec)
        own, start = _arrays(value), 0
        for name, size in zip(saved["names"], saved["sizes"], strict=True):
            if name in own and own[name].nbytes == size:  # those of contacts change with their number, step by step
                own[name].reshape(-1).view(np.uint8)[:] = saved["bytes"][start : start + size]
            start += size


def _arrays(data: Any) -> dict[str, np.ndarray]:
    found = {name: getattr(data, name) for name in dir(data) if not name.startswith("_")}
    return {
        name: array
        for name, array in found.items()
        if isinstance(array, np.ndarray) and array.nbytes and array.dtype.kind in "biuf" and array.flags.c_contiguous
    }


class Model:
    """MjModel: not saved, but known again by its hash."""

    def take(self, value: Any) -> Any:
        import mujoco

        buffer = np.empty(mujoco.mj_sizeModel(value), np.uint8)
        mujoco.mj_saveModel(value, None, buffer)
        return hashlib.sha256(buffer.tobytes()).hexdigest()

    def put(self, value: Any, saved: Any) -> None:
        if self.take(value) != saved:
            raise Opaque("is another MuJoCo model than was saved")


class Inert:
    """What only draws: left as it is."""

    def take(self, value: Any) -> Any:
        return None

    def put(self, value: Any, saved: Any) -> None:
        """Nothing."""


KNOWN: Known = {
    ALE: Game(),
    "mujoco._structs.MjModel": Model(),
    "mujoco._structs.MjData": World(),
    **dict.fromkeys(
        (
            "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer",
            "pygame.surface.Surface",
            "pygame.Surface",
            "pygame.time.Clock",
        ),
        Inert(),
    ),
}
