"""A function of the user's that changes episodes: what it gives is checked, and what it made false is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from rlframe.core.errors import ConfigError
from rlframe.data import Episode
from rlframe.data.episodes import SAMPLED_ACTION
from rlframe.data.transform import load_transform
from tests.data.episodes import episodes

SPACES = spaces.Box(-5, 5, (4,)), spaces.Box(-2, 2, (1,))


def counted_ends(episode: Episode) -> Episode:
    return replace(episode, terminated=episode.terminated.astype(np.int64))


def halved(episode: Episode) -> Episode:
    episode.action[:] /= 2
    return episode


def all_halved(episode: Episode) -> Episode:
    episode.info[SAMPLED_ACTION][:] /= 2
    return halved(episode)


def rewarded(episode: Episode) -> Episode:
    return replace(episode, reward=episode.reward + 1, action=episode.action.copy())


def transformed_by(name: str) -> tuple[Episode, Episode]:
    """A recorded episode before and after a function of this module."""
    (found,) = episodes([4], *SPACES)
    found = replace(found, info={SAMPLED_ACTION: 3 * found.action})
    after = load_transform(f"{__name__}:{name}", "record_transform", SPACES)(found)
    assert after is not None
    return found, after


def test_ends_that_are_no_bools_are_refused_for_not_of_a_number_is_no_bool() -> None:
    with pytest.raises(ConfigError, match=r"record_transform=.* fit: its terminated is int64, not bool"):
        transformed_by("counted_ends")


def test_sampled_actions_are_left_out_where_the_actions_were_changed_also_in_place() -> None:
    assert SAMPLED_ACTION not in transformed_by("halved")[1].info
    before, after = transformed_by("rewarded")
    assert after.info[SAMPLED_ACTION] is before.info[SAMPLED_ACTION]


def test_sampled_actions_that_are_changed_too_are_kept() -> None:
    before, after = transformed_by("all_halved")
    assert np.array_equal(after.info[SAMPLED_ACTION], 3 * before.action)
