"""Atari games in Gymnasium's own Python wrappers, for frameworks without preprocessing of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ale_py
import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformReward

UNPROCESSED: Mapping[str, Any] = {"frameskip": 1, "repeat_action_probability": 0.0}

gymnasium.register_envs(ale_py)


def python_atari(env: str) -> gymnasium.Env:
    """One game: 4 frames of 84x84 bytes, an action for 4 frames, rewards clipped to their sign."""
    game = gymnasium.make(env, **UNPROCESSED)
    frames = AtariPreprocessing(game, noop_max=30, frame_skip=4, screen_size=84, terminal_on_life_loss=True)
    return FrameStackObservation(TransformReward(frames, lambda reward: float(np.sign(reward))), 4)
