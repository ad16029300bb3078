"""The rows of a replay buffer: a ring that is written one batch at a time and read at any row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, Samples
from rlframe.replay.columns import Column, ColumnMemory, Ring, spans, write_rows
from rlframe.replay.frames import Location, ObservationStorage

_ARRAYS = ("reward", "terminated", "truncated", "valid", "first")


class Storage:
    """Copies of batches. Row `ring.t`, the end of the newest, is readable too, except for its action and outcome.

    If a batch does not start where the last one ended (after a resume, or where a batch was lost), the open episodes
    are truncated: the last row becomes their last observation, and a few invalid rows separate the batches.
    """

    def __init__(
        self, ring: Ring, memory: ColumnMemory, observation: Tree, example: AgentInputs, previous: bool
    ) -> None:
        """Args:
        observation: tree of `ObservationStorage`.    example: NumPy zeros [B], shaped as the batches' rows.
        previous: whether prev_action, prev_reward and first are read; else they are null.
        """
        self.ring, self.memory, self.observation, self.previous = ring, memory, observation, previous
        self.rows_before = max([int(previous), *(leaf.rows_before for leaf in leaves(observation))])
        L, B = ring.L, ring.B
        self.action = map_tree(lambda x: memory.column(L, B, x.shape[1:], x.dtype), example.prev_action)
        self.reward = np.zeros((L, B), np.float32)
        self.terminated, self.truncated, self.valid, self.first = (np.zeros((L, B), np.bool_) for _ in range(4))
        self.n_rows = 0  # valid rows
        self.last = example.map(np.copy)  # the row where the next batch starts
        self._observations: list[ObservationStorage] = leaves(observation)
        self._columns: list[Column] = leaves(self.action)
        self._last: list[np.ndarray] = leaves(self.last)
        self._null = replace(example, observation=()).map(lambda x: memory.send(x[:1].copy()))
        self._nulls: dict[tuple[int, ...], AgentInputs] = {}

    def append(self, samples: Samples) -> int:
        """Copy a batch; returns the time of its row 0.

        Raises:
            ValueError: B differs, T is too large, or stacks of frames cannot be rebuilt (see Frames).
        """
        inputs, action = _arrays(self.last, samples.inputs), _leaves(self.last.prev_action, samples.action)
        reward, terminated, truncated, valid = (
            as_numpy(x) for x in (samples.reward, samples.terminated, samples.truncated, samples.valid)
        )
        T, (L, B) = len(valid), (self.ring.L, self.ring.B)
        if valid.shape != (T, B) or T + 2 * self.rows_before + 2 > L:
            raise ValueError(f"a batch of [T, B] = {list(valid.shape)} does not fit a replay of [L, B] = {[L, B]}")
        if not self.ring.t or not self._continues(inputs):
            self._start_anew(inputs)
        start, reset = self.ring.t, ~valid
        for part, rows in zip(self._observations, inputs.observation, strict=True):
            part.append(start, rows, reset)
        self._invalidate(start + 1, T)
        if reset[0].any():
            self._truncate(start - 1, reset[0])  # a worker that died between batches left no end of its episode
        self._write(start, action, (reward, terminated, truncated, valid))
        write_rows(self.first, start + 1, inputs.first[0][1:])
        for to, rows in zip(self._last, _flat(inputs), strict=True):
            to[...] = rows[-1]
        self.ring.t = start + T
        return start

    def _continues(self, inputs: _Arrays) -> bool:
        """Whether row 0 equals the last row, compared as bytes because NaN != NaN."""
        if all(rows[0].tobytes() == row.tobytes() for rows, row in zip(_flat(inputs), self._last, strict=True)):
            return True
        first = self.last.first & inputs.first[0][0]  # agents null prev_action and prev_reward there: they may differ
        nowhere = np.zeros_like(first)
        last = _arrays(self.last, self.last)
        return all(
            _starts_with(rows, row, ignored)
            for part, before, ignored in zip(inputs, last, (nowhere, first, first, nowhere), strict=True)
            for rows, row in zip(part, before, strict=True)
        )

    def _start_anew(self, inputs: _Arrays) -> None:
        """Make row `ring.t` the batch's row 0, preceded by invalid rows with what it needs of the rows before it."""
        ring, n = self.ring, self.rows_before
        time = ring.t
        if time:
            self._truncate(time - 1, np.ones(ring.B, np.bool_))
            n += 1
        self._invalidate(time + 1, n)
        no = np.zeros((n, ring.B), np.bool_)
        action = [np.zeros((n, *x.shape[1:]), x.dtype) for x in inputs.prev_action]
        reward = no.astype(np.float32)
        for to, rows in zip([*action, reward], [*inputs.prev_action, *inputs.prev_reward], strict=True):
            to[-1:] = rows[0]
        self._write(time, action, (reward, no, no, no))
        ring.t = time + n
        for part, rows in zip(self._observations, inputs.observation, strict=True):
            part.write_first(ring.t, rows[0])
        write_rows(self.first, ring.t, inputs.first[0][:1])

    def _truncate(self, time: int, envs: np.ndarray) -> None:
        """Truncate the open episodes of `envs` [B] bool at this row."""
        place = time % self.ring.L
        self.truncated[place] |= envs & self.valid[place] & ~self.terminated[place]

    def _invalidate(self, start: int, n: int) -> None:
        """Mark the rows as not valid that n time steps starting at `start` are about to overwrite."""
        for places, _ in spans(start, n, self.ring.L):
            self.n_rows -= int(np.count_nonzero(self.valid[places]))
            self.valid[places] = False

    def _write(self, time: int, action: list[np.ndarray], outcome: tuple[np.ndarray, ...]) -> None:
        """`outcome`: reward, terminated, truncated and valid."""
        reward, terminated, truncated, valid = outcome
        if not len(valid):
            return
        for column, rows in zip(self._columns, action, strict=True):
            column.write(time, rows)
        for places, part in spans(time, len(valid), self.ring.L):
            self.reward[places], self.terminated[places] = reward[part], terminated[part]
            self.truncated[places], self.valid[places] = truncated[part], valid[part]
        self.n_rows += int(np.count_nonzero(valid))

    def locate(self, index: np.ndarray) -> Location:
        """Where the rows with this index lie."""
        slots = index % self.ring.n_slots
        return Location(slots, self.memory.locate(slots))

    def actions(self, at: Location) -> Tree:
        """The actions [*slots, ...]."""
        return map_tree(lambda column: column.take(at.located), self.action)

    def values(self, array: np.ndarray, at: Location) -> Tensor:
        """The values [*slots] of an array [L, B], such as `reward`."""
        return self.memory.send(array.reshape(-1).take(at.slots))

    def inputs(self, at: Location) -> AgentInputs:
        """The agent's inputs [*slots] at these rows."""
        return self._with_previous(map_tree(lambda part: part.read(at), self.observation), at)

    def inputs_pair(self, at: Location, after: Location) -> tuple[AgentInputs, AgentInputs]:
        """The agent's inputs at valid rows [n], and at the rows after them."""
        if isinstance(self.observation, ObservationStorage):  # the usual case; a tree costs 3 us
            one, other = self.observation.read_pair(at, after)
        else:
            pairs = {part: part.read_pair(at, after) for part in self._observations}
            one = map_tree(lambda part: pairs[part][0], self.observation)
            other = map_tree(lambda part: pairs[part][1], self.observation)
        return self._with_previous(one, at), self._with_previous(other, after)

    def _with_previous(self, observation: Tree, at: Location) -> AgentInputs:
        if not self.previous:
            null = self._nulls.get(at.slots.shape) or self._make_null(at.slots.shape)
            return AgentInputs(observation, null.prev_action, null.prev_reward, null.first)
        before = self.locate(at.slots - self.ring.B)
        reward, first = self.values(self.reward, before), self.values(self.first, at)
        return AgentInputs(observation, self.actions(before), reward, first)

    def _make_null(self, lead: tuple[int, ...]) -> AgentInputs:
        if len(self._nulls) > 16:
            self._nulls.clear()
        made = self._nulls[lead] = self._null.map(lambda x: x.expand(*lead, *x.shape[1:]))
        return made

    def state_dict(self) -> dict[str, Any]:
        """All rows; arrays are views where possible, valid until the next `append`."""
        n = self.ring.n_used
        return {
            "t": self.ring.t,
            "n_rows": self.n_rows,
            "observation": [part.state_dict(n) for part in self._observations],
            "action": [column.saved(n) for column in self._columns],
            "last": self._last,
            **{name: vars(self)[name][:n] for name in _ARRAYS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a storage of the same shapes."""
        self.ring.t, self.n_rows = state["t"], state["n_rows"]
        for part, saved in zip(self._observations, state["observation"], strict=True):
            part.load_state_dict(saved)
        for column, saved in zip(self._columns, state["action"], strict=True):
            column.load(saved)
        for array, saved in zip(self._last, state["last"], strict=True):
            array[...] = saved
        for name in _ARRAYS:
            vars(self)[name][: len(state[name])] = state[name]


class _Arrays(NamedTuple):
    """The leaves of AgentInputs. Looping over a Struct would double the time of appending a single row."""

    observation: list[np.ndarray]
    prev_action: list[np.ndarray]
    prev_reward: list[np.ndarray]
    first: list[np.ndarray]


def _arrays(own: AgentInputs, inputs: AgentInputs) -> _Arrays:
    return _Arrays(
        _leaves(own.observation, inputs.observation),
        _leaves(own.prev_action, inputs.prev_action),
        [as_numpy(inputs.prev_reward)],
        [as_numpy(inputs.first)],
    )


def _leaves(own: Tree, tree: Tree) -> list[np.ndarray]:
    """Leaves in the order of `own`; the keys of a dict may come in another order."""
    if isinstance(own, np.ndarray):
        return [as_numpy(tree)]
    found: list[np.ndarray] = []
    map_tree(lambda _, x: found.append(as_numpy(x)), own, tree)
    return found


def _flat(arrays: _Arrays) -> list[np.ndarray]:
    return [x for part in arrays for x in part]


def _starts_with(rows: np.ndarray, row: np.ndarray, ignored: np.ndarray) -> bool:
    """Whether rows[0] equals `row`, except in the environments `ignored` [B] bool."""
    same = np.ascontiguousarray(rows[0]).view(np.uint8) == row.view(np.uint8)
    return bool((same.reshape(len(ignored), -1).all(1) | ignored).all())
