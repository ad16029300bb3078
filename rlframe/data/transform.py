"""A function of the user's that changes episodes as they are written or read, or leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from gymnasium import Space

from rlframe.core.errors import ConfigError, naming, one_line
from rlframe.core.names import find_attribute
from rlframe.core.struct import leaves, map_tree
from rlframe.data.episodes import SAMPLED_ACTION, Episode
from rlframe.data.reading import check_episode

Transform = Callable[[Episode], Episode | None]  # None: the episode is left out


def unchanged(episode: Episode) -> Episode:
    return episode


def load_transform(name: str, key: str, spaces: tuple[Space, Space] | None = None) -> Transform:
    """The function module:function or ./file.py:function that `key` names; one that changes nothing for an empty name.

    Args:
        spaces: of observations and actions, for which its episodes are checked.
    Raises:
        ConfigError: there is none, or later, it gives something else than an Episode with a step, or None.
        PartError: later, it raised an exception.
    """
    if not name:
        return unchanged
    function = find_attribute(name, key)
    if not callable(function):
        raise ConfigError(f"{key}={name:.200} is not a function of an Episode")

    def transform(episode: Episode) -> Episode | None:
        sampled = episode.info.get(SAMPLED_ACTION)
        before = () if sampled is None else map_tree(np.copy, (sampled, episode.action))  # may be changed in place
        with naming(f"{key}={name:.200}"):
            found = function(episode)
        if found is not None and not (isinstance(found, Episode) and len(found)):
            raise ConfigError(f"{key}={name:.200} gave {str(found)[:60]}; it must give an Episode with a step, or None")
        if found is not None:
            try:
                check_episode(found, spaces)
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{key}={name:.200} gave an episode that does not fit: {one_line(error)}") from None
            is_old = bool(before) and np.array_equal(found.info.get(SAMPLED_ACTION, ()), before[0])
            if is_old and not all(map(np.array_equal, leaves(before[1]), leaves(found.action))):
                found = replace(found, info={k: x for k, x in found.info.items() if k != SAMPLED_ACTION})
        return found

    return transform


def transformed(episodes: Iterable[Episode], transform: Transform) -> Iterator[Episode]:
    """Those episodes that are not left out."""
    return (found for found in map(transform, episodes) if found is not None)
