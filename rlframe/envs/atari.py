"""Atari games through ALE's own vector environment, with the preprocessing of Mnih et al. 2015."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chz
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv

from rlframe.core import spaces
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.seeding import round_seed
from rlframe.core.struct import Tree
from rlframe.envs.base import EnvError, Envs, EnvStep, env_error
from rlframe.envs.gymnasium_vector import check_next_step
from rlframe.envs.options import EnvOptions

ALE_DEFAULTS: Mapping[str, Any] = {
    "frameskip": 4,  # game frames an action is repeated for
    "maxpool": True,  # maximum of the last two frames, against flicker
    "stack_num": 4,  # frames of an observation
    "img_height": 84,  # pixels
    "img_width": 84,  # pixels
    "grayscale": True,
    "noop_max": 30,  # random no-ops at a game's start
    "use_fire_reset": True,  # press fire at a game's start, where it has the button
    "max_num_frames_per_episode": 108_000,  # game frames: 30 minutes; then truncated
    "full_action_space": False,
    "continuous": False,
    "continuous_action_threshold": 0.5,
    "thread_affinity_offset": -1,  # the core the first thread is bound to; -1 binds none
}
_OPTIONS: Mapping[str, Any] = {
    **ALE_DEFAULTS,
    "repeat_action_probability": 0.25,  # sticky actions; the default is that of the id (0.25 for v5)
    "num_threads": 1,  # default: one per environment, at most one per CPU
    # rlframe's own options. The ALE environment itself always runs with unclipped rewards and whole games.
    "episodic_life": True,  # a lost life is `terminated` for learning, as in the presets of CleanRL and SB3
    "reward_clipping": True,  # clip the rewards used for learning to [-1, 1] (`with_own_clipping`); scores stay as is
}
_MINIMUM = {"noop_max": 0, "thread_affinity_offset": -1}  # of integer options; 1 for the others
_MAXIMUM = {"img_height": 2048, "img_width": 2048, "stack_num": 128}  # 2**30 for the others


def make_atari(spec: EnvSpec, kwargs: Mapping[str, Any], env_options: EnvOptions, seeds: Sequence[int]) -> AtariEnvs:
    """Make ALE's vector environment for an `ALE/...-v5` id. Raises ConfigError for an invalid option in `kwargs`."""
    for name, value in kwargs.items():
        _check_option(spec.id, name, value)
    options: dict[str, Any] = {**ALE_DEFAULTS, **kwargs, **_own_options(kwargs, env_options)}
    episodic_life = options.pop("episodic_life", _OPTIONS["episodic_life"])
    options["reward_clipping"] = False
    try:
        env = gymnasium.make_vec(
            spec,
            num_envs=len(seeds),
            vectorization_mode="vector_entry_point",
            episodic_life=False,
            **options,
        )
    except (TypeError, ValueError, RuntimeError, gymnasium.error.Error) as error:
        raise ConfigError(f"{spec.id} cannot be made with env_kwargs {dict(kwargs)}: {error}") from error
    backend = f"native {type(env.unwrapped).__name__}, {pluralize(options['num_threads'], 'thread')}"
    return AtariEnvs(env, list(seeds), backend, episodic_life)


def with_own_clipping(kwargs: Mapping[str, Any], options: EnvOptions) -> EnvOptions:
    """The options, with ALE's clipping of rewards among them, if it clips those that are learned from."""
    clips = {**_OPTIONS, **kwargs, **_own_options(kwargs, options)}["reward_clipping"]
    return chz.replace(options, reward_clip="[-1,1]") if clips else options


def _own_options(kwargs: Mapping[str, Any], options: EnvOptions) -> dict[str, Any]:
    """ALE's own options that do what EnvOptions ask for. Raises ConfigError if `kwargs` have them too."""
    height, width = options.resize or (0, 0)
    frames = min(options.max_episode_steps * int(kwargs.get("frameskip", ALE_DEFAULTS["frameskip"])), 2**30)
    asked: dict[str, dict[str, Any]] = {  # frames count from the end of the no-ops, so this is exact
        "max_episode_steps": {"max_num_frames_per_episode": frames} if frames else {},
        "grayscale": {"grayscale": True} if options.grayscale else {},
        "resize": {"img_height": height, "img_width": width} if height else {},
        "frame_stack": {"stack_num": options.frame_stack} if options.frame_stack > 1 else {},
        "reward_clip, env.reward_scale or env.normalize_reward": (
            {"reward_clipping": False} if options.changes_rewards else {}
        ),
    }
    for key, own in asked.items():
        if given := [name for name in own if name in kwargs]:
            raise ConfigError(f"env.{key} decides what env_kwargs.{given[0]} does; give one of them")
    return {name: value for own in asked.values() for name, value in own.items()}


def _check_option(id_: str, name: str, value: Any) -> None:
    if name not in _OPTIONS:
        raise ConfigError(
            f"{id_} has no option env_kwargs.{name}{nearest(name, _OPTIONS)} (it has {', '.join(_OPTIONS)}; "
            f"env_backend=python takes Gymnasium's own arguments instead)"
        )
    default = _OPTIONS[name]
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, wanted = isinstance(value, int | float) and 0 <= value <= 1, "a number from 0 to 1"
    else:
        least, most = _MINIMUM.get(name, 1), _MAXIMUM.get(name, 2**30)
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        wanted = f"a whole number from {least} to {most}" if name in _MAXIMUM else f"a whole number of at least {least}"
    if not fits:
        raise ConfigError(f"env_kwargs.{name}={value!r} must be {wanted}")


class AtariEnvs(Envs):
    """Owns one AtariVectorEnv. Observations are [stack, H, W], or [3 stack, H, W] in colour.

    With `episodic_life`, a lost life sets `terminated`, and `first` on the next row, but the game continues. If it then
    waits for the fire button, as Breakout does, the agent must press it. `ended` and `raw_reward` are of whole games.
    """

    def __init__(self, env: VectorEnv, seeds: list[int], backend: str, episodic_life: bool) -> None:
        check_next_step(env, backend)
        self.n, self.backend = env.num_envs, backend
        shape = env.single_observation_space.shape or ()
        self._colour = len(shape) == 4  # [stack, H, W, 3]
        canonical = (shape[0] * 3, *shape[1:3]) if self._colour else shape
        self.observation_space = spaces.FrameStack(Box(0, 255, canonical, np.uint8), shape[0])
        self.action_space = env.single_action_space
        self._seeds, self._round = seeds, 0
        self._env: Any = env  # Any: its reset takes an array of seeds, VectorEnv's type does not
        self._episodic_life = episodic_life
        self._decode = spaces.action_decoder(self.action_space)
        self._ended = np.zeros(self.n, np.bool_)  # the next step is a reset
        self._lives = np.zeros(self.n, np.int32)
        self._observation = np.zeros((0, *shape), np.uint8)  # the latest, in ALE's memory; for `frame`

    def reset(self, out: EnvStep, round_: int = 0) -> None:
        self._round = round_
        seeds = np.asarray([round_seed(seed, round_) for seed in self._seeds])
        self._observation, info = self._env.reset(seed=seeds)
        self._lives[:], self._ended[:] = info["lives"], False
        self._write(out)
        out.first[...] = True

    def step(self, action: Tree, out: EnvStep) -> None:
        actions = self._decode(action)
        try:
            self._observation, reward, terminated, truncated, info = self._env.step(actions)
        except Exception as error:
            problem = f"{self.backend} raised {type(error).__name__}: {error}"
            raise env_error(problem, "try env_backend=python", seeds=self._seeds, actions=actions) from error
        self._write(out)
        self.write_outcome(out, reward, terminated, truncated, self._ended)
        if self._episodic_life:
            self._write_lost_lives(info["lives"], out)
        self._ended[:] = out.ended

    def _write_lost_lives(self, lives: np.ndarray, out: EnvStep) -> None:
        """Mark lost lives. Some games show 0 lives for a few frames before the end, so 0 does not count."""
        lost = (lives < self._lives) & (lives > 0) & out.valid
        self._lives[:] = lives
        if lost.any():
            out.terminated[lost] = True
            out.first[lost & ~out.ended] = True

    def _write(self, out: EnvStep) -> None:
        if self._colour:
            for age in range(self._observation.shape[1]):
                frames = self._observation[:, age]  # [n, H, W, 3]
                out.observation[:, 3 * age : 3 * age + 3] = frames.transpose(0, 3, 1, 2)
        else:
            out.observation[...] = self._observation

    def pop_diagnostics(self, index: int) -> dict[str, float]:
        """Empty: ALE reports only lives and frame numbers."""
        return {}

    def state(self) -> list[Any]:
        """Only the round: ALE's vector environment cannot save its games."""
        return [{"round": self._round}] * self.n

    def restore(self, states: Sequence[Any], out: EnvStep, tick: Callable[[], None]) -> list[str]:
        """Start new games, in the round after the saved one."""
        saved = states[0] if isinstance(states[0], dict) else {}
        self.reset(out, saved.get("round", 0) + 1)
        return ["ALE's vector environment cannot save its games"] * self.n

    def frame(self, index: int) -> np.ndarray:
        """The latest frame as the agent sees it."""
        if not len(self._observation):
            raise EnvError("there is no frame before the first reset; call reset first")
        newest = self._observation[index, -1]
        return newest.copy() if self._colour else np.repeat(newest[..., None], 3, axis=2)

    def close(self) -> None:
        self._env.close()


def register_atari() -> None:
    """Register Atari's ids with Gymnasium, if ale_py is installed."""
    if importlib.util.find_spec("ale_py") is not None and "ALE/Pong-v5" not in gymnasium.registry:
        gymnasium.register_envs(importlib.import_module("ale_py"))
