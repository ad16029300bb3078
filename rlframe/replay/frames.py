"""How replay stores observations: as whole rows, or frame by frame, from which stacks are rebuilt when read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import FrameStack
from rlframe.core.struct import as_numpy
from rlframe.core.types import Array
from rlframe.record.codec import ChunkedArray, iter_chunks
from rlframe.replay.arrays import Ring, StorageMemory, write_rows


class BrokenStack(ValueError):
    """Stacks cannot be rebuilt from their newest frames."""


class ObservationStorage(ABC):
    """Stores one leaf of the observations. Slots `at` are [n] or [L, n]."""

    rows_before: int  # number of earlier rows that are needed to read a row
    name: ClassVar[str]  # in snapshots

    @abstractmethod
    def write_first(self, time: int, row: Array) -> None:
        """Write the row [B, ...] at `time`, which follows no other row, and what it needs into the rows_before."""

    @abstractmethod
    def append(self, time: int, rows: Array, valid: Array, first: Array) -> None:
        """Write rows 1..T of [T+1, B, ...]; row 0 is stored at `time` already. The flags are those of Samples."""

    @abstractmethod
    def read(self, at: Array) -> Tensor:
        """Observations [*at, ...]."""

    def read_pair(self, at: Array, after: Array) -> tuple[Tensor, Tensor]:
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

    def __init__(self, ring: Ring, memory: StorageMemory, example: np.ndarray) -> None:
        """`example`: a single row."""
        self._rows = memory.array(ring.L, ring.B, example.shape, example.dtype)

    def write_first(self, time: int, row: Array) -> None:
        self._rows.write(time, row[None])

    def append(self, time: int, rows: Array, valid: Array, first: Array) -> None:
        self._rows.write(time + 1, rows[1:])

    def read(self, at: Array) -> Tensor:
        return self._rows.take(at)

    def state_dict(self, n_used: int) -> dict[str, Any]:
        return {"rows": self._rows.saved(n_used)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows.load(state["rows"])


class Frames(ObservationStorage):
    """The newest frame of each row. Stacks are rebuilt within an episode, padded at its start as they were.

    A lost life is no reset: its stacks continue, and so they do over rows where nobody acted. ALE pads with black
    frames, Gymnasium's FrameStackObservation with black frames or copies of the first one; which of the two is detected
    at each reset. Batches are looked at on the host for all of this, wherever the frames are stored.
    """

    name = "Frames"

    def __init__(self, ring: Ring, memory: StorageMemory, space: FrameStack) -> None:
        self._ring, self._memory, self._n = ring, memory, space.n_frames
        self.rows_before = self._n - 1
        self._frame = (space.shape[0] // self._n, *space.shape[1:])  # [channels, H, W]
        self._black = ring.n_slots  # the slot after the ring, which stays zero
        self._frames = memory.array(ring.L, ring.B, self._frame, np.uint8, by_env=True, extra=1)
        # Number a of the episode's frames before the row's own, at most n - 1; stored as -1 - a if padded with black.
        self._age = memory.zeros((ring.L, ring.B), np.int8)
        self._gap = memory.zeros((1, 1), np.int32)  # [L, B] absent rows before this one, once there are any
        self._last = _Padding(*np.zeros((2, ring.B), np.int32))  # of row ring.t
        self._back = memory.own(np.arange(self._n - 1, -2, -1))  # from a row to the frames of its stack and the next

    @property
    def _has_gaps(self) -> bool:
        return len(self._gap) > 1

    def write_first(self, time: int, row: Array) -> None:
        B, n = self._ring.B, self._n
        frames = as_numpy(row).reshape(B, n, *self._frame)
        self._frames.write(time - n + 1, np.ascontiguousarray(frames.swapaxes(0, 1)))
        self._last = _Padding(np.full(B, n - 1, np.int32), np.zeros(B, np.int32))
        write_rows(
            self._age, time, n - 1 + self._memory.zeros((1, B), np.int8)
        )  # the rows before hold its older frames
        self._write_gaps(time - n + 1, np.zeros((n, B), np.int32))

    def append(self, time: int, rows: Array, valid: Array, first: Array) -> None:
        (T, B), n = valid.shape, self._n
        stacks = as_numpy(rows).reshape(T + 1, B, n, *self._frame)
        acted = as_numpy(valid)
        reset, absent = _resets(stacks, acted, as_numpy(first))
        black = check_stacks(stacks, reset, absent)
        self._frames.write(time + 1, stacks[1:, :, -1])
        if (self._last.age == n - 1).all() and acted.all():
            ages, gaps = np.full((T, B), n - 1, np.int8), np.zeros((T, B), np.int32)
        else:
            ages, gaps = _paddings(self._last, reset, absent, black, n)
        self._last = _Padding(ages[-1].astype(np.int32), gaps[-1])
        write_rows(self._age, time + 1, self._memory.own(ages))
        self._write_gaps(time + 1, gaps)

    def _write_gaps(self, time: int, gaps: np.ndarray) -> None:
        if not self._has_gaps and gaps.any():
            self._gap = self._memory.zeros((self._ring.L, self._ring.B), np.int32)
        if self._has_gaps:
            write_rows(self._gap, time, self._memory.own(gaps))

    def read(self, at: Array) -> Tensor:
        return self._stacks(at, self._n).view(*at.shape, -1, *self._frame[1:])

    def read_pair(self, at: Array, after: Array) -> tuple[Tensor, Tensor]:
        """Fetches each frame once; both stacks are views of them."""
        channels = self._frame[0]
        frames = self._stacks(at, self._n + 1).view(len(at), -1, *self._frame[1:])
        return frames[:, :-channels], frames[:, channels:]

    def _stacks(self, at: Array, length: int) -> Tensor:
        """`length` frames from the oldest of each row's stack on: [*at, length, channels, H, W]."""
        (L, B), xp, back = (self._ring.L, self._ring.B), self._memory.xp, self._back[:length]
        place, env, age = (at // B)[..., None], (at % B)[..., None], self._age.reshape(-1).take(at)
        if not self._memory.on_device and not self._has_gaps and age.min() == self._n - 1:  # nearly always
            return self._frames.take((place - back) % L + env * L)
        age = age[..., None]
        held = xp.where(age < 0, -1 - age, age)
        missing, back = (age < 0) & (back > held), xp.minimum(back, held)
        if self._has_gaps:
            back = self._over_gaps(place, env, back)
            missing = missing | (back > (place - self._ring.oldest) % L)  # overwritten, before a long gap
        return self._frames.take(xp.where(missing, self._black, (place - back) % L + env * L))

    def _over_gaps(self, place: Array, env: Array, back: Array) -> Array:
        """The rows from each row back to the frame that is `back` frames before its own."""
        rows, frame = back, 0 * place
        for k in range(self._n - 1):
            gap = self._gap[(place - frame) % self._ring.L, env]
            rows, frame = rows + gap * (back > k), frame + 1 + gap
        return rows

    def state_dict(self, n_used: int) -> dict[str, Any]:
        small = {"age": as_numpy(self._age[:n_used]), "gap": as_numpy(self._gap[:n_used])}
        return {"frames": self._frames.saved(n_used), **small}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frames.load(state["frames"])
        age, gap, place = state["age"], state["gap"], self._ring.t % self._ring.L
        self._age[: len(age)] = self._memory.own(age)
        if len(gap) > 1:
            self._gap = self._memory.zeros((self._ring.L, self._ring.B), np.int32)
            self._gap[: len(gap)] = self._memory.own(gap)
        self._last = _Padding(age[place].astype(np.int32), gap[place if len(gap) > 1 else 0] + 0 * self._last.gap)


_CHUNK_BLOCKS = 4096  # compressed blocks in one chunk of a snapshot


class CompressedFrames(ObservationStorage):
    """As Frames, compressed without loss by lz4 (the extra `lz4`), in about a tenth of the memory.

    One block holds a row's stack and the next row's newest frame, so that reading a transition is one call: five
    similar frames together take little more than twice the time of one.
    """

    rows_before = 0

    name = "CompressedFrames"

    def __init__(self, ring: Ring, memory: StorageMemory, space: FrameStack) -> None:
        try:
            from lz4 import block  # an optional extra
        except ImportError:
            raise ConfigError('algo.replay.compress=true needs lz4: pip install "rlframe[lz4]"') from None
        self._lz4_compress, self._lz4_decompress = block.compress, block.decompress
        self._ring, self._memory, self._n = ring, memory, space.n_frames
        self._frame = (space.shape[0] // self._n, *space.shape[1:])  # [channels, H, W]
        self._block = np.zeros((self._n + 1, *self._frame), np.uint8)  # the frames to compress
        self._blocks: list[bytes] = [block.compress(self._block, store_size=False)] * ring.n_slots
        self._digests = [""] * -(-ring.n_slots // _CHUNK_BLOCKS)  # of ChunkedArray; reset where a block changes

    def write_first(self, time: int, row: Array) -> None:
        for env, stack in enumerate(as_numpy(row).reshape(-1, self._n, *self._frame)):
            self._compress(time, env, stack, np.zeros(self._frame, np.uint8))

    def append(self, time: int, rows: Array, valid: Array, first: Array) -> None:
        stacks = as_numpy(rows).reshape(*rows.shape[:2], self._n, *self._frame)
        acted = as_numpy(valid)
        check_stacks(stacks, *_resets(stacks, acted, as_numpy(first)))
        for t in range(len(acted)):
            for env in range(self._ring.B):
                self._compress(time + t, env, stacks[t, env], stacks[t + 1, env, -1])
        self.write_first(time + len(acted), rows[-1])

    def _compress(self, time: int, env: int, stack: np.ndarray, newest: np.ndarray) -> None:
        self._block[:-1], self._block[-1] = stack, newest
        slot = time % self._ring.L * self._ring.B + env
        self._blocks[slot] = self._lz4_compress(self._block, store_size=False)
        self._digests[slot // _CHUNK_BLOCKS] = ""

    def read(self, at: Array) -> Tensor:
        frames = self._decompress(at)[:, :-1]
        return frames.reshape(*at.shape, -1, *self._frame[1:])

    def read_pair(self, at: Array, after: Array) -> tuple[Tensor, Tensor]:
        channels = self._frame[0]
        frames = self._decompress(at).view(len(at), -1, *self._frame[1:])
        return frames[:, :-channels], frames[:, channels:]

    def _decompress(self, slots: Array) -> Tensor:
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


def _resets(stacks: np.ndarray, acted: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`reset` and `absent` of `check_stacks`, from the flags of Samples.

    An environment that waits repeats its row, with `first` if that is set: also after a lost life, which is no reset.
    """
    reset = ~acted & first[1:]
    for t, env in np.argwhere(reset & first[:-1]):
        reset[t, env] = not np.array_equal(stacks[t + 1, env], stacks[t, env])
    return reset, ~acted & ~reset


def check_stacks(stacks: np.ndarray, reset: np.ndarray, absent: np.ndarray) -> np.ndarray:
    """Check that stacks can be rebuilt from their newest frames; find the resets padded with black frames.

    Args:
        stacks: [T+1, B, n, ...] uint8.    reset: [T, B] bool, which of the rows 1..T start an episode after a reset.
        absent: [T, B] bool, which of them follow a row where nobody acted; their stacks are not looked at.
    Returns:
        black [T, B] bool.
    Raises:
        BrokenStack: a stack does not continue the row before, or is padded in another way.
    """
    words = _words(stacks)  # [T+1, B, n, words of a frame]
    shifts = (words[1:, :, :-1] == words[:-1, :, 1:]).reshape(*reset.shape, -1).all(axis=-1)
    wrong = ~(shifts | reset | absent)
    if wrong.any():
        t, env = np.argwhere(wrong)[0]
        raise BrokenStack(
            f"environment {env}: the observation of step {t} does not continue the stack of the step before; {_REMEDY}"
        )
    black = np.zeros_like(reset)
    for t, env in np.argwhere(reset):
        older, first = words[t + 1, env, :-1], words[t + 1, env, -1]
        black[t, env] = not older.any()
        if not black[t, env] and not (older == first).all():
            raise BrokenStack(
                f"environment {env}: the stack after a reset is padded neither with black frames nor with its first "
                f"frame; {_REMEDY}"
            )
    return black


_REMEDY = "declare its space as gymnasium.spaces.Box instead of FrameStack, so that replay stores whole observations"


def _words(stacks: np.ndarray) -> np.ndarray:
    """Frames flattened and viewed as int64 where possible, which compares 84x84 frames in an eighth of the time."""
    flat = np.ascontiguousarray(stacks).reshape(*stacks.shape[:3], -1)
    return flat.view(np.int64) if flat.shape[-1] % 8 == 0 else flat


class _Padding(NamedTuple):
    """Of one row: numbers [B] as in Frames."""

    age: np.ndarray
    gap: np.ndarray


def _paddings(
    last: _Padding, reset: np.ndarray, absent: np.ndarray, black: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ages and gaps of rows 1..T (see Frames) from those of row 0: [T, B] int8 and int32."""
    ages, gaps = np.empty(reset.shape, np.int8), np.empty(reset.shape, np.int32)
    age, gap = last
    for t in range(len(reset)):
        is_black = age < 0
        older = np.minimum(np.where(is_black, -1 - age, age) + 1, n - 1)
        older = np.where(is_black & (older < n - 1), -1 - older, older)
        age = ages[t] = np.where(reset[t], np.where(black[t], -1, 0), np.where(absent[t], age, older))
        gap = gaps[t] = np.where(absent[t], gap + 1, 0)
    return ages, gaps
