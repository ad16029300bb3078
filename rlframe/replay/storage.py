"""The rows of one stream in a replay: a ring that is written one batch at a time and read at any row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, Array, Samples
from rlframe.replay.arrays import Ring, RowArray, StorageMemory, read_rows, spans, write_rows
from rlframe.replay.frames import ObservationStorage

_ARRAYS = ("reward", "terminated", "truncated", "valid", "first")
_ROWS_AT_ONCE = 1024  # that are looked through


class Storage:
    """Copies of batches. Row `ring.t`, the end of the newest, is readable too, except for its action and outcome.

    If a batch does not start where the last one ended (after a resume, or where a batch was lost), the open episodes
    are truncated: the last row becomes their last observation, and a few invalid rows separate the batches.
    """

    def __init__(
        self, ring: Ring, memory: StorageMemory, observation: Tree, example: AgentInputs, previous: bool
    ) -> None:
        """Args:
        observation: tree of `ObservationStorage`.    example: NumPy zeros [B], shaped as the batches' rows.
        previous: whether prev_action, prev_reward and first are read; else they are null.
        """
        self.ring, self.memory, self.observation, self.previous = ring, memory, observation, previous
        self.rows_before = max([int(previous), *(leaf.rows_before for leaf in leaves(observation))])
        L, B = ring.L, ring.B
        self.action = map_tree(lambda x: memory.array(L, B, x.shape[1:], x.dtype), example.prev_action)
        self.reward = memory.zeros((L, B), np.float32)
        self.terminated, self.truncated, self.valid, self.first = (memory.zeros((L, B), np.bool_) for _ in range(4))
        self.n_rows = 0  # valid rows; on a device about as many
        self.end = 0  # time of row `ring.t` in its stream
        self.may_be_absent = False  # some rows of the newest batch; unknown on a device
        self._gaps = False  # some rows of any batch
        self.example = example
        self._observations: list[ObservationStorage] = leaves(observation)
        self._actions: list[RowArray] = leaves(self.action)
        self._null = replace(example, observation=()).map(lambda x: memory.send(x[:1].copy()))
        self._nulls: dict[tuple[int, ...], AgentInputs] = {}

    def append(self, samples: Samples) -> int:
        """Copy a batch; returns the time of its row 0.

        Raises:
            ValueError: B differs, T is too large, or stacks of frames cannot be rebuilt (see Frames).
        """
        own, valid = self.memory.own, samples.valid
        T, (L, B) = len(valid), (self.ring.L, self.ring.B)
        if valid.shape != (T, B) or T + 2 * self.rows_before + 2 > L:
            raise ValueError(f"a batch of [T, B] = {list(valid.shape)} does not fit a replay of [L, B] = {[L, B]}")
        inputs, action = samples.inputs, _leaves(self.example.prev_action, samples.action)
        observation = _leaves(self.example.observation, inputs.observation)
        outcome = own(samples.reward), own(samples.terminated), own(samples.truncated), own(valid)
        if not self.ring.t or samples.start != self.end:
            self._start_anew(inputs, observation)
        start, first, kept = self.ring.t, own(inputs.first)[1:], outcome[-1]
        for part, rows in zip(self._observations, observation, strict=True):
            part.append(start, rows, valid, inputs.first)
        self._invalidate(start + 1, T)
        self.may_be_absent = samples.n_rows != T * B and _may_be_absent(valid, inputs.first)
        self._gaps |= self.may_be_absent
        if samples.n_rows != T * B:
            self._end_interrupted(start, kept, first)
        self._write(start, action, outcome)
        write_rows(self.first, start + 1, first)
        self.ring.t, self.end = start + T, samples.start + T
        if self.memory.on_device:
            self.n_rows = min(self.n_rows + samples.n_rows, self.ring.n_slots)
        return start

    def _start_anew(self, inputs: AgentInputs, observation: list[Array]) -> None:
        """Make row `ring.t` the batch's row 0, preceded by invalid rows with what it needs of the rows before it."""
        ring, n, memory = self.ring, self.rows_before, self.memory
        time = ring.t
        if time:
            self._truncate_newest(time - 1, np.ones(ring.B, np.bool_))
            n += 1
        self._invalidate(time + 1, n)
        no, reward = memory.zeros((n, ring.B), np.bool_), memory.zeros((n, ring.B), np.float32)
        action = [memory.zeros((n, *x.shape), x.dtype) for x in leaves(self.example.prev_action)]
        before = [*_leaves(self.example.prev_action, inputs.prev_action), inputs.prev_reward]
        for to, rows in zip([*action, reward], before, strict=True):
            to[-1:] = memory.own(rows[0])
        self._write(time, action, (reward, no, no, no))
        ring.t = time + n
        for part, rows in zip(self._observations, observation, strict=True):
            part.write_first(ring.t, rows[0])
        write_rows(self.first, ring.t, memory.own(inputs.first[:1]))

    def _end_interrupted(self, start: int, valid: Array, first: Array) -> None:
        """Truncate the episodes that nothing ended before a reset: their worker died between the batches."""
        if self.memory.on_device:
            self._truncate_unseen(start - 1, (~valid.cumsum(0).bool() & first).any(0))
        elif (reset := (~np.logical_or.accumulate(valid) & first).any(0)).any():  # before they acted
            self._truncate_newest(start - 1, reset)

    def _truncate_unseen(self, time: int, envs: Array) -> None:
        """`_truncate_newest` on a device, where nobody looks at values: over at most _ROWS_AT_ONCE rows."""
        n = min(time + 1 - self.ring.oldest, _ROWS_AT_ONCE if self._gaps else 1)
        if n < 1:
            return
        start = time + 1 - n
        valid, terminated, truncated = (
            read_rows(array, start, n) for array in (self.valid, self.terminated, self.truncated)
        )
        ends = valid | read_rows(self.first, start + 1, n)
        newest = ends & (ends.flip(0).cumsum(0).flip(0) == 1)
        write_rows(self.truncated, start, truncated | (newest & envs & valid & ~terminated))

    def _truncate_newest(self, time: int, envs: np.ndarray) -> None:
        """Truncate the open episodes of `envs` [B] bool at the newest rows, up to this time, in which they acted."""
        while time >= self.ring.oldest and envs.any():
            n = min(time + 1 - self.ring.oldest, _ROWS_AT_ONCE)
            acted = as_numpy(read_rows(self.valid, time + 1 - n, n))
            ends = (acted | as_numpy(read_rows(self.first, time + 2 - n, n))) & envs
            age, found = ends[::-1].argmax(0), ends.any(0)
            for back in np.unique(age[found]).tolist():
                place, its = (time - back) % self.ring.L, self.memory.own(found & (age == back))
                self.truncated[place] |= its & self.valid[place] & ~self.terminated[place]
            envs, time = envs & ~found, time - n

    def _invalidate(self, start: int, n: int) -> None:
        """Mark the rows as not valid that n time steps starting at `start` are about to overwrite."""
        for places, _ in spans(start, n, self.ring.L):
            self.n_rows -= self._count(self.valid[places])
            self.valid[places] = False

    def _count(self, valid: Array) -> int:
        return 0 if self.memory.on_device else int(np.count_nonzero(valid))

    def _write(self, time: int, action: list[Array], outcome: tuple[Array, ...]) -> None:
        """`outcome`: reward, terminated, truncated and valid."""
        reward, terminated, truncated, valid = outcome
        if not len(valid):
            return
        for array, rows in zip(self._actions, action, strict=True):
            array.write(time, rows)
        for places, part in spans(time, len(valid), self.ring.L):
            self.reward[places], self.terminated[places] = reward[part], terminated[part]
            self.truncated[places], self.valid[places] = truncated[part], valid[part]
        self.n_rows += self._count(valid)

    def locate(self, index: Array) -> Array:
        """The slots of the rows with this index, in the memory's own kind of array."""
        return index % self.ring.n_slots

    def actions(self, at: Array) -> Tree:
        """The actions [*at, ...] of the slots `at`."""
        return map_tree(lambda array: array.take(at), self.action)

    def values(self, array: Array, at: Array) -> Tensor:
        """The values [*at] of an array [L, B], such as `reward`."""
        return self.memory.rows(array.reshape(-1), at)

    def outcomes(self, time: int, n: int) -> list[Array]:
        """Rewards, `terminated`, `truncated` and `valid` [n, B] of n time steps starting at `time`."""
        return [read_rows(array, time, n) for array in (self.reward, self.terminated, self.truncated, self.valid)]

    def inputs(self, at: Array) -> AgentInputs:
        """The agent's inputs [*at] at these rows."""
        return self._with_previous(map_tree(lambda part: part.read(at), self.observation), at)

    def inputs_pair(self, at: Array, after: Array) -> tuple[AgentInputs, AgentInputs]:
        """The agent's inputs at valid rows [n], and at the rows after them."""
        if isinstance(self.observation, ObservationStorage):  # the usual case; a tree costs 3 us
            one, other = self.observation.read_pair(at, after)
        else:
            pairs = {part: part.read_pair(at, after) for part in self._observations}
            one = map_tree(lambda part: pairs[part][0], self.observation)
            other = map_tree(lambda part: pairs[part][1], self.observation)
        return self._with_previous(one, at), self._with_previous(other, after)

    def _with_previous(self, observation: Tree, at: Array) -> AgentInputs:
        if not self.previous:
            null = self._nulls.get(at.shape) or self._make_null(at.shape)
            return AgentInputs(observation, null.prev_action, null.prev_reward, null.first)
        before = self.locate(at - self.ring.B)
        reward, first = self.values(self.reward, before), self.values(self.first, at)
        return AgentInputs(observation, self.actions(before), reward, first)

    def _make_null(self, lead: tuple[int, ...]) -> AgentInputs:
        if len(self._nulls) > 16:
            self._nulls.clear()
        made = self._nulls[lead] = self._null.map(lambda x: x.expand(*lead, *x.shape[1:]).contiguous())
        return made

    def state_dict(self) -> dict[str, Any]:
        """All rows; arrays are views where possible, valid until the next `append`."""
        n = self.ring.n_used
        return {
            "t": self.ring.t,
            "end": self.end,
            "n_rows": self.n_rows,
            "observation": [part.state_dict(n) for part in self._observations],
            "action": [array.saved(n) for array in self._actions],
            **{name: as_numpy(vars(self)[name][:n]) for name in _ARRAYS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a storage of the same shapes."""
        self.ring.t, self.end, self.n_rows = state["t"], state["end"], state["n_rows"]
        self._gaps = True  # it is not known
        for part, saved in zip(self._observations, state["observation"], strict=True):
            part.load_state_dict(saved)
        for array, saved in zip(self._actions, state["action"], strict=True):
            array.load(saved)
        for name in _ARRAYS:
            vars(self)[name][: len(state[name])] = self.memory.own(state[name])


def _may_be_absent(valid: Array, first: Array) -> bool:
    """Whether rows of a batch are absent, by its flags [T, B] and [T+1, B]; those of a device are not looked at."""
    if isinstance(valid, Tensor) and not valid.is_cpu:
        return True
    return bool((~as_numpy(valid) & ~as_numpy(first)[1:]).any())


def _leaves(own: Tree, tree: Tree) -> list[Array]:
    """Leaves in the order of `own`; the keys of a dict may come in another order."""
    if isinstance(own, np.ndarray):
        return [tree]
    found: list[Array] = []
    map_tree(lambda _, x: found.append(x), own, tree)
    return found
