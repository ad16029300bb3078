"""Room: the memory that arrays of one episode may take, whatever its files claim; and sizes in Arrow messages."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rlframe.core.memory import available_memory

MOST_BYTES = 1 << 32  # of one episode
_SMALL_BYTES = 1 << 26  # of an episode, which always fits
_COPIES = 4  # of an episode, while it is read


class Room:
    """The memory for one episode: MOST_BYTES, or less where less is free."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, n_bytes: int, what: str) -> None:
        """Raise ValueError unless `what`, of which a file claims n_bytes, fits beside what was taken before."""
        self.check(n_bytes, what)
        self._taken += n_bytes

    def check(self, n_bytes: int, what: str) -> None:
        """As `take`, for what is there for a moment only."""
        if (needed := self._taken + n_bytes) <= min(_SMALL_BYTES, MOST_BYTES):
            return
        most = min(MOST_BYTES, available_memory() // _COPIES)
        if needed > most:
            raise ValueError(f"{what} claims {n_bytes:,} bytes, and an episode may have {most:,} here")


def unpacked_bytes(message: Any) -> int:
    """Bytes of the buffers of a record batch, a pyarrow Message, once they are unpacked.

    Its metadata is a flatbuffer (Message.fbs and File.fbs of Arrow's columnar format): header is field 2 of a Message;
    buffers and compression are fields 2 and 3 of a RecordBatch. A compressed buffer begins with its size, -1: as it is.

    Raises:
        ValueError: the metadata are damaged.
    """
    metadata, body = memoryview(message.metadata), memoryview(message.body)
    try:
        table = _field(metadata, _offset(metadata, 0), 2)
        batch = _offset(metadata, table)
        at = _field(metadata, batch, 2)
        vector = _offset(metadata, at)
        (n,) = struct.unpack_from("<I", metadata, vector)
        buffers = np.frombuffer(metadata, "<i8", 2 * n, vector + 4).reshape(n, 2)  # offset and length of each
        if not _field(metadata, batch, 3):
            return int(buffers[:, 1].clip(0).astype(object).sum())
        stored = [(offset, length) for offset, length in buffers.tolist() if length > 0]
        sizes = [(struct.unpack_from("<q", body, offset)[0], length) for offset, length in stored]
    except struct.error:
        raise ValueError("a message of its table is damaged") from None
    if any(size < -1 for size, _ in sizes):
        raise ValueError("a buffer of its table claims a negative size")
    return sum(length if size == -1 else size for size, length in sizes)


def _offset(data: memoryview, at: int) -> int:
    """The place that the offset at a place of a flatbuffer points to."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, i: int) -> int:
    """The place of field i of a table of a flatbuffer; 0: it is absent."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    (n_bytes,) = struct.unpack_from("<H", data, vtable)
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * i)[0] if 4 + 2 * i < n_bytes else 0
    return table + int(offset) if offset else 0
