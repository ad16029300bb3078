"""Frames kept compressed without loss by lz4: a block a row, of its stack and the next row's newest frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lz4.block
import numpy as np
from torch import Tensor

from rlframe.core.spaces import FrameStack
from rlframe.record.codec import Chunked, by_rows
from rlframe.replay.columns import Memory, Ring
from rlframe.replay.frames import At, Kept, check_stacks

_TOGETHER = 4096  # blocks of a piece in a snapshot


class CompressedFrames(Kept):
    """As Frames, in about a tenth of the memory.

    Frames of one stack are alike, and lz4 sees that: five together take little more than twice what one takes. So one
    call gets a transition's both stacks, where frames kept one by one need five.
    """

    rows_before = 0

    def __init__(self, ring: Ring, memory: Memory, space: FrameStack) -> None:
        self._ring, self._memory, self._n = ring, memory, space.n_frames
        self._frame = (space.shape[0] // self._n, *space.shape[1:])  # [channels, H, W]
        self._block = np.zeros((self._n + 1, *self._frame), np.uint8)  # to compress
        self._blocks: list[bytes] = [b""] * ring.n_slots
        self._known = [""] * -(-ring.n_slots // _TOGETHER)  # see Chunked.digests; forgotten where a block is new

    def begin(self, time: int, row: np.ndarray) -> None:
        for env, stack in enumerate(row.reshape(-1, self._n, *self._frame)):
            self._compress(time, env, stack, np.zeros(self._frame, np.uint8))

    def extend(self, time: int, rows: np.ndarray, reset: np.ndarray) -> None:
        stacks = rows.reshape(*rows.shape[:2], self._n, *self._frame)
        check_stacks(stacks, reset)
        for t in range(len(reset)):
            for env in range(self._ring.B):
                self._compress(time + t, env, stacks[t, env], stacks[t + 1, env, -1])
        self.begin(time + len(reset), rows[-1])

    def _compress(self, time: int, env: int, stack: np.ndarray, newest: np.ndarray) -> None:
        self._block[:-1], self._block[-1] = stack, newest
        slot = time % self._ring.L * self._ring.B + env
        self._blocks[slot] = lz4.block.compress(self._block, store_size=False)
        self._known[slot // _TOGETHER] = ""

    def read(self, at: At) -> Tensor:
        frames = self._decompress(at.slots)[:, :-1]
        return frames.reshape(*at.slots.shape, -1, *self._frame[1:])

    def read_pair(self, at: At, after: At) -> tuple[Tensor, Tensor]:
        channels = self._frame[0]
        frames = self._decompress(at.slots).view(len(at.slots), -1, *self._frame[1:])
        return frames[:, :-channels], frames[:, channels:]

    def _decompress(self, slots: np.ndarray) -> Tensor:
        """[n, n_frames + 1, channels, H, W] of the slots, flat."""
        blocks, n_bytes, decompress = self._blocks, self._block.nbytes, lz4.block.decompress
        joined = bytearray().join([decompress(blocks[i], uncompressed_size=n_bytes) for i in slots.ravel().tolist()])
        return self._memory.send(np.frombuffer(joined, np.uint8).reshape(-1, *self._block.shape))

    def state_dict(self, n_used: int) -> dict[str, Any]:
        length = np.fromiter(map(len, self._blocks[: n_used * self._ring.B]), np.int64)
        return {"length": length, "bytes": self._held(length)}

    def _held(self, length: np.ndarray) -> Chunked:
        """The blocks one after another, in pieces of as many blocks each."""
        counts = [int(length[start : start + _TOGETHER].sum()) for start in range(0, len(length), _TOGETHER)]

        def read(i: int) -> np.ndarray:
            end = min(len(length), (i + 1) * _TOGETHER)
            return np.frombuffer(bytearray().join(self._blocks[i * _TOGETHER : end]), np.uint8)

        return Chunked(np.dtype(np.uint8), (), counts, read, self._known)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        slot, length = 0, state["length"].tolist()
        for _, piece in by_rows(state["bytes"]):  # whole blocks each
            data, start = piece.tobytes(), 0
            while start < len(data):
                self._blocks[slot] = data[start : start + length[slot]]
                start, slot = start + length[slot], slot + 1
        self._known[:] = [""] * len(self._known)
        held = self._held(state["length"])
        if isinstance(state["bytes"], Chunked) and state["bytes"].counts == held.counts:
            self._known[: len(held.counts)] = state["bytes"].digests[: len(held.counts)]
