"""EpisodeTracker: discounted returns, counts and the user's own statistics of episodes, however batches cut them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlframe.core.errors import ConfigError
from rlframe.rollout.buffer import EnvRows
from rlframe.rollout.episodes import EpisodeStatistic, EpisodeTracker
from rlframe.samplers import serial

DISCOUNT = 0.5
# Two environments, ten rows each: rewards, and where episodes end; the row after an end is no step.
REWARDS = np.array([[1, 2, 0, 4, 0, 8, 0, 0, 1, 1], [3, 0, 0, 0, 5, 0, 7, 1, 0, 2]], np.float32).T
ENDED = np.zeros((10, 2), bool)
ENDED[3, 0] = ENDED[8, 0] = ENDED[5, 1] = True
VALID = ~np.roll(ENDED, 1, axis=0)
REWARDS = np.where(VALID, REWARDS, 0)
EPISODES = [  # rewards of the steps of each episode, in the order of their ends
    (0, [1, 2, 0, 4]),
    (1, [3, 0, 0, 0, 5, 0]),
    (0, [8, 0, 0, 1]),
]


class Places(EpisodeStatistic):
    """The sum of what was observed and done, and the number of steps."""

    def __init__(self) -> None:
        self.seen, self.n = 0.0, 0

    def add(self, observation: Any, action: Any, reward: np.ndarray) -> None:
        assert len(observation) == len(action) == len(reward)
        self.seen += float(observation.sum()) + 100.0 * float(action.sum())
        self.n += len(reward)

    def result(self) -> dict[str, float]:
        found = {"seen": self.seen, "n": float(self.n)}
        self.__init__()  # type: ignore[misc]
        return found


def rows(start: int, end: int) -> EnvRows:
    """Rows start to end - 1: the observation is the row's number, the action too."""
    T = end - start
    numbers = np.repeat(np.arange(start, end + 1)[:, None], 2, axis=1)
    action = np.zeros((T + 1, 2), np.int64)
    action[1:] = numbers[:-1]
    zeros = np.zeros((T, 2), bool)
    return EnvRows(
        action=action,
        observation=numbers.astype(np.float32),
        first=np.zeros((T + 1, 2), bool),
        reward=np.zeros((T + 1, 2), np.float32),
        terminated=ENDED[start:end],
        truncated=zeros,
        valid=VALID[start:end],
        raw_reward=REWARDS[start:end],
        ended=ENDED[start:end],
    )


@pytest.mark.parametrize("T", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("statistics", [(), (Places,)], ids=["plain", "with statistics"])
def test_episodes_are_the_same_however_batches_cut_them(T: int, statistics: tuple[type[Places], ...]) -> None:
    tracker = EpisodeTracker(2)
    tracker.follow(DISCOUNT, statistics)
    found = []
    for start in range(0, 10, T):
        tracker.update(rows(start, min(start + T, 10)), [])
        found += tracker.pop()
        saved = tracker.state()
        tracker = EpisodeTracker(2)
        tracker.follow(DISCOUNT, statistics)
        tracker.load(saved, np.zeros(2, bool))
    assert [(each.env, each.length, each.return_) for each in found] == [(e, len(r), sum(r)) for e, r in EPISODES]
    assert [each.nonzero_rewards for each in found] == [sum(x != 0 for x in r) for _, r in EPISODES]
    discounted = [sum(x * DISCOUNT**k for k, x in enumerate(r)) for _, r in EPISODES]
    assert [each.discounted_return for each in found] == pytest.approx(discounted, rel=1e-12)
    if statistics:
        steps = [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (5, 6, 7, 8)]
        assert [each.diagnostics for each in found] == [{"seen": 101.0 * sum(s), "n": len(s)} for s in steps]


class Visited(EpisodeStatistic):
    """The number of places, in what a snapshot cannot hold."""

    def __init__(self) -> None:
        self.places: set[float] = set()

    def add(self, observation: Any, action: Any, reward: np.ndarray) -> None:
        self.places |= set(observation.tolist())

    def result(self) -> dict[str, float]:
        return {"places": float(len(self.places))}


def test_a_statistic_that_cannot_be_saved_starts_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tracker = EpisodeTracker(2)
    tracker.follow(DISCOUNT, (Visited,))
    tracker.update(rows(0, 3), [])
    assert tracker.state()["statistics"] == [[{}], [{}]]
    assert "Visited has no state_dict, and starts anew when a run is resumed: state.places is a set" in caplog.text


def test_a_restarted_environment_starts_its_sums_anew() -> None:
    tracker, again = EpisodeTracker(2), EpisodeTracker(2)
    for each in (tracker, again):
        each.follow(DISCOUNT, ())
    tracker.update(rows(0, 3), [])
    again.load(tracker.state(), np.array([True, False]))
    again.update(rows(3, 6), [])
    first, second = again.pop()
    assert (first.env, first.length, first.discounted_return) == (0, 1, 4.0)
    assert (second.env, second.length, second.discounted_return) == (1, 6, 3 + 5 * DISCOUNT**4)


@pytest.mark.parametrize("name", ["tests.rollout.test_episodes:Placs", "builtins:int", "Places"])
def test_what_is_not_a_statistic_is_refused(name: str) -> None:
    config = serial.Config(statistics=(name,))
    with pytest.raises(ConfigError, match=r"sampler\.statistics="):
        config.follow_episodes(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("T", "ages"), [(10, [10, 10, 6]), (5, [5, 10, 6]), (1, [4, 6, 5])])
def test_the_age_of_an_episode_counts_rows_to_the_end_of_its_batch(T: int, ages: list[int]) -> None:
    """The row after an end counts for the episode that follows. Ends are at rows 3 and 8, and 5."""
    tracker = EpisodeTracker(2)
    for start in range(0, 10, T):
        tracker.update(rows(start, start + T), [])
    assert [episode.age for episode in tracker.pop()] == ages
