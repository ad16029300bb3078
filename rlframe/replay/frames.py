"""How one part of the observations is kept: as rows, or as frames that are each kept once and stacked when read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rlframe.core.spaces import FrameStack
from rlframe.replay.columns import Memory, Ring, write_rows


class At(NamedTuple):
    """Rows in the ring, [n] or [L, n]."""

    slots: np.ndarray
    located: Any  # see Memory.locate


class Kept(ABC):
    """One leaf of the observations of a ring."""

    rows_before: int  # how many rows before one are needed to read it

    @abstractmethod
    def begin(self, time: int, row: np.ndarray) -> None:
        """Write the row [B, ...] at `time`, which follows no other; what it needs goes into the rows_before."""

    @abstractmethod
    def extend(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
        """Write rows 1..T of [T+1, B, ...]; row 0 is at `time` already.

        Args:
            reset: [T, B] bool: rows 1..T that begin an episode by a reset.
        """

    @abstractmethod
    def read(self, at: At) -> Tensor:
        """[*slots, ...]."""

    @abstractmethod
    def read_pair(self, at: At, after: At) -> tuple[Tensor, Tensor]:
        """Of rows [n] that are valid, and of the rows after them; they may share memory."""

    @abstractmethod
    def state_dict(self, n_used: int) -> dict[str, Any]:
        """The first n_used time steps of the ring; views where that is possible."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""


class Rows(Kept):
    """As they are."""

    rows_before = 0

    def __init__(self, ring: Ring, memory: Memory, example: np.ndarray) -> None:
        """`example`: a single row."""
        self._column = memory.column(ring.L, ring.B, example.shape, example.dtype)

    def begin(self, time: int, row: np.ndarray) -> None:
        self._column.write(time, row[None])

    def extend(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
        self._column.write(time + 1, rows[1:])

    def read(self, at: At) -> Tensor:
        return self._column.take(at.located)

    def read_pair(self, at: At, after: At) -> tuple[Tensor, Tensor]:
        return self._column.take(at.located), self._column.take(after.located)

    def state_dict(self, n_used: int) -> dict[str, Any]:
        return {"rows": self._column.held(n_used)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._column.load(state["rows"])


class Frames(Kept):
    """The newest frame of each row. Stacks are rebuilt within an episode and padded at its reset as they came.

    A lost life is no reset: stacks go on. ALE pads with black frames, Gymnasium's FrameStackObservation with the first
    frame or with black ones; which it was is found out at each reset.
    """

    def __init__(self, ring: Ring, memory: Memory, space: FrameStack) -> None:
        self._ring, self._memory, self._n = ring, memory, space.n_frames
        self.rows_before = self._n - 1
        self._frame = (space.shape[0] // self._n, *space.shape[1:])  # [channels, H, W]
        self._black = ring.n_slots  # a slot behind the ring, that stays zero
        self._frames = memory.column(ring.L, ring.B, self._frame, np.uint8, by_env=True, more=1)
        # Frames of the episode before the row's own, at most n - 1: a; or -1 - a if those that lack are black.
        self._age = np.zeros((ring.L, ring.B), np.int8)
        self._age_of = self._age.reshape(-1)
        self._back = np.arange(self._n - 1, -2, -1)  # from a row to the frames of its stack, and to the next

    def begin(self, time: int, row: np.ndarray) -> None:
        B, n = self._ring.B, self._n
        frames = row.reshape(B, n, *self._frame)
        self._frames.write(time - n + 1, np.ascontiguousarray(frames.swapaxes(0, 1)))
        write_rows(self._age, time, np.full((1, B), n - 1, np.int8))  # the rows before hold true frames

    def extend(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
        T, n = len(reset), self._n
        stacks = rows.reshape(T + 1, self._ring.B, n, *self._frame)
        black = check_stacks(stacks, reset)
        self._frames.write(time + 1, stacks[1:, :, -1])
        age = self._age[time % self._ring.L]
        if (age == n - 1).all() and not reset.any():
            ages = np.full(reset.shape, n - 1, np.int8)
        else:
            ages = _ages(age, reset, black, n)
        write_rows(self._age, time + 1, ages)

    def read(self, at: At) -> Tensor:
        return self._stacks(at.slots, self._n).view(*at.slots.shape, -1, *self._frame[1:])

    def read_pair(self, at: At, after: At) -> tuple[Tensor, Tensor]:
        """Each frame is fetched once; both stacks are views of them."""
        channels = self._frame[0]
        frames = self._stacks(at.slots, self._n + 1).view(len(at.slots), -1, *self._frame[1:])
        return frames[:, :-channels], frames[:, channels:]

    def _stacks(self, slots: np.ndarray, length: int) -> Tensor:
        """`length` frames from the oldest of the rows' stacks on: [*slots, length, channels, H, W]."""
        place, env = np.divmod(slots, self._ring.B)
        place, start, age = place[..., None], (env * self._ring.L)[..., None], self._age_of.take(slots)
        back = self._back[:length]
        if age.min() == self._n - 1:  # nearly always
            frames = (place - back) % self._ring.L + start
        else:
            held = np.where(age < 0, -1 - age, age).astype(np.int64)[..., None]
            frames = (place - np.minimum(back, held)) % self._ring.L + start
            frames[(age < 0)[..., None] & (back > held)] = self._black
        return self._frames.take(self._memory.locate(frames))

    def state_dict(self, n_used: int) -> dict[str, Any]:
        return {"frames": self._frames.held(n_used), "age": self._age[:n_used]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frames.load(state["frames"])
        self._age[: len(state["age"])] = state["age"]


def check_stacks(stacks: np.ndarray, reset: np.ndarray) -> np.ndarray:
    """Whether stacks can be rebuilt from their newest frames; which resets have black frames before the first one.

    Args:
        stacks: [T+1, B, n, ...] uint8.    reset: [T, B] bool, of rows 1..T.
    Returns:
        black [T, B] bool.
    Raises:
        ValueError: a stack goes on from another than the row before, or is padded in another way.
    """
    words = _words(stacks)  # [T+1, B, n, words of a frame]
    shifts = (words[1:, :, :-1] == words[:-1, :, 1:]).reshape(*reset.shape, -1).all(axis=-1)
    wrong = ~(shifts | reset)
    if wrong.any():
        t, env = np.argwhere(wrong)[0]
        raise ValueError(
            f"environment {env}: the observation of step {t} is no stack that goes on from the one before; give its "
            f"space as gymnasium.spaces.Box instead of FrameStack, and replay keeps whole observations"
        )
    black = np.zeros_like(reset)
    for t, env in np.argwhere(reset):
        older, first = words[t + 1, env, :-1], words[t + 1, env, -1]
        black[t, env] = not older.any()
        if not black[t, env] and not (older == first).all():
            raise ValueError(
                f"environment {env}: the stack of a reset is padded neither with black frames nor with its first "
                f"frame; give its space as gymnasium.spaces.Box instead of FrameStack, and replay keeps whole "
                f"observations"
            )
    return black


def _words(stacks: np.ndarray) -> np.ndarray:
    """Frames flat, in as wide numbers as they divide into: comparing 84x84 takes an eighth of the time."""
    flat = np.ascontiguousarray(stacks).reshape(*stacks.shape[:3], -1)
    return flat.view(np.int64) if flat.shape[-1] % 8 == 0 else flat


def _ages(age: np.ndarray, reset: np.ndarray, black: np.ndarray, n: int) -> np.ndarray:
    """What Frames keeps of rows 1..T, from row 0's [B]: [T, B] int8."""
    ages = np.empty(reset.shape, np.int8)
    for t in range(len(reset)):
        is_black = age < 0
        older = np.minimum(np.where(is_black, -1 - age, age) + 1, n - 1)
        age = np.where(is_black & (older < n - 1), -1 - older, older)
        age = ages[t] = np.where(reset[t], np.where(black[t], -1, 0), age)
    return ages
