"""An environment that shows an environment variable; without imports that a process of its own would wait for."""

import os
from typing import Any

import gymnasium as gym
import numpy as np


class Seen(gym.Env[Any, Any]):
    """Its rewards are the number in the variable RLF_TEST."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.reward = float(os.environ.get("RLF_TEST", -1))

    def reset(self, **_: Any) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), self.reward, True, False, {}
