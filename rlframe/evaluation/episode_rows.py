"""EpisodeRows: the rows of many episodes side by side, as tensors to learn from and as a padded array by episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.spaces import action_parts, zeros
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.data.episodes import Episode, sampled_actions
from rlframe.data.reading import check_spaces, open_dataset
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
    """Raise ConfigError if episodes are too few, empty, not finite, or do not fit the spaces."""
    if len(episodes) < 2:
        raise ConfigError(f"the dataset has {pluralize(len(episodes), 'episode')}, and an interval needs at least 2")
    for number, episode in enumerate(episodes):
        T = len(episode.reward)
        lengths = {
            "observation": {len(x) - 1 for x in leaves(episode.observation)},
            "action": {len(x) for x in leaves(episode.action)},
            "terminated": {len(episode.terminated)},
            "truncated": {len(episode.truncated)},
        }
        wrong = [f"{name} of {found.pop()}" for name, found in lengths.items() if found != {T}]
        if not T or wrong:
            raise ConfigError(f"episode {number} of the dataset has {T} rewards {' and '.join(wrong)}; remove it")
        if episode.terminated[:-1].any() or episode.truncated[:-1].any():
            raise ConfigError(f"episode {number} of the dataset ends before its last step; divide it into episodes")
        _check_values(f"observations of episode {number}", episode.observation, observation_space)
        _check_values(f"actions of episode {number}", episode.action, action_space)
        if not np.isfinite(episode.reward).all():
            raise ConfigError(f"episode {number} of the dataset has a reward that is not finite; remove it")


def _check_values(name: str, found: Tree, space: Space) -> None:
    """Raise ConfigError if they are of other shapes, not finite, or no classes from 0."""
    shapes, own = ([tuple(x.shape[lead:]) for x in leaves(tree)] for tree, lead in ((found, 1), (zeros(space), 0)))
    if shapes != own:
        raise ConfigError(f"the {name} of the dataset have shapes {shapes}, and the policy's are {own}: {space}")
    for x, (_, part) in zip(leaves(found), action_parts(space), strict=True):
        if not np.isfinite(x).all():
            raise ConfigError(f"the {name} of the dataset are not finite; remove it")
        if isinstance(part, spaces.Discrete) and not (x.min() >= 0 and x.max() < part.n):
            raise ConfigError(
                f"the {name} of the dataset have classes from {x.min()} to {x.max()}, and {part} has {part.n}; "
                f"they count from 0"
            )


def rows_of(episodes: Sequence[Episode], time_limit: int) -> EpisodeRows:
    """The rows of episodes; with a time limit, observations get their time and nothing is worth anything after it."""
    length = np.array([len(episode.reward) for episode in episodes])
    first = np.cumsum(length + 1) - length - 1
    row = np.concatenate([start + np.arange(T) for start, T in zip(first, length, strict=True)])
    observation = map_tree(_joined, *[episode.observation for episode in episodes])
    ends = np.concatenate([episode.terminated for episode in episodes])
    if time_limit:
        time = np.concatenate([np.arange(T + 1, dtype=np.float32) for T in length])
        observation = _with_step(observation, torch.from_numpy(time[:, None]))
        ends = ends | (row - np.repeat(first, length) + 1 >= time_limit)
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
