"""Episode, one episode of recorded experience; and episodes as the rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.spaces import action_parts, box_scaling, zeros
from rlframe.core.struct import Struct, Tree, leaves, map_tree
from rlframe.core.types import AgentInputs, Samples

SAMPLED_ACTION = "sampled_action"  # in an Episode's info: see `sampled_numbers`


@dataclass(frozen=True, eq=False)
class Episode:
    """One episode, or the part of one that was recorded; NumPy arrays as an environment gives and takes them."""

    observation: Tree  # [T+1, *obs], canonical (see core.spaces); the last one follows the last action
    action: Tree  # [T, *act], the environment's
    reward: np.ndarray  # [T] float32
    terminated: np.ndarray  # [T] bool
    truncated: np.ndarray  # [T] bool
    info: Mapping[str, np.ndarray]  # [T, ...] such as log_prob [T], of the policy that acted

    def __len__(self) -> int:
        """T, its env steps."""
        return len(self.reward)

    @property
    def return_(self) -> float:
        """The sum of its rewards."""
        return float(self.reward.sum(dtype=np.float64))

    @property
    def n_bytes(self) -> int:
        arrays = (self.observation, self.action, self.reward, dict(self.info))
        return sum(x.nbytes for x in leaves(arrays))

    def columns(self) -> dict[str, Tree]:
        """Its arrays, but the infos, by the names that Minari's files give them."""
        ends = {"terminations": self.terminated, "truncations": self.truncated}
        return {"observations": self.observation, "actions": self.action, "rewards": self.reward, **ends}


def canonical_actions(space: Space, action: Tree) -> Tree:
    """Actions [T, ...] of an environment as agents see them (see core.spaces); the inverse of `action_decoder`."""
    match space:
        case spaces.Dict():
            return {key: canonical_actions(sub, action[key]) for key, sub in space.spaces.items()}
        case spaces.Tuple():
            return tuple(canonical_actions(sub, part) for sub, part in zip(space.spaces, action, strict=True))
        case spaces.Box():
            scale, offset, _, _ = box_scaling(space)
            as_is = bool((scale == 1).all() and (offset == 0).all())
            x = np.asarray(action, np.float32)
            return x if as_is else (x - offset) / scale
        case spaces.Discrete() | spaces.MultiDiscrete():
            return np.asarray(action, np.int64) - np.asarray(space.start)
        case _:
            return np.asarray(action, zeros(space).dtype)


def sampled_numbers(space: Space, action: Tree) -> np.ndarray | None:
    """What canonical actions [T, ...] lose where they are clipped to the environment's bounds, to be recorded.

    Those of a Box [T, *act]; the numbers [T, n] of all Boxes of a Dict or Tuple; None without a Box.
    """
    if isinstance(space, spaces.Box):
        return np.asarray(action)
    parts = zip(action_parts(space), leaves(action), strict=True)
    boxes = [x.reshape(len(x), -1) for (_, part), x in parts if isinstance(part, spaces.Box)]
    return np.concatenate(boxes, axis=1) if boxes else None


def with_sampled(space: Space, action: Tree, numbers: np.ndarray) -> Tree:
    """Canonical actions [T, ...] with these `sampled_numbers`."""
    if isinstance(space, spaces.Box):
        return numbers
    parts, rest = iter(action_parts(space)), numbers

    def restored(x: np.ndarray) -> np.ndarray:
        nonlocal rest
        if not isinstance(next(parts)[1], spaces.Box):
            return x
        own, rest = np.split(rest, [math.prod(x.shape[1:])], axis=1)
        return own.reshape(x.shape).astype(x.dtype)

    return map_tree(restored, action)


def shifted(space: Space, observation: Tree, by: int) -> Tree:
    """Observations [n, ...] plus `by` times the start of each Discrete and MultiDiscrete.

    1: from canonical ones to those of environments and datasets; -1: back.
    """
    parts = iter(action_parts(space))

    def moved(x: np.ndarray) -> np.ndarray:
        start = np.asarray(getattr(next(parts, ("", space))[1], "start", 0))
        return x + by * start if start.any() else x

    return map_tree(moved, observation)


def _stacked(parts: Sequence[Tree]) -> Tree:
    return map_tree(lambda *x: np.concatenate(x), *parts)


@dataclass(frozen=True, eq=False)
class _Rows(Struct):
    """Rows [n] of a single environment, in order."""

    observation: Tree
    action: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.valid)


def sampled_actions(episode: Episode, action_space: Space) -> Tree:
    """Its actions [T, ...] as agents see them, before they were clipped if that was recorded."""
    sampled, action = episode.info.get(SAMPLED_ACTION), canonical_actions(action_space, episode.action)
    return action if sampled is None else with_sampled(action_space, action, sampled)


def _rows_of(episode: Episode, action_space: Space, sampled: bool) -> _Rows:
    """[T+1]: its steps, and the last observation as a row of its own (see Samples).

    An episode that was cut off counts as truncated: what follows it is another one.
    """
    n = len(episode)
    action = sampled_actions(episode, action_space) if sampled else canonical_actions(action_space, episode.action)
    padded = map_tree(lambda x, zero: np.concatenate([x, zero[None]]), action, zeros(action_space))
    reward = np.append(episode.reward, np.float32(0))
    terminated, truncated = np.append(episode.terminated, False), np.append(episode.truncated, False)
    truncated[n - 1] |= ~terminated[n - 1]
    row = np.arange(n + 1)
    return _Rows(episode.observation, padded, reward, terminated, truncated, row < n, row == 0)


def as_batches(
    episodes: Iterable[Episode],
    action_space: Space,
    T: int,
    state: Tree = (),
    whole: bool = False,
    sampled: bool = False,
    n_absent: int = 0,
) -> Iterator[Samples]:
    """The rows of episodes as batches [T, 1] of one stream, NumPy arrays; the last one may be shorter.

    Args:
        state: example [1, ...] of the agent's initial state, which every batch has.
        whole: the last one has T rows too, absent ones at its end.
        sampled: actions before they were clipped, where those were recorded, and not as environments executed them.
        n_absent: absent rows after those, a multiple of T if the last one is whole.
    """
    parts: list[_Rows] = []
    n = start = 0

    def cut() -> Iterator[Samples]:
        nonlocal parts, n, start
        rows: _Rows = _stacked(parts)
        while len(rows) > T:  # the row after a batch is needed too
            yield _batch(rows[:T], rows[T : T + 1], state, start)
            start, rows = start + T, rows[T:]
        parts, n = [rows], len(rows)

    for episode in episodes:
        parts.append(_rows_of(episode, action_space, sampled))
        n += len(parts[-1])
        if n > T:
            yield from cut()
    if n:
        last = replace(parts[-1][-1:], first=np.zeros(1, np.bool_))
        parts += [last] * ((T - n) * whole + n_absent)
        yield from cut()
        yield _batch(parts[0], last, state, start)


def _batch(rows: _Rows, after: _Rows, state: Tree, start: int) -> Samples:
    """A batch [T, 1]; `after`: the row that follows."""
    column = rows.map(lambda x: x[:, None])
    zero = map_tree(lambda x: np.zeros_like(x[:1]), column.action), np.zeros((1, 1), np.float32)
    prev_action, prev_reward = _stacked([zero, (column.action, column.reward)])
    observation, first = (
        map_tree(lambda x, y: np.concatenate([x, y[:, None]]), *pair)
        for pair in ((column.observation, after.observation), (column.first, after.first))
    )
    no_info: Any = ()
    return Samples(
        AgentInputs(observation, prev_action, prev_reward, first),
        column.action,
        column.reward,
        column.terminated,
        column.truncated,
        column.valid,
        info=no_info,
        state=state,
        final_state=state,
        n_env_steps=int(rows.valid.sum()),
        start=start,
    )
