"""EpisodeTracker adds up the running episodes of a sampler; EpisodeStatistic is a number of the user's own of each."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rlframe.core.errors import naming, one_line, qualified_name, warn_once
from rlframe.core.struct import Tree, map_tree
from rlframe.core.types import Trajectory
from rlframe.rollout.buffer import EnvRows
from rlframe.rollout.stepper import BatchEvents


class EpisodeStatistic(ABC):
    """Numbers of every training episode of one environment, logged as env/<name>; each environment has its own."""

    @abstractmethod
    def add(self, observation: Tree, action: Tree, reward: np.ndarray) -> None:
        """Add the next n steps of the running episode, each array [n, ...]; copy what you keep."""

    @abstractmethod
    def result(self) -> dict[str, float]:
        """The numbers, by name, of the episode that has ended; the next one starts."""

    def state_dict(self) -> dict[str, Any]:
        """State of the running episode to save in snapshots: its attributes, if those are arrays and plain values.

        Of others, such as a set, an episode starts anew when a run is resumed, unless this is overridden.
        """
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        vars(self).update(state)


class EpisodeTracker:
    """Adds up the return and length of every environment's running episode, batch by batch."""

    def __init__(self, n: int) -> None:
        self.return_, self.discounted = np.zeros(n), np.zeros(n)
        self.length, self.nonzero = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.age = np.zeros(n, np.int64)  # rows of the running episode, those without a step too
        self.partial = np.zeros(n, bool)  # the agent did not take all steps of the running episode
        self.finished: list[Trajectory] = []
        self.statistics: list[list[EpisodeStatistic]] = [[] for _ in range(n)]  # of each environment
        self._discount, self._makers = 1.0, list[Callable[[], EpisodeStatistic]]()
        self._powers: np.ndarray = np.ones(0)

    def follow(self, discount: float, statistics: Sequence[Callable[[], EpisodeStatistic]]) -> None:
        """Discount by this factor, and make these statistics for every environment."""
        self._discount, self._makers, self._powers = discount, list(statistics), np.ones(0)
        self.statistics = [[_made(make) for make in statistics] for _ in self.statistics]

    def forget(self) -> None:
        """Begin anew in all environments."""
        for _, array in self._arrays():
            array[...] = 0
        self.finished = []
        self.follow(self._discount, self._makers)

    def update(self, rows: EnvRows, events: Iterable[BatchEvents]) -> None:
        """Add a batch. Finished episodes are ordered by their end, then by environment."""
        events = list(events)
        if not np.count_nonzero(rows.ended) and not any(each.interruptions for each in events):
            self._add_all(rows)
            self.age += rows.T
            return
        diagnostics = {end: means for each in events for end, means in each.diagnostics.items()}
        interruptions = {start for each in events for start in each.interruptions}
        ends = [(int(t), int(env)) for t, env in np.argwhere(rows.ended)]
        start = np.zeros(len(self.length), np.int64)  # the first row that has not been added
        for t, env in sorted({*ends, *interruptions}):
            before, start[env] = start[env], t + 1
            self._add(rows, env, int(before), t + 1)
            own = {name: value for each in self.statistics[env] for name, value in _result(each).items()}
            if (t, env) not in interruptions and not self.partial[env]:
                self.finished.append(
                    Trajectory(
                        return_=float(self.return_[env]),
                        length=int(self.length[env]),
                        terminated=bool(rows.terminated[t, env]),
                        env=env,
                        diagnostics=diagnostics.get((t, env), {}) | own,
                        discounted_return=float(self.discounted[env]),
                        nonzero_rewards=int(self.nonzero[env]),
                        age=int(self.age[env]) + rows.T - int(before),
                    )
                )
            for _, array in self._arrays():
                array[env] = 0
        for env, begin in enumerate(start.tolist()):
            self._add(rows, env, begin, rows.T)
        self.age += rows.T - start

    def _add_all(self, rows: EnvRows) -> None:
        """Add a batch in which no episode ended."""
        T, reward = rows.T, rows.raw_reward
        n_valid = np.add.reduce(rows.valid, axis=0, dtype=np.int64)
        if any(self.statistics) or not (n_valid == T).all():  # rows without a step would shift the discounts
            for env in range(rows.B):
                self._add(rows, env, 0, T)
            return
        self.return_ += np.add.reduce(reward, axis=0, dtype=np.float64)
        self.discounted += self._discount**self.length * (self._discounts(T) @ reward)
        self.length += T
        self.nonzero += np.add.reduce(reward != 0, axis=0)

    def _add(self, rows: EnvRows, env: int, start: int, end: int) -> None:
        """Add steps `start` to `end` - 1 of one environment's running episode."""
        reward, valid = rows.raw_reward[start:end, env], rows.valid[start:end, env]
        n = int(np.count_nonzero(valid))
        self.return_[env] += reward.sum(dtype=np.float64)
        self.discounted[env] += self._discount ** self.length[env] * (reward[valid] @ self._discounts(n))
        self.length[env] += n
        self.nonzero[env] += np.count_nonzero(reward)
        if n and self.statistics[env]:
            observation = map_tree(lambda x: x[start:end, env][valid], rows.observation)
            action = map_tree(lambda x: x[start + 1 : end + 1, env][valid], rows.action)
            for each in self.statistics[env]:
                with _named(each, "add"):
                    each.add(observation, action, reward[valid])

    def _discounts(self, n: int) -> np.ndarray:
        """discount ** k for k below n."""
        if n > len(self._powers):
            self._powers = self._discount ** np.arange(n)
        return self._powers[:n]

    def state(self) -> dict[str, Any]:
        """The running episodes."""
        own = [[_state(each) for each in of_env] for of_env in self.statistics]
        return {name: array.copy() for name, array in self._arrays()} | {"statistics": own}

    def load(self, saved: Mapping[str, Any], restarted: np.ndarray) -> None:
        """Continue saved episodes, except in the environments that `restarted` [B]."""
        for name, array in self._arrays():
            array[...] = np.where(restarted, 0, saved[name])
        for of_env, states, anew in zip(self.statistics, saved["statistics"], restarted, strict=True):
            for each, state in zip(of_env, [] if anew else states, strict=False):
                with _named(each, "load_state_dict"):
                    each.load_state_dict(state)

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        return [
            ("return", self.return_),
            ("length", self.length),
            ("partial", self.partial),
            ("discounted", self.discounted),
            ("nonzero", self.nonzero),
            ("age", self.age),
        ]

    def pop(self) -> list[Trajectory]:
        """The episodes finished since the last call."""
        finished, self.finished = self.finished, []
        return finished


def _made(make: Callable[[], EpisodeStatistic]) -> EpisodeStatistic:
    with naming(f"sampler.statistics {qualified_name(make) if isinstance(make, type) else make} cannot be made"):
        return make()


def _named(statistic: EpisodeStatistic, method: str) -> AbstractContextManager[None]:
    return naming(f"sampler.statistics {qualified_name(type(statistic))} failed in {method}")


def _result(statistic: EpisodeStatistic) -> dict[str, float]:
    with _named(statistic, "result"):
        return {str(name): float(value) for name, value in statistic.result().items()}


def _state(statistic: EpisodeStatistic) -> dict[str, Any]:
    from rlframe.record.codec import encode  # with torch, which processes that only step do without

    with _named(statistic, "state_dict"):
        if type(statistic).state_dict is not EpisodeStatistic.state_dict:
            return statistic.state_dict()
        try:
            encode(found := statistic.state_dict(), {})
            return found
        except TypeError as error:  # a set, a lock
            warn_once(
                f"sampler.statistics {qualified_name(type(statistic))} has no state_dict, and starts anew when a run "
                f"is resumed: {one_line(error, 200)}"
            )
            return {}
