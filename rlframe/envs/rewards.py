"""ScaledRewards: any batch of environments, with the rewards that are learned from scaled and clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlframe.core.struct import Tree
from rlframe.envs.base import Envs, EnvStep
from rlframe.envs.options import EnvOptions, clip_bounds


def reward_transform(options: EnvOptions) -> Callable[[np.ndarray, np.ndarray], Any]:
    """A function (score, out) that writes clip(scale * score) into `out`; both are float32 arrays of any shape."""
    scale = np.float32(options.reward_scale)
    if options.reward_clip == "sign":
        return lambda score, out: np.sign(score, out=out)
    low, high = clip_bounds(options.reward_clip)

    def transform(score: np.ndarray, out: np.ndarray) -> None:
        np.multiply(score, scale, out=out)
        np.clip(out, low, high, out=out)

    return transform


class ScaledRewards(Envs):
    """Owns `envs`; writes `reward` from their `score`."""

    def __init__(self, envs: Envs, options: EnvOptions) -> None:
        self._envs, self._transform = envs, reward_transform(options)
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.n, self.backend, self.render_fps = envs.n, envs.backend, envs.render_fps
        self.can_wait, self.time_limit, self.restarts = envs.can_wait, envs.time_limit, envs.restarts

    def reset(self, out: EnvStep, round_: int = 0) -> None:
        self._envs.reset(out, round_)

    def step(self, action: Tree, out: EnvStep) -> None:
        self._envs.step(action, out)
        self._transform(out.score, out.reward)

    def hold(self, which: frozenset[int], at_once: bool = False) -> None:
        self._envs.hold(which, at_once)

    def pop_restarted(self) -> list[int]:
        return self._envs.pop_restarted()

    def pop_diagnostics(self, index: int) -> dict[str, float]:
        return self._envs.pop_diagnostics(index)

    def state(self) -> list[Any]:
        return self._envs.state()

    def restore(self, states: Sequence[Any], out: EnvStep, tick: Callable[[], None]) -> list[str]:
        return self._envs.restore(states, out, tick)

    def frame(self, index: int) -> np.ndarray:
        return self._envs.frame(index)

    def close(self) -> None:
        self._envs.close()
