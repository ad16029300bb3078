"""The rows that replay holds, in a ring: written a batch at a time, read anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, Samples
from rlframe.replay.columns import Column, Memory, Ring, spans, write_rows
from rlframe.replay.frames import At, Kept

_FLAGS = ("reward", "terminated", "truncated", "valid", "first")


class Storage:
    """Copies of batches. Row `ring.t`, the end of the newest, is readable too, for all but its action and what follows.

    Batches that do not go on where the last one ended (after a resume, or where one was lost) are told: the row that
    was to go on becomes an episode's last observation, its episode truncated, and time skips a few rows, not valid.
    """

    def __init__(self, ring: Ring, memory: Memory, observation: Tree, example: AgentInputs, previous: bool) -> None:
        """Args:
        observation: tree of `Kept`.    example: NumPy zeros [B], of what batches hold.
        previous: whether true prev_action, prev_reward and first are read; else null ones.
        """
        self.ring, self.memory, self.observation, self.previous = ring, memory, observation, previous
        self.rows_before = max([int(previous), *(leaf.rows_before for leaf in leaves(observation))])
        L, B = ring.L, ring.B
        self.action = map_tree(lambda x: memory.column(L, B, x.shape[1:], x.dtype), example.prev_action)
        self.reward = np.zeros((L, B), np.float32)
        self.terminated, self.truncated, self.valid, self.first = (np.zeros((L, B), np.bool_) for _ in range(4))
        self.n_rows = 0  # valid ones
        self.last = example.map(np.copy)  # where the next batch starts
        self._kept: list[Kept] = leaves(observation)
        self._columns: list[Column] = leaves(self.action)
        self._last: list[np.ndarray] = leaves(self.last)
        self._null = replace(example, observation=()).map(lambda x: memory.send(x[:1].copy()))
        self._nulls: dict[tuple[int, ...], AgentInputs] = {}

    def append(self, samples: Samples) -> int:
        """Copy a batch; returns the time of its row 0.

        Raises:
            ValueError: its stacks of frames cannot be rebuilt (see Frames), or B differs.
        """
        inputs, action = _arrays(self.last, samples.inputs), _leaves(self.last.prev_action, samples.action)
        reward, terminated, truncated, valid = (
            as_numpy(x) for x in (samples.reward, samples.terminated, samples.truncated, samples.valid)
        )
        self._check(valid)
        if not self.ring.t or not self._goes_on(inputs):
            self._begin(inputs)
        start, T, reset = self.ring.t, len(valid), ~valid
        for kept, rows in zip(self._kept, inputs.observation, strict=True):
            kept.extend(start, rows, reset)
        self._forget(start + 1, T)
        if reset[0].any():
            self._truncate(start - 1, reset[0])  # without an end where a worker died between batches
        self._write(start, action, reward, terminated, truncated, valid)
        write_rows(self.first, start + 1, inputs.first[0][1:])
        for to, rows in zip(self._last, _flat(inputs), strict=True):
            to[...] = rows[-1]
        self.ring.t = start + T
        return start

    def _check(self, valid: np.ndarray) -> None:
        T, (L, B) = len(valid), (self.ring.L, self.ring.B)
        if valid.shape != (T, B) or T + 2 * self.rows_before + 2 > L:
            raise ValueError(f"a batch of {list(valid.shape)} rows [T, B] does not fit replay of {[L, B]}")

    def _goes_on(self, inputs: _Arrays) -> bool:
        """Whether row 0 is the last one, bit by bit, so that NaN is NaN."""
        if all(rows[0].tobytes() == row.tobytes() for rows, row in zip(_flat(inputs), self._last, strict=True)):
            return True
        began = self.last.first & inputs.first[0][0]  # an episode: whoever reads the row nulls what came before
        anywhere = np.zeros_like(began)
        last = _arrays(self.last, self.last)
        return all(
            _begins_with(rows, row, but)
            for part, before, but in zip(inputs, last, (anywhere, began, began, anywhere), strict=True)
            for rows, row in zip(part, before, strict=True)
        )

    def _begin(self, inputs: _Arrays) -> None:
        """Make row `ring.t` the batch's row 0, after rows for what it needs of those before it."""
        ring, n = self.ring, self.rows_before
        time = ring.t
        if time:
            self._truncate(time - 1, np.ones(ring.B, np.bool_))
            n += 1
        self._forget(time + 1, n)
        no = np.zeros((n, ring.B), np.bool_)
        action = [np.zeros((n, *x.shape[1:]), x.dtype) for x in inputs.prev_action]
        reward = no.astype(np.float32)
        for to, rows in zip([*action, reward], [*inputs.prev_action, *inputs.prev_reward], strict=True):
            to[-1:] = rows[0]
        self._write(time, action, reward, no, no, no)
        ring.t = time + n
        for kept, rows in zip(self._kept, inputs.observation, strict=True):
            kept.begin(ring.t, rows[0])
        write_rows(self.first, ring.t, inputs.first[0][:1])

    def _truncate(self, time: int, envs: np.ndarray) -> None:
        """Where the row is an episode's and did not end it; `envs` [B] bool."""
        place = time % self.ring.L
        self.truncated[place] |= envs & self.valid[place] & ~self.terminated[place]

    def _forget(self, start: int, n: int) -> None:
        """The rows that are about to be overwritten by those of n times from `start` on."""
        for places, _ in spans(start, n, self.ring.L):
            self.n_rows -= int(np.count_nonzero(self.valid[places]))
            self.valid[places] = False

    def _write(
        self,
        time: int,
        action: list[np.ndarray],
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
    ) -> None:
        if not len(valid):
            return
        for column, rows in zip(self._columns, action, strict=True):
            column.write(time, rows)
        for places, part in spans(time, len(valid), self.ring.L):
            self.reward[places], self.terminated[places] = reward[part], terminated[part]
            self.truncated[places], self.valid[places] = truncated[part], valid[part]
        self.n_rows += int(np.count_nonzero(valid))

    def at(self, numbers: np.ndarray) -> At:
        """Rows with these numbers."""
        slots = numbers % self.ring.n_slots
        return At(slots, self.memory.locate(slots))

    def actions(self, at: At) -> Tree:
        """The actions [*slots, ...]."""
        return map_tree(lambda column: column.take(at.located), self.action)

    def flags(self, array: np.ndarray, at: At) -> Tensor:
        """Of one of the NumPy arrays here, [*slots]."""
        return self.memory.send(array.reshape(-1).take(at.slots))

    def inputs(self, at: At) -> AgentInputs:
        """What the agent sees at these rows."""
        return self._with(map_tree(lambda kept: kept.read(at), self.observation), at)

    def inputs_pair(self, at: At, after: At) -> tuple[AgentInputs, AgentInputs]:
        """At valid rows [n], and at the rows after them."""
        if isinstance(self.observation, Kept):  # the usual case; a tree costs 3 us
            one, other = self.observation.read_pair(at, after)
        else:
            pairs = map_tree(lambda kept: _Pair(*kept.read_pair(at, after)), self.observation)
            one, other = map_tree(lambda pair: pair.one, pairs), map_tree(lambda pair: pair.other, pairs)
        return self._with(one, at), self._with(other, after)

    def _with(self, observation: Tree, at: At) -> AgentInputs:
        if not self.previous:
            null = self._nulls.get(at.slots.shape) or self._make_null(at.slots.shape)
            return AgentInputs(observation, null.prev_action, null.prev_reward, null.first)
        before = self.at(at.slots - self.ring.B)
        return AgentInputs(
            observation, self.actions(before), self.flags(self.reward, before), self.flags(self.first, at)
        )

    def _make_null(self, lead: tuple[int, ...]) -> AgentInputs:
        if len(self._nulls) > 16:
            self._nulls.clear()
        made = self._nulls[lead] = self._null.map(lambda x: x.expand(*lead, *x.shape[1:]))
        return made

    def state_dict(self) -> dict[str, Any]:
        """All rows; arrays are views where that is possible, valid until the next `append`."""
        n = self.ring.n_used
        return {
            "t": self.ring.t,
            "n_rows": self.n_rows,
            "observation": [kept.state_dict(n) for kept in leaves(self.observation)],
            "action": [column.held(n) for column in leaves(self.action)],
            "last": leaves(self.last),
            **{name: array[:n] for name, array in zip(_FLAGS, self._flags(), strict=True)},
        }

    def _flags(self) -> tuple[np.ndarray, ...]:
        return self.reward, self.terminated, self.truncated, self.valid, self.first

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a storage of the same shapes."""
        self.ring.t, self.n_rows = state["t"], state["n_rows"]
        for kept, saved in zip(leaves(self.observation), state["observation"], strict=True):
            kept.load_state_dict(saved)
        for column, saved in zip(leaves(self.action), state["action"], strict=True):
            column.load(saved)
        for array, saved in zip(leaves(self.last), state["last"], strict=True):
            array[...] = saved
        for name, array in zip(_FLAGS, self._flags(), strict=True):
            array[: len(state[name])] = state[name]


class _Pair:
    """A leaf of two tensors."""

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.one, self.other = one, other


class _Arrays(NamedTuple):
    """The leaves of AgentInputs. Loops over a Struct would double the time that appending a single row takes."""

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
    """In the order of our own tree: keys of a dict may come in another one."""
    if isinstance(own, np.ndarray):
        return [as_numpy(tree)]
    found: list[np.ndarray] = []
    map_tree(lambda _, x: found.append(as_numpy(x)), own, tree)
    return found


def _flat(arrays: _Arrays) -> list[np.ndarray]:
    return [x for part in arrays for x in part]


def _begins_with(rows: np.ndarray, row: np.ndarray, but: np.ndarray) -> bool:
    """Whether rows[0] is `row`, but for some environments [B]."""
    same = np.ascontiguousarray(rows[0]).view(np.uint8) == row.view(np.uint8)
    return bool((same.reshape(len(but), -1).all(1) | but).all())
