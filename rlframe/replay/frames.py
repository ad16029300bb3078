"""How replay stores observations: as whole rows, or frame by frame, from which stacks are rebuilt when read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import FrameStack
from rlframe.record.codec import ChunkedArray, iter_chunks
from rlframe.replay.columns import ColumnMemory, Ring, write_rows


class Location(NamedTuple):
    """Where rows lie in the ring: [n] or [L, n]."""

    slots: np.ndarray
    located: Any  # the slots for `Column.take`, see Memory.locate


class ObservationStorage(ABC):
    """Stores one leaf of the observations."""

    rows_before: int  # number of earlier rows that are needed to read a row
    name: ClassVar[str]  # in snapshots

    @abstractmethod
    def write_first(self, time: int, row: np.ndarray) -> None:
        """Write the row [B, ...] at `time`, which follows no other row, and what it needs into the rows_before."""

    @abstractmethod
    def append(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
        """Write rows 1..T of [T+1, B, ...]; row 0 is stored at `time` already. `reset` [T, B]: as in check_stacks."""

    @abstractmethod
    def read(self, at: Location) -> Tensor:
        """Observations [*slots, ...]."""

    def read_pair(self, at: Location, after: Location) -> tuple[Tensor, Tensor]:
        """Observations of valid rows [n] and of the rows after them; both may share memory."""
        return self.read(at), self.read(after)

    @abstractmethod
    def state_dict(self, n_used: int) -> dict[str, Any]:
        """The first n_used time steps of the ring; views where possible."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class WholeRows(ObservationStorage):
    """Whole observations."""

    rows_before = 0
    name = "Rows"

    def __init__(self, ring: Ring, memory: ColumnMemory, example: np.ndarray) -> None:
        """`example`: a single row."""
        self._column = memory.column(ring.L, ring.B, example.shape, example.dtype)

    def write_first(self, time: int, row: np.ndarray) -> None:
        self._column.write(time, row[None])

    def append(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
        self._column.write(time + 1, rows[1:])

    def read(self, at: Location) -> Tensor:
        return self._column.take(at.located)

    def state_dict(self, n_used: int) -> dict[str, Any]:
        return {"rows": self._column.saved(n_used)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._column.load(state["rows"])


class Frames(ObservationStorage):
    """The newest frame of each row. Stacks are rebuilt within an episode, padded at its start as they were.

    A lost life is no reset: its stacks continue. ALE pads with black frames, Gymnasium's FrameStackObservation with
    black frames or copies of the first one; which of the two is detected at each reset.
    """

    name = "Frames"

    def __init__(self, ring: Ring, memory: ColumnMemory, space: FrameStack) -> None:
        self._ring, self._memory, self._n = ring, memory, space.n_frames
        self.rows_before = self._n - 1
        self._frame = (space.shape[0] // self._n, *space.shape[1:])  # [channels, H, W]
        self._black = ring.n_slots  # the slot after the ring, which stays zero
        self._frames = memory.column(ring.L, ring.B, self._frame, np.uint8, by_env=True, extra=1)
        # Number a of the episode's frames before the row's own, at most n - 1; stored as -1 - a if padded with black.
        self._age = np.zeros((ring.L, ring.B), np.int8)
        self._flat_age = self._age.reshape(-1)
        self._back = np.arange(self._n - 1, -2, -1)  # offsets from a row to the frames of its stack and of the next one

    def write_first(self, time: int, row: np.ndarray) -> None:
        B, n = self._ring.B, self._n
        frames = row.reshape(B, n, *self._frame)
        self._frames.write(time - n + 1, np.ascontiguousarray(frames.swapaxes(0, 1)))
        write_rows(self._age, time, np.full((1, B), n - 1, np.int8))  # the rows before it hold its older frames

    def append(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
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

    def read(self, at: Location) -> Tensor:
        return self._stacks(at.slots, self._n).view(*at.slots.shape, -1, *self._frame[1:])

    def read_pair(self, at: Location, after: Location) -> tuple[Tensor, Tensor]:
        """Fetches each frame once; both stacks are views of them."""
        channels = self._frame[0]
        frames = self._stacks(at.slots, self._n + 1).view(len(at.slots), -1, *self._frame[1:])
        return frames[:, :-channels], frames[:, channels:]

    def _stacks(self, slots: np.ndarray, length: int) -> Tensor:
        """`length` frames from the oldest of each row's stack on: [*slots, length, channels, H, W]."""
        place, env = np.divmod(slots, self._ring.B)
        place, start, age = place[..., None], (env * self._ring.L)[..., None], self._flat_age.take(slots)
        back = self._back[:length]
        if age.min() == self._n - 1:  # nearly always
            frames = (place - back) % self._ring.L + start
        else:
            held = np.where(age < 0, -1 - age, age).astype(np.int64)[..., None]
            frames = (place - np.minimum(back, held)) % self._ring.L + start
            frames[(age < 0)[..., None] & (back > held)] = self._black
        return self._frames.take(self._memory.locate(frames))

    def state_dict(self, n_used: int) -> dict[str, Any]:
        return {"frames": self._frames.saved(n_used), "age": self._age[:n_used]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frames.load(state["frames"])
        self._age[: len(state["age"])] = state["age"]


_CHUNK_BLOCKS = 4096  # compressed blocks in one chunk of a snapshot


class CompressedFrames(ObservationStorage):
    """As Frames, compressed without loss by lz4 (the extra `lz4`), in about a tenth of the memory.

    One block holds a row's stack and the next row's newest frame, so that reading a transition is one call: five
    similar frames together take little more than twice the time of one.
    """

    rows_before = 0

    name = "CompressedFrames"

    def __init__(self, ring: Ring, memory: ColumnMemory, space: FrameStack) -> None:
        try:
            from lz4 import block  # an optional extra
        except ImportError:
            raise ConfigError('algo.replay.compress=true needs lz4: pip install "rlframe[lz4]"') from None
        self._lz4_compress, self._lz4_decompress = block.compress, block.decompress
        self._ring, self._memory, self._n = ring, memory, space.n_frames
        self._frame = (space.shape[0] // self._n, *space.shape[1:])  # [channels, H, W]
        self._block = np.zeros((self._n + 1, *self._frame), np.uint8)  # the frames to compress
        self._blocks: list[bytes] = [b""] * ring.n_slots
        self._digests = [""] * -(-ring.n_slots // _CHUNK_BLOCKS)  # of ChunkedArray; reset where a block changes

    def write_first(self, time: int, row: np.ndarray) -> None:
        for env, stack in enumerate(row.reshape(-1, self._n, *self._frame)):
            self._compress(time, env, stack, np.zeros(self._frame, np.uint8))

    def append(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
        stacks = rows.reshape(*rows.shape[:2], self._n, *self._frame)
        check_stacks(stacks, reset)
        for t in range(len(reset)):
            for env in range(self._ring.B):
                self._compress(time + t, env, stacks[t, env], stacks[t + 1, env, -1])
        self.write_first(time + len(reset), rows[-1])

    def _compress(self, time: int, env: int, stack: np.ndarray, newest: np.ndarray) -> None:
        self._block[:-1], self._block[-1] = stack, newest
        slot = time % self._ring.L * self._ring.B + env
        self._blocks[slot] = self._lz4_compress(self._block, store_size=False)
        self._digests[slot // _CHUNK_BLOCKS] = ""

    def read(self, at: Location) -> Tensor:
        frames = self._decompress(at.slots)[:, :-1]
        return frames.reshape(*at.slots.shape, -1, *self._frame[1:])

    def read_pair(self, at: Location, after: Location) -> tuple[Tensor, Tensor]:
        channels = self._frame[0]
        frames = self._decompress(at.slots).view(len(at.slots), -1, *self._frame[1:])
        return frames[:, :-channels], frames[:, channels:]

    def _decompress(self, slots: np.ndarray) -> Tensor:
        """The blocks of the slots, flat: [n, n_frames + 1, channels, H, W]."""
        blocks, n_bytes, decompress = self._blocks, self._block.nbytes, self._lz4_decompress
        joined = bytearray().join([decompress(blocks[i], uncompressed_size=n_bytes) for i in slots.ravel().tolist()])
        return self._memory.send(np.frombuffer(joined, np.uint8).reshape(-1, *self._block.shape))

    def state_dict(self, n_used: int) -> dict[str, Any]:
        length = np.fromiter(map(len, self._blocks[: n_used * self._ring.B]), np.int64)
        return {"length": length, "bytes": self._chunked(length)}

    def _chunked(self, length: np.ndarray) -> ChunkedArray:
        """The blocks concatenated, in chunks of equally many blocks."""
        counts = [int(length[start : start + _CHUNK_BLOCKS].sum()) for start in range(0, len(length), _CHUNK_BLOCKS)]

        def read(i: int) -> np.ndarray:
            end = min(len(length), (i + 1) * _CHUNK_BLOCKS)
            return np.frombuffer(bytearray().join(self._blocks[i * _CHUNK_BLOCKS : end]), np.uint8)

        return ChunkedArray(np.dtype(np.uint8), (), counts, read, self._digests)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        slot, length = 0, state["length"].tolist()
        for _, chunk in iter_chunks(state["bytes"]):  # each holds whole blocks
            data, start = chunk.tobytes(), 0
            while start < len(data):
                self._blocks[slot] = data[start : start + length[slot]]
                start, slot = start + length[slot], slot + 1
        self._digests[:] = [""] * len(self._digests)
        counts = self._chunked(state["length"]).counts
        if isinstance(state["bytes"], ChunkedArray) and state["bytes"].counts == counts:
            self._digests[: len(counts)] = state["bytes"].digests[: len(counts)]


def check_stacks(stacks: np.ndarray, reset: np.ndarray) -> np.ndarray:
    """Check that stacks can be rebuilt from their newest frames; find the resets padded with black frames.

    Args:
        stacks: [T+1, B, n, ...] uint8.    reset: [T, B] bool, which of the rows 1..T start an episode after a reset.
    Returns:
        black [T, B] bool.
    Raises:
        ValueError: a stack does not continue the row before, or is padded in another way.
    """
    words = _words(stacks)  # [T+1, B, n, words of a frame]
    shifts = (words[1:, :, :-1] == words[:-1, :, 1:]).reshape(*reset.shape, -1).all(axis=-1)
    wrong = ~(shifts | reset)
    if wrong.any():
        t, env = np.argwhere(wrong)[0]
        raise ValueError(
            f"environment {env}: the observation of step {t} does not continue the stack of the step before; {_REMEDY}"
        )
    black = np.zeros_like(reset)
    for t, env in np.argwhere(reset):
        older, first = words[t + 1, env, :-1], words[t + 1, env, -1]
        black[t, env] = not older.any()
        if not black[t, env] and not (older == first).all():
            raise ValueError(
                f"environment {env}: the stack after a reset is padded neither with black frames nor with its first "
                f"frame; {_REMEDY}"
            )
    return black


_REMEDY = "declare its space as gymnasium.spaces.Box instead of FrameStack, so that replay stores whole observations"


def _words(stacks: np.ndarray) -> np.ndarray:
    """Frames flattened and viewed as int64 where possible, which compares 84x84 frames in an eighth of the time."""
    flat = np.ascontiguousarray(stacks).reshape(*stacks.shape[:3], -1)
    return flat.view(np.int64) if flat.shape[-1] % 8 == 0 else flat


def _ages(age: np.ndarray, reset: np.ndarray, black: np.ndarray, n: int) -> np.ndarray:
    """The ages of rows 1..T (see Frames) from row 0's [B]: [T, B] int8."""
    ages = np.empty(reset.shape, np.int8)
    for t in range(len(reset)):
        is_black = age < 0
        older = np.minimum(np.where(is_black, -1 - age, age) + 1, n - 1)
        age = np.where(is_black & (older < n - 1), -1 - older, older)
        age = ages[t] = np.where(reset[t], np.where(black[t], -1, 0), age)
    return ages
