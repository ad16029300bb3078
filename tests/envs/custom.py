"""Environments that tests make by name: scripted spaces, rewards and infos."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

NESTED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "wide": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        "room": spaces.Discrete(3, start=-1),
        "both": spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([2, 4], start=[0, 7]))),
    }
)
SPACES: dict[str, spaces.Space] = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "gray": spaces.Box(0, 255, (8, 8), np.uint8),
    "discrete": spaces.Discrete(4),
    "discrete_start": spaces.Discrete(4, start=3),
    "multi_discrete": spaces.MultiDiscrete([3, 5]),
    "multi_discrete_start": spaces.MultiDiscrete([3, 5], start=[1, -2]),
    "multi_binary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (1,), np.float32)}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2))),
    "nested": NESTED,
    "text": spaces.Text(5),
    "integers": spaces.Box(0, 9, (1,), np.int64),
}


class Several:
    """Agents without the base class of PettingZoo."""

    possible_agents = ("red", "blue")

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACES["box"]


def several() -> Any:
    return Several()


class Converted(gymnasium.Env):
    """An observation of its space's shape, as `make` gives it."""

    def __init__(self, space: spaces.Space, make: Callable[[], Any], length: int = 4) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(2)
        self.make, self.length, self.time = make, length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return self.make(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.time += 1
        return self.make(), 1.0, self.time >= self.length, False, {}


class Scripted(gymnasium.Env):
    """Random observations; records its actions and observations; ends and reports as its script says."""

    def __init__(self, observe: str = "box", act: str = "discrete", length: int = 4, script: str = "plain") -> None:
        self.observation_space, self.action_space = SPACES[observe], SPACES[act]
        self.length, self.script, self.time = length, script, 0
        self.actions: list[Any] = []
        self.observations: list[Any] = []

    def _observe(self) -> Any:
        self.observations.append(self.observation_space.sample())
        return self.observations[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self._observe(), {"at_reset": 100.0}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.time += 1
        self.actions.append(action)
        reward: Any = float(self.time)
        flag: Any = self.time >= self.length
        match self.script:
            case "numpy":
                return self._observe(), np.float64(reward), np.bool_(flag), np.bool_(False), {}
            case "array_reward":
                return self._observe(), np.array(reward), flag, False, {}
            case "one_element":
                return self._observe(), np.array([reward]), np.array([[flag]]), np.array([False]), {}
            case "two_elements":
                return self._observe(), np.array([reward, reward]), flag, False, {}
            case "flag_none":
                return self._observe(), reward, None, False, {}
            case "outside":
                return 4, reward, flag, False, {}
            case "infos":
                return self._observe(), reward, flag, False, self._infos()
        return self._observe(), reward, flag, False, {}

    def _infos(self) -> dict[str, Any]:
        infos: dict[str, Any] = {"always": self.time, "words": "text", "array": np.zeros(3), "none": None, 7: {}}
        if self.time % 2 == 0:
            infos |= {"even": np.float32(self.time), "true": np.bool_(True), "huge": 10**400}
        return infos


def scripted(**kwargs: Any) -> gymnasium.Env:
    """Make a Scripted."""
    return Scripted(**kwargs)


def stacked(padding: str) -> gymnasium.Env:
    """Gray frames in Gymnasium's FrameStackObservation of three."""
    return FrameStackObservation(Scripted("gray", length=7), 3, padding_type=padding)


def broken(**kwargs: Any) -> gymnasium.Env:
    """A constructor that raises."""
    raise OSError("no display")


class Spaceless(gymnasium.Env[Any, Any]):
    """Whose constructor sets no spaces."""


def nothing() -> Any:
    """A callable that does not return an environment."""
    return 3


CONSTANT = 3
