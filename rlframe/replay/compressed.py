"""Frames kept compressed without loss by lz4: a block a row, of its stack and the next row's newest frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lz4.block
import numpy as np
from torch import Tensor

from rlframe.core.spaces import FrameStack
from rlframe.replay.memory import Memory
from rlframe.replay.observations import At, Kept, check_stacks
from rlframe.replay.ring import Ring


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
        blocks = self._blocks[: n_used * self._ring.B]
        return {
            "length": np.array([len(block) for block in blocks], np.int64),
            "bytes": np.frombuffer(bytearray().join(blocks), np.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ends = np.cumsum(state["length"]).tolist()
        for slot, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            self._blocks[slot] = state["bytes"][start:end].tobytes()
