"""Restarter: makes environments that raise again, a few times each, for `sampler.env_restarts=k`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlframe.core.errors import Stopped
from rlframe.envs.base import close_envs
from rlframe.envs.episode_state import EpisodeStates
from rlframe.envs.observations import ENV_ERRORS, describe

_log = logging.getLogger("rlframe")


class Restarter:
    """Steps and resets the environments of a batch in place of their own methods."""

    def __init__(
        self,
        makers: Sequence[Callable[[], gymnasium.Env]],
        seeds: Sequence[int],
        envs: list[gymnasium.Env],
        episodes: EpisodeStates,
        most: int,
        first: int,
    ) -> None:
        """`envs` is changed in place; `first` is the index of the first environment in messages."""
        self._makers, self._seeds, self._envs, self._episodes = makers, seeds, envs, episodes
        self._most, self._first = most, first
        self.used = [0] * len(envs)  # restarts of each environment
        self.restarted: list[int] = []  # in the last step; its environments clear it

    def step(self, index: int, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The environment's step, or if it raises, the first observation of a new episode."""
        try:
            return self._envs[index].step(action)
        except ENV_ERRORS as error:
            observation = self._make_again(index, error)
            self.restarted.append(index)
            return observation, 0.0, False, False, {}

    def reset(self, index: int) -> Any:
        """`EpisodeStates.reset`, with another environment if this one raises."""
        try:
            return self._episodes.reset(index)
        except ENV_ERRORS as error:
            return self._make_again(index, error)

    def _make_again(self, index: int, error: BaseException) -> Any:
        """The first observation of a new environment. Raises `error` or a later one if no restart is left."""
        while True:
            if self.used[index] >= self._most or isinstance(error, Stopped):
                raise error
            self.used[index] += 1
            sequence = np.random.SeedSequence(self._seeds[index], spawn_key=(2, self.used[index]))
            seed = int(sequence.generate_state(1)[0] >> 1)
            _log.warning(
                f"environment {self._first + index} {describe(error)}; it is made again with seed "
                f"{seed} (restart {self.used[index]} of sampler.env_restarts={self._most})"
            )
            close_envs([self._envs[index]], self._first + index)
            try:
                self._envs[index] = self._makers[index]()
                self._episodes.replace(index, self._envs[index], seed)
                return self._episodes.reset(index)
            except ENV_ERRORS as another:
                error = another
