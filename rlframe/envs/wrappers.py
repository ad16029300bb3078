"""Wrappers of one environment: grayscale, resize, frame_stack, those of the user's own, and action masks from infos."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Box

from rlframe.core.errors import ConfigError, shortened, warn_once
from rlframe.core.names import find_attribute, split_call
from rlframe.core.spaces import ACTION_MASK, FrameStack, channels_last, mask_parts
from rlframe.envs.options import EnvOptions

Wrap = Callable[[gymnasium.Env], gymnasium.Env]

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green, blue (ITU-R BT.601)


def load_wrappers(options: EnvOptions) -> list[Wrap]:
    """The user's own wrappers, the first innermost.

    Raises:
        ConfigError: there is no such module or name, or it is no function of an environment and no wrapper.
    """
    found = [find_attribute(name, "env.wrappers") for name in options.wrappers]
    for name, wrap in zip(options.wrappers, found, strict=True):
        if isinstance(wrap, type) and not issubclass(wrap, gymnasium.Env):
            raise ConfigError(f"env.wrappers={name} is not a subclass of gymnasium.Wrapper")
        try:
            inspect.signature(wrap).bind("env")
        except (TypeError, ValueError):
            if not callable(wrap):
                raise ConfigError(
                    f"env.wrappers={name} is {wrap!r}, not a wrapper or function of an environment"
                ) from None
            raise ConfigError(
                f"env.wrappers={name} needs more than an environment; give its other arguments, "
                f"env.wrappers=[{split_call(name)[0]}(name=value)]"
            ) from None
    return found


def wrapped(make: Callable[[], gymnasium.Env], options: EnvOptions, id_: str) -> gymnasium.Env:
    """The environment of `make` in the wrappers of `options`; `id_` is for messages.

    Raises:
        ConfigError: it has no images to change, or a wrapper does not return an environment.
    """
    env = make()
    for name, wrap in zip(options.wrappers, load_wrappers(options), strict=True):
        env = wrap(env)
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"env.wrappers={name} returned a {type(env).__name__}, not a gymnasium.Env")
    if options.grayscale or options.resize:
        env = ImageObservation(env, options.grayscale, options.resize, id_)
    if options.frame_stack > 1:
        env = StackedObservation(env, options.frame_stack, id_)
    return env


class ImageObservation(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Images in one channel, or of another size. They keep their layout and dtype; without channels, [H, W]."""

    def __init__(self, env: gymnasium.Env, grayscale: bool, size: Sequence[int], id_: str = "") -> None:
        """`size`: [height, width], or empty. Raises ConfigError if the observations are not images."""
        super().__init__(env)
        space = env.observation_space
        shape = space.shape or ()
        if not isinstance(space, Box) or len(shape) not in (2, 3) or (grayscale and len(shape) == 2):
            key = "env.grayscale" if grayscale else "env.resize"
            other = "[channels, H, W]" if grayscale else "[H, W]"
            raise ConfigError(
                f"{key} needs observations that are images in a Box, {other} or [H, W, channels], but those of "
                f"env={id_} are {space}"
            )
        self._last, self._gray = channels_last(shape), grayscale
        pixels = shape[-3:-1] if self._last else shape[-2:]
        n_channels = (shape[-1] if self._last else shape[0]) if len(shape) == 3 else 1
        if grayscale and n_channels != 3:
            raise ConfigError(
                f"env.grayscale needs 3 channels, red, green and blue; env={id_} has {n_channels}: {space}"
            )
        self._rows, self._columns = (_area_weights(*each) for each in zip(pixels, size or pixels, strict=True))
        self._resize = bool(size) and tuple(size) != pixels
        low, high = (_as(space.dtype, self._bound(bound)) for bound in (space.low, space.high))
        self.observation_space = Box(low, high, dtype=np.dtype(space.dtype).type)

    def _bound(self, bound: np.ndarray) -> np.ndarray:
        """Float32; infinite where any of what a pixel is averaged over is."""
        infinite = np.isinf(bound)
        converted = self._convert(np.where(infinite, 0, bound).astype(np.float32))
        return np.where(
            self._convert(infinite.astype(np.float32)) > 0, -np.inf if (bound == -np.inf).any() else np.inf, converted
        )

    def observation(self, observation: Any) -> np.ndarray:
        return _as(self.observation_space.dtype, self._convert(np.asarray(observation)))

    def _convert(self, image: np.ndarray) -> np.ndarray:
        """Float32, or as it is if nothing changes."""
        if self._gray:
            image = image @ _LUMA if self._last else np.tensordot(_LUMA, image, 1)
        if not self._resize:
            return image
        if image.ndim == 2 or not self._last:
            return self._rows @ image.astype(np.float32) @ self._columns.T
        planes = np.moveaxis(image, -1, 0).astype(np.float32)
        return np.moveaxis(self._rows @ planes @ self._columns.T, 0, -1)


def _as(dtype: Any, image: np.ndarray) -> np.ndarray:
    return np.rint(image).astype(dtype) if np.dtype(dtype).kind in "uib" else image.astype(dtype, copy=False)


def _area_weights(n: int, m: int) -> np.ndarray:
    """[m, n]: the share of each of n pixels in each of m equal parts of their line. Rows sum to 1."""
    edges = np.linspace(0, n, m + 1)[:, None]
    pixel = np.arange(n)
    overlap = np.minimum(edges[1:], pixel + 1) - np.maximum(edges[:-1], pixel)
    return (np.clip(overlap, 0, None) * (m / n)).astype(np.float32)


class StackedObservation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The newest n observations along axis 0, oldest first; at a reset, n copies of the first.

    Images [H, W], [H, W, channels] or [channels, H, W] become [n * channels, H, W], others [n * size, ...].
    """

    def __init__(self, env: gymnasium.Env, n: int, id_: str = "") -> None:
        """Raises ConfigError if the observations are not one array of at least one dimension."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, Box) or not space.shape:
            raise ConfigError(
                f"env.frame_stack={n} needs observations in a Box with a shape, but env={id_} has {space}; "
                f"of a Dict, stack the images in a wrapper of your own (env.wrappers)"
            )
        self._n, self._ndim = n, len(space.shape)
        self._moves = self._ndim == 3 and channels_last(space.shape)
        low, high = (np.concatenate([self._frame(bound)] * n) for bound in (space.low, space.high))
        box = Box(low, high, dtype=np.dtype(space.dtype).type)
        self.observation_space = FrameStack(box, n) if box.dtype == np.uint8 and box.low.ndim == 3 else box
        self._stack = np.zeros(box.shape, box.dtype)

    def _frame(self, observation: Any) -> np.ndarray:
        frame = np.asarray(observation)
        if self._ndim == 2:
            return frame[None]
        return np.moveaxis(frame, -1, 0) if self._moves else frame

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._stack = np.concatenate([self._frame(observation)] * self._n)
        return self._stack, info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        frame = self._frame(observation)
        self._stack = np.concatenate([self._stack[len(frame) :], frame])  # a new array: an earlier one may be in use
        return self._stack, reward, terminated, truncated, info


class ActionMaskFromInfo(gymnasium.Wrapper):
    """Gives {"observation": the environment's own, "action_mask": that of `info`}.

    For Discrete the mask is an array [n]; for MultiDiscrete a tuple of them, or one array of all side by side.

    Raises:
        ConfigError: the actions are neither Discrete nor MultiDiscrete.    KeyError: `info` has no action mask.
        ValueError: the mask has other numbers than 0 and 1.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        match env.action_space:
            case spaces.Discrete():
                size = int(env.action_space.n)
            case spaces.MultiDiscrete():
                size = int(env.action_space.nvec.sum())
            case _:
                raise ConfigError(f"action masks need Discrete or MultiDiscrete actions, got {env.action_space}")
        mask = spaces.MultiBinary(size)
        self.observation_space = spaces.Dict({"observation": env.observation_space, ACTION_MASK: mask})

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        mask = info.get(ACTION_MASK)
        if mask is None:
            is_none = ACTION_MASK in info
            found = f"info[{ACTION_MASK!r}] is None" if is_none else f"info has no {ACTION_MASK!r}, only {[*info]}"
            raise KeyError(f"{found}; give it in every reset and step")
        whole = np.concatenate(mask) if isinstance(mask, tuple | list) and np.ndim(mask[0]) else np.asarray(mask)
        if not ((whole == 0) | (whole == 1)).all():
            raise ValueError(f"info[{ACTION_MASK!r}] must have 0 or 1 for each action, got {shortened(str(whole))}")
        return {"observation": observation, ACTION_MASK: whole.astype(np.int8)}


def warn_of_unseen_mask(env: gymnasium.Env, info: dict[str, Any]) -> None:
    """Warn once if `info` has an action mask that the observations of a discrete environment do not have."""
    discrete = isinstance(env.action_space, spaces.Discrete | spaces.MultiDiscrete)
    if ACTION_MASK in info and discrete and not mask_parts(env.observation_space, env.action_space):
        warn_once(
            "info['action_mask'] of the environment has no effect: agents look for masks in observations, where "
            "env.wrappers=[rlframe.envs.wrappers:ActionMaskFromInfo] moves it"
        )
