"""EpisodeRows: the rows of many episodes side by side, as tensors to learn from and as a padded array by episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.core.errors import ConfigError, one_line, pluralize
from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, map_tree
from rlframe.data.episodes import Episode, sampled_actions, shifted
from rlframe.data.reading import check_episode, check_spaces, open_dataset
from rlframe.data.transform import load_transform, transformed

STEP = "step"  # entry of an observation with its time


@dataclass(frozen=True, eq=False)
class EpisodeRows:
    """M observations of n episodes, of which N have an action; all on the CPU."""

    observation: Tree  # [M, *obs]
    action: Tree  # [N, *act]
    reward: Tensor  # [N] float32
    bootstraps: Tensor  # [N] float32, 1: the worth goes on at the next observation
    row: Tensor  # [N] int64 of the observation; that of the next one is row + 1
    length: np.ndarray  # [n] env steps

    @property
    def start(self) -> np.ndarray:
        """[n] the row of each episode's first observation."""
        return np.cumsum(self.length + 1) - self.length - 1

    def padded(self, x: np.ndarray) -> np.ndarray:
        """Numbers [N] of rows with an action, or [M] of all, as float64 [n, T] or [n, T+1], 0 after each end."""
        lengths = self.length + (len(x) > len(self.row))
        found = np.zeros((len(lengths), lengths.max()))
        found[np.arange(lengths.max()) < lengths[:, None]] = x
        return found


def load_episodes(dataset: str, observation_space: Space, action_space: Space, transform: str = "") -> list[Episode]:
    """The episodes of a dataset, with actions as agents see them.

    `transform`: that of algo.replay.transform, by which they were changed for learning; empty: none.

    Raises:
        ConfigError: there is no such dataset, it has other spaces, or is damaged.
    """
    found = open_dataset(dataset)
    check_spaces(found, observation_space, action_space, "the policy")
    change = load_transform(transform, "algo.replay.transform", (found.observation_space, found.action_space))
    episodes = transformed(found.episodes(), change)
    return [replace(each, action=sampled_actions(each, action_space)) for each in episodes]


def time_limit_of(episodes: Sequence[Episode]) -> int:
    """The number of steps at which all truncated episodes were truncated, if none is longer; 0: there is none."""
    cut = {len(episode.reward) for episode in episodes if episode.truncated[-1] and not episode.terminated[-1]}
    return cut.pop() if cut == {max(len(episode.reward) for episode in episodes)} else 0


def check_episodes(episodes: Sequence[Episode], observation_space: Space, action_space: Space) -> None:
    """Raise ConfigError if episodes are too few, or one is empty, not finite, not whole or not of the spaces."""
    if len(episodes) < 2:
        raise ConfigError(f"the dataset has {pluralize(len(episodes), 'episode')}, and an interval needs at least 2")
    starts = any(np.any(getattr(part, "start", 0)) for _, part in action_parts(action_space))
    hint = "; classes are given from 0 here, and the space counts from its start" if starts else ""
    for number, episode in enumerate(episodes):
        try:
            if not len(episode) or episode.terminated[:-1].any() or episode.truncated[:-1].any():
                raise ValueError("it has no step, or ends before its last step; remove it, or divide it into episodes")
            as_given = shifted(action_space, episode.action, 1)  # as environments take them
            check_episode(replace(episode, action=as_given, info={}), (observation_space, action_space))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"episode {number} of the dataset does not fit: {one_line(error, 300)}{hint}") from None


def rows_of(episodes: Sequence[Episode], time_limit: int) -> EpisodeRows:
    """The rows of episodes; with a time limit, observations get their time and nothing is worth anything after it."""
    length = np.array([len(episode.reward) for episode in episodes])
    row = np.arange(length.sum()) + np.repeat(np.arange(len(length)), length)  # each has one observation more
    observation = map_tree(_joined, *[episode.observation for episode in episodes])
    ends = np.concatenate([episode.terminated for episode in episodes])
    if time_limit:
        time = np.concatenate([np.arange(T + 1, dtype=np.float32) for T in length])
        observation = _with_step(observation, torch.from_numpy(time[:, None]))
        ends = ends | (time[row] + 1 >= time_limit)
    return EpisodeRows(
        observation,
        map_tree(_joined, *[episode.action for episode in episodes]),
        torch.from_numpy(np.concatenate([np.asarray(episode.reward, np.float32) for episode in episodes])),
        torch.from_numpy(~ends).float(),
        torch.from_numpy(row),
        length,
    )


def space_of(observation_space: Space, time_limit: int) -> Space:
    """The space of the observations of `rows_of`."""
    if not time_limit:
        return observation_space
    return spaces.Dict(_with_step(observation_space, spaces.Box(0, time_limit, (1,), np.float32)))


def _with_step(observation: Tree, step: Tree) -> dict[str, Tree]:
    return {"observation": observation, STEP: step}


def _joined(*arrays: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
