"""ActionMaskFromInfo: moves `info["action_mask"]` of an environment into its observation, where agents look for it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlframe.core.errors import ConfigError, shortened, warn_once
from rlframe.core.spaces import ACTION_MASK, mask_parts


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
            "env.wrappers=[rlframe.envs.action_mask:ActionMaskFromInfo] moves it"
        )
