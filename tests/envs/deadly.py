"""CartPole in larger numbers, which kills its process now and then, and reports a number in info."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium


class Deadly(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Dies in its 30th step, `times` times in all processes together; `path` counts them."""

    def __init__(self, path: str = "", times: int = 0) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._path, self._times, self._steps = path, times, 0

    def reset(self, **options: Any) -> Any:
        observation, info = self.env.reset(**options)
        return 20 * observation, info

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 30:
            for number in range(self._times):
                try:
                    os.close(os.open(f"{self._path}.{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return 20 * observation, reward, terminated, truncated, {"angle": float(observation[2])}
