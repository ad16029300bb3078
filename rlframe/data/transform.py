"""A function of the user's that changes episodes as they are written or read, or leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from gymnasium import Space

from rlframe.core.errors import ConfigError, naming, one_line
from rlframe.core.names import find_attribute
from rlframe.core.struct import leaves
from rlframe.data.episodes import SAMPLED_ACTION, Episode, shifted
from rlframe.data.reading import fitted

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
        with naming(f"{key}={name:.200}"):
            found = function(episode)
        if found is not None and not (isinstance(found, Episode) and len(found)):
            raise ConfigError(f"{key}={name:.200} gave {str(found)[:60]}; it must give an Episode with a step, or None")
        if found is not None:
            _check(found, f"{key}={name:.200}")
            _check_spaces(found, spaces, f"{key}={name:.200}")
            if found.action is not episode.action and found.info.get(SAMPLED_ACTION) is episode.info.get(
                SAMPLED_ACTION
            ):
                found = replace(found, info={k: x for k, x in found.info.items() if k != SAMPLED_ACTION})
        return found

    return transform


def _check(episode: Episode, where: str) -> None:
    """Raise ConfigError unless the arrays of an episode belong together."""
    T = len(episode)
    wanted = {
        "observation": (episode.observation, T + 1),
        **{name: (getattr(episode, name), T) for name in ("action", "reward", "terminated", "truncated")},
        **{f"info[{key!r}]": (x, T) for key, x in episode.info.items()},
    }
    for name, (tree, n) in wanted.items():
        for x in leaves(tree):
            if not isinstance(x, np.ndarray) or not x.ndim or x.dtype.kind not in "fiub" or len(x) != n:
                what = f"{x.dtype} of {len(x)} rows" if isinstance(x, np.ndarray) and x.ndim else type(x).__name__
                raise ConfigError(
                    f"{where} gave an episode of {T} rewards whose {name} is {what}; it needs {n} numbers"
                )
            if x.dtype.kind == "f" and not np.isfinite(x).all() and not name.startswith("info"):
                raise ConfigError(f"{where} gave an episode whose {name} has NaN or Inf")


def _check_spaces(episode: Episode, spaces: tuple[Space, Space] | None, where: str) -> None:
    """Raise ConfigError unless an episode is of these spaces."""
    if spaces is None:
        return
    n, (observations, actions) = len(episode), spaces
    try:
        fitted(observations, shifted(observations, episode.observation, 1), n + 1, "observation")
        fitted(actions, episode.action, n, "action")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where} gave an episode that is not of the spaces: {one_line(error)}; keep them") from None


def transformed(episodes: Iterable[Episode], transform: Transform) -> Iterator[Episode]:
    """Those episodes that are not left out."""
    return (found for found in map(transform, episodes) if found is not None)
