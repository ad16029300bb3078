"""An environment whose observations and rewards say whose they are: of which environment, episode and time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlframe.data import Episode


class TellingEnv(gymnasium.Env):
    """Observations are (environment, episode, time); lengths and ends follow from the first two."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(7)

    def __init__(self) -> None:
        self._who, self._episode, self._time = -1, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if self._who < 0:
            self._who = int(self.np_random.integers(1 << 20))
        self._episode, self._time = self._episode + 1, 0
        return self._seen(), {}

    def _seen(self) -> np.ndarray:
        return np.array([self._who, self._episode, self._time], np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = _reward(self._who, self._episode, self._time, int(action))
        self._time += 1
        n, truncated = _ending(self._who, self._episode)
        return self._seen(), reward, self._time == n and not truncated, self._time == n and truncated, {}


def _ending(who: int, episode: int) -> tuple[int, bool]:
    """Its length, and whether it is truncated."""
    n = (who * 31 + episode * 17) % 23
    return 1 + n, n % 3 == 0


def _reward(who: int, episode: int, time: int, action: int) -> float:
    return who % 97 + episode + 0.25 * time + 8 * action


def check_told(episodes: Iterable[Episode]) -> tuple[int, int]:
    """Check every row of whole episodes, of which none is missing; the numbers of environments and of steps."""
    of: dict[int, list[int]] = {}
    n_steps = 0
    for each in episodes:
        (who, episode, _), T = each.observation[0].astype(int).tolist(), len(each)
        n, truncated = _ending(who, episode)
        assert n == T
        assert np.array_equal(each.observation, [[who, episode, t] for t in range(n + 1)])
        assert np.array_equal(each.reward, [_reward(who, episode, t, int(each.action[t])) for t in range(n)])
        assert (each.terminated[-1], each.truncated[-1]) == (not truncated, truncated)
        assert not (each.terminated | each.truncated)[:-1].any()
        of.setdefault(who, []).append(episode)
        n_steps += n
    assert all(sorted(found) == list(range(len(found))) for found in of.values())
    return len(of), n_steps
