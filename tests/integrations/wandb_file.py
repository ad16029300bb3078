"""Reads the rows of a .wandb file: records in the log format of LevelDB, each a protobuf message of wandb."""

import json
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 1 << 15  # bytes: of the file and of each part of a record; of a block
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    return rows


def _records(content: bytes) -> list[bytes]:
    assert content[:4] == b":W&B"
    found, position, part = [], _HEADER, b""
    while position + _HEADER <= len(content):
        if _BLOCK - position % _BLOCK < _HEADER:  # padding at the end of a block
            position += _BLOCK - position % _BLOCK
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        data = content[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        part = data if kind in (_FULL, _FIRST) else part + data
        if kind in (_FULL, _LAST):
            found.append(part)
    return found
