"""Save and restore Python environments in the middle of an episode: by their state, or by replaying their actions."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np

from rlframe.core.seeding import EpisodeSeeds, round_seed
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.envs import serializer
from rlframe.envs.multi_agent import MultiAgentEnv
from rlframe.envs.observations import check_info
from rlframe.envs.serializer import Codec, Codecs, EnvStateError, type_name
from rlframe.envs.wrappers import warn_of_unseen_mask

_ALE = "ale_py._ale_py.ALEInterface"  # the `type_name` of ALE's games
_MAX_STEPS = 100_000  # longer episodes cannot be replayed: they would need too much memory and time
_MAX_ERROR_PROBABILITY = 1e-18  # of clear_sticky_action


class EpisodeStates:
    """Resets the environments of a batch, and records what is needed to restore each.

    If an environment's state can be read, that is saved, and its generator is set at each reset. If not, the running
    episode's actions are logged and replayed: after a reset with the episode's own seed, or, for ALE, where seeding
    reloads the game, from the state before the reset.
    """

    def __init__(self, envs: Sequence[gymnasium.Env], seeds: Sequence[int]) -> None:
        self._envs, self._own_seeds = list(envs), list(seeds)
        self._inner = [env.unwrapped for env in envs]
        self._ales = [_ale_of(inner) for inner in self._inner]
        self._is_sticky = [ale is not None and stickiness(ale) > 0.0 for ale in self._ales]  # see clear_sticky_action
        self._seeds = [EpisodeSeeds(seed) for seed in seeds]
        self.episodes = [-1] * len(envs)
        self._starts: list[Any] = [()] * len(envs)  # states before the reset; () if the seed is enough
        self._undecided = True
        self.action_log: ActionLog | None = ActionLog(len(envs))  # None: all states can be read

    def replace(self, index: int, env: gymnasium.Env, seed: int) -> None:
        """Put a newly made environment in the place of another; its first episode has this seed."""
        self._envs[index], self._inner[index] = env, env.unwrapped
        self._ales[index] = _ale_of(env.unwrapped)
        self._seeds[index], self.episodes[index] = EpisodeSeeds(seed), -1

    def seed(self, index: int) -> int:
        """The seed of the running episode, or of the environment if its episodes have no seeds of their own."""
        seeds = self._seeds[index]
        return seeds[max(0, self.episodes[index])] if self._seeded_each_episode(index) else seeds.own

    def _seeded_each_episode(self, index: int) -> bool:
        return self.action_log is not None and self._ales[index] is None

    def start_round(self, number: int) -> None:
        """Make the next resets start the episodes of another round (see `round_seed`)."""
        self._seeds = [EpisodeSeeds(round_seed(seed, number)) for seed in self._own_seeds]
        self.episodes = [-1] * len(self._envs)

    def reset(self, index: int) -> Any:
        """Start the next episode of environment `index`; returns its observation."""
        self.episodes[index] += 1
        env, episode = self._envs[index], self.episodes[index]
        self._starts[index] = ()
        self._tell_episode(index)
        if episode == 0 or self._seeded_each_episode(index):
            observation, info = env.reset(seed=self._seeds[index][episode])
        else:
            self._prepare_reset(index)
            observation, info = env.reset()
        check_info(info)
        if episode == 0:
            warn_of_unseen_mask(env, info)
        if self.action_log is not None:
            self.action_log.start_episode(index)
        return observation

    def _tell_episode(self, index: int) -> None:
        """Tell an environment of several agents the number of the episode that its next reset starts."""
        if isinstance(inner := self._inner[index], MultiAgentEnv):
            inner.episode = self.episodes[index]

    def _prepare_reset(self, index: int) -> None:
        """Prepare an environment for a reset without a seed."""
        if self._ales[index] is not None:
            clear_sticky_action(self._ales[index])
            if self.action_log is not None:
                self._starts[index] = save_env(self._envs[index])
            return
        rng = vars(self._inner[index]).get("_np_random")  # None until Gymnasium first needs it
        if type(rng) is np.random.Generator and type(rng.bit_generator) is np.random.PCG64:
            self._seeds[index].seek(rng, self.episodes[index])

    def log_action(self, action: Tree) -> None:
        """Log the actions of the coming step. Call only while `action_log` is not None."""
        assert self.action_log is not None
        # Decide after the first step whether a log is needed: an environment may make its simulator then.
        if self._undecided and leaves(self.action_log.actions(0)):
            self._undecided = False
            try:
                saved = self._save(0)  # the other environments are alike
            except EnvStateError:
                pass
            else:
                if not any(map(serializer.has_objects, saved)):  # which may be of other classes then
                    self.action_log = None
                    return
        self.action_log.add(action)

    def _save(self, index: int) -> list[Any]:
        if self._is_sticky[index]:
            raise EnvStateError("it uses sticky actions, and ALE does not save the last action")
        return save_env(self._envs[index])

    def state(self, index: int) -> dict[str, Any]:
        """The state of environment `index`, for `restore`."""
        facts: dict[str, Any] = {"seed": self._seeds[index].own, "episode": self.episodes[index]}
        if self.episodes[index] < 0:
            return {**facts, "restart_reason": "it had not been reset"}
        reason = ""
        if self.action_log is None or not self._undecided:
            try:
                facts["state"] = self._save(index)
            except EnvStateError as problem:
                reason = str(problem)
        actions = None if self.action_log is None else self.action_log.actions(index)
        if actions is None and "state" in facts:
            return facts
        if actions is None:
            self.action_log = self.action_log or ActionLog(len(self._envs))  # for the next episodes
            return {**facts, "restart_reason": f"{reason}, and the episode's actions were not logged"}
        return {**facts, "start": self._starts[index], "actions": actions}

    def prepare_restore(self, states: Sequence[Any]) -> None:
        """Call before `restore`: stop logging actions if no saved environment needed it."""
        if all(isinstance(saved, dict) and "state" in saved and "actions" not in saved for saved in states):
            self.action_log, self._undecided = None, False

    def restore(self, index: int, saved: dict[str, Any], play: Callable[[gymnasium.Env, Tree], None]) -> str:
        """Restore environment `index`, which is newly made; returns why it is impossible, or "".

        `play` steps it through actions [k, ...], and raises EnvStateError if the result differs from the saved episode.
        """
        self._seeds[index], self.episodes[index] = EpisodeSeeds(saved["seed"]), saved["episode"]
        if "restart_reason" in saved:
            return saved["restart_reason"]
        env = self._envs[index]
        self._tell_episode(index)
        try:
            if "state" in saved and _takes(env, saved):
                pass  # otherwise its episode is replayed
            elif saved["start"] == ():
                if not saved["ended"]:  # otherwise the next step resets it with the next episode's seed
                    env.reset(seed=self.seed(index))
                    play(env, saved["actions"])
            else:
                load_env(env, saved["start"])
                env.reset()
                play(env, saved["actions"])
        except Exception as problem:  # whatever the environment's code raises, a new episode can start
            return str(problem) if isinstance(problem, EnvStateError) else f"{type(problem).__name__}: {problem}"
        if self.action_log is not None and "actions" in saved:
            self._starts[index] = saved["start"]
            self.action_log.start_episode(index, saved["actions"])
        return ""


class ActionLog:
    """The actions of the running episodes of n environments that step together."""

    def __init__(self, n: int) -> None:
        self._steps: deque[Tree] = deque(maxlen=_MAX_STEPS)  # [n, ...] each, those that a running episode needs
        self._n_steps = 0  # in total
        self._starts = np.full(n, -1, np.int64)  # the step of each episode's first action; -1: not logged
        self._before: list[Tree] = [()] * n  # actions [k, ...] of a restored episode before that step

    def add(self, action: Tree) -> None:
        """Log a copy of the actions [n, ...] of one step."""
        self._steps.append(map_tree(np.ndarray.copy, action))
        self._n_steps += 1

    def start_episode(self, index: int, before: Tree = ()) -> None:
        """The next step starts an episode of environment `index`, or continues one after the actions `before`."""
        self._starts[index], self._before[index] = self._n_steps, before
        oldest = int(self._starts.min())
        while self._steps and self._n_steps - len(self._steps) < oldest:
            self._steps.popleft()

    def actions(self, index: int) -> Tree | None:
        """The actions of the running episode [k, ...]; None if its start was not logged, or too many steps ago."""
        start = int(self._starts[index])
        n = self._n_steps - start
        if start < 0 or n > len(self._steps):
            return None
        own = [map_tree(lambda x: x[index], action) for action in list(self._steps)[len(self._steps) - n :]]
        before = self._before[index]
        if not own:
            return before
        stacked = map_tree(lambda *each: np.stack(each), *own)
        return stacked if not leaves(before) else map_tree(lambda *each: np.concatenate(each), before, stacked)


def save_env(env: Any) -> list[Any]:
    """The state of an environment and its wrappers as plain data. Raises EnvStateError if a part cannot be read."""
    layers = _layers(env)
    holders = [
        SimpleNamespace(state=layer.get_state(), np_random=vars(layer).get("_np_random"))
        if _has_state_methods(layer)
        else layer
        for layer in layers
    ]
    return serializer.save_attributes(holders, layers, CODECS)


def load_env(env: Any, saved: list[Any]) -> None:
    """Set a newly made environment to a state from `save_env`. After an EnvStateError the environment must be reset."""
    layers = _layers(env)
    holders = [SimpleNamespace() if _has_state_methods(layer) else layer for layer in layers]
    serializer.load_attributes(holders, layers, saved, CODECS)
    for layer, holder in zip(layers, holders, strict=True):
        if isinstance(holder, SimpleNamespace):
            layer.set_state(holder.state)
            if holder.np_random is not None:
                layer.np_random = holder.np_random


def _takes(env: gymnasium.Env, saved: dict[str, Any]) -> bool:
    """Whether an environment has taken its saved state; raises EnvStateError if not, and there are no actions."""
    try:
        load_env(env, saved["state"])
    except EnvStateError:
        if "actions" not in saved:
            raise
        return False
    return True


def _layers(env: Any) -> list[Any]:
    """The wrappers, outermost first, and the environment."""
    found = [env]
    while isinstance(found[-1], gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        found.append(found[-1].env)
    return found


def _has_state_methods(layer: Any) -> bool:
    """Whether it defines get_state() and set_state(state) (see docs/tutorials/own_environment.md)."""
    of_type = type(layer)
    methods = [inspect.getattr_static(of_type, name, None) for name in ("get_state", "set_state")]
    if not all(inspect.isfunction(method) for method in methods):
        return False
    return [len(inspect.signature(method).parameters) for method in methods] == [1, 2]


def _ale_of(env: gymnasium.Env) -> Any:
    """ALE's game in an environment without wrappers; None if it has none."""
    ale = vars(env).get("ale")
    return ale if type_name(type(ale)) == _ALE else None


def _save_ale(ale: Any) -> np.ndarray:
    """ALE's own serialization of emulator, counters and random generator."""
    return np.frombuffer(ale.cloneState(include_rng=True).serialize(), np.uint8)


def _load_ale(ale: Any, saved: Any) -> None:
    from ale_py import ALEState

    clear_sticky_action(ale)
    ale.restoreState(ALEState(np.asarray(saved, np.uint8).tobytes()))


def clear_sticky_action(ale: Any) -> None:
    """Make no-op the action that sticky actions repeat: saved states do not contain it, and resets keep it."""
    if 0.0 < (p := stickiness(ale)) < 1.0:
        for _ in range(math.ceil(math.log(_MAX_ERROR_PROBABILITY) / math.log(p))):
            ale.act(0)


def stickiness(ale: Any) -> float:
    """The probability that a game repeats the last action."""
    return float(ale.getFloat("repeat_action_probability"))


def _save_mj_data(data: Any) -> dict[str, Any]:
    """Saves all arrays: values derived from the state lag one step behind it, and rewards may read them."""
    import mujoco

    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, spec))
    mujoco.mj_getState(data.model, data, state, spec)
    arrays = _arrays(data)
    return {
        "state": state,
        "names": list(arrays),
        "sizes": [array.nbytes for array in arrays.values()],
        "bytes": np.concatenate([np.frombuffer(array.tobytes(), np.uint8) for array in arrays.values()]),
    }


def _load_mj_data(data: Any, saved: Any) -> None:
    import mujoco

    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    if len(saved["state"]) != mujoco.mj_stateSize(data.model, spec):
        raise EnvStateError("was saved from another MuJoCo model")
    mujoco.mj_setState(data.model, data, np.asarray(saved["state"]), spec)
    own, start = _arrays(data), 0
    for name, size in zip(saved["names"], saved["sizes"], strict=True):
        if name in own and own[name].nbytes == size:  # the number of contacts, and so their arrays, may differ
            own[name].reshape(-1).view(np.uint8)[:] = saved["bytes"][start : start + size]
        start += size


def _arrays(data: Any) -> dict[str, np.ndarray]:
    found = {name: getattr(data, name) for name in dir(data) if not name.startswith("_")}
    return {
        name: array
        for name, array in found.items()
        if isinstance(array, np.ndarray) and array.nbytes and array.dtype.kind in "biuf" and array.flags.c_contiguous
    }


def _model_hash(model: Any) -> str:
    """A hash of an MjModel, to check that the new environment has the same model."""
    import mujoco

    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return hashlib.sha256(buffer.tobytes()).hexdigest()


def _check_model(model: Any, saved: Any) -> None:
    if _model_hash(model) != saved:
        raise EnvStateError("is not the MuJoCo model that was saved")


_SKIP = Codec(lambda value: None, lambda value, saved: None)  # for objects that only render
CODECS: Codecs = {
    _ALE: Codec(_save_ale, _load_ale),
    "mujoco._structs.MjModel": Codec(_model_hash, _check_model),
    "mujoco._structs.MjData": Codec(_save_mj_data, _load_mj_data),
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer": _SKIP,
    "pygame.surface.Surface": _SKIP,
    "pygame.Surface": _SKIP,
    "pygame.time.Clock": _SKIP,
}
