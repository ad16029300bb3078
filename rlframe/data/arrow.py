"""Arrow and Parquet files of datasets, in Minari's layout: a folder for each episode with a table of its rows."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from gymnasium import Space, spaces

from rlframe.core.files import is_regular_file
from rlframe.core.struct import Tree, map_tree
from rlframe.data.bounds import Room, unpacked_bytes
from rlframe.data.episodes import Episode
from rlframe.data.images import decode_images, is_image

_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "infos")
_MAGIC, _END = b"ARROW1\0\0", b"ARROW1"  # of a file in Arrow's format; between them are the messages of a stream
_PHYSICAL_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}  # others are text


class ArrowColumns:
    """Reads episodes. Minari's tables have T+1 rows: the last one has the last observation alone."""

    def __init__(self, folder: Path, observation_space: Space, action_space: Space, jpeg: bool, kind: str) -> None:
        self._folder, self._spaces, self._jpeg = folder, (observation_space, action_space), jpeg
        self._ipc = kind == "arrow"

    def read(self, i: int) -> dict[str, Any]:
        room = Room()
        table = self._table(self._folder / str(i), room)
        observations = self._tree(_column(table, "observations"), self._spaces[0], room)
        actions = self._tree(_column(table, "actions"), self._spaces[1], room)
        n = table.num_rows - 1
        found = {key: _numbers(_column(table, key))[:n] for key in ("rewards", "terminations", "truncations")}
        infos = _infos(_column(table, "infos")) if "infos" in table.column_names else {}
        return {"observations": observations, "actions": map_tree(lambda x: x[:n], actions), **found, "infos": infos}

    def _table(self, folder: Path, room: Room) -> pa.Table:
        if folder.is_symlink() or not folder.is_dir():
            raise OSError("its folder is missing")
        files = sorted(path for path in folder.iterdir() if path.suffix in (".arrow", ".parquet", ".feather"))
        if not files or not all(map(is_regular_file, files)):
            raise OSError("its folder has no table")
        table = pa.concat_tables([self._read(path, room) for path in files])
        table.validate(full=True)  # lengths may exceed the buffers, which pyarrow then reads beyond
        return table

    def _read(self, path: Path, room: Room) -> pa.Table:
        return _read_ipc(path, room) if self._ipc else _read_parquet(path, room, self._jpeg)

    def _tree(self, column: Any, space: Space, room: Room) -> Tree:
        match space:
            case spaces.Dict():
                return {key: self._tree(_field(column, key), sub, room) for key, sub in space.spaces.items()}
            case spaces.Tuple():
                return tuple(self._tree(_field(column, str(k)), sub, room) for k, sub in enumerate(space.spaces))
            case spaces.Box() if self._jpeg and is_image(space):
                return decode_images((each.as_py() for each in column), len(column), space, room)
        return _numbers(column, tuple(space.shape or ()))

    def close(self) -> None:
        """Nothing stays open."""


def _read_ipc(path: Path, room: Room) -> pa.Table:
    """A table in Arrow's format, message by message, each of which says what it unpacks to."""
    with pa.memory_map(str(path)) as file:
        file.seek(max(0, file.size() - len(_END)))
        end = file.read()
        file.seek(0)
        if file.read(len(_MAGIC)) != _MAGIC or end != _END:
            raise ValueError("its table is not in Arrow's format, or not whole")
        messages = pa.ipc.MessageReader.open_stream(file)
        schema, batches = pa.ipc.read_schema(messages.read_next_message()), []
        for message in messages:
            if message.type != "record batch":
                raise ValueError(f"its table has a message of type {message.type}")
            room.take(unpacked_bytes(message), "its table")
            batches.append(pa.ipc.read_record_batch(message, schema))
    return pa.Table.from_batches(batches, schema)


def _read_parquet(path: Path, room: Room, jpeg: bool) -> pa.Table:
    """The columns of numbers, and images, of a Parquet table; text is left unread."""
    with pq.ParquetFile(path, memory_map=True) as file:
        columns = [file.schema.column(j) for j in range(len(file.schema))]
        mine = [j for j, each in enumerate(columns) if each.path.partition(".")[0] in _COLUMNS]
        n_bytes = {j: n for j in mine if (n := _value_bytes(columns[j]))}
        wanted = list(n_bytes)
        images = [j for j in mine if jpeg and columns[j].path.startswith(_COLUMNS[:2]) and j not in wanted]
        for group in map(file.metadata.row_group, range(file.num_row_groups)):
            for j in wanted:
                n = max(group.num_rows, group.column(j).num_values)
                room.take(n * n_bytes[j], columns[j].path)
            for j in images:
                room.take(group.column(j).total_uncompressed_size, columns[j].path)
        names = [columns[j].path for j in (*wanted, *images)]
        text = [columns[j].path for j in images]  # a dictionary holds equal values once
    with pq.ParquetFile(path, memory_map=True, read_dictionary=text) as file:
        return file.read(names, use_threads=False)


def _value_bytes(column: Any) -> int:
    """Of a number in a column of Parquet; 0 where it has others than numbers."""
    half = column.logical_type.type == "FLOAT16"
    return 2 if half else _PHYSICAL_BYTES.get(column.physical_type, 0)


def _column(table: pa.Table, name: str) -> Any:
    if name not in table.column_names:
        raise KeyError(f"it lacks {name}")
    return table.column(name).combine_chunks()


def _field(column: Any, name: str) -> Any:
    if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
        raise KeyError(f"it lacks {name}")
    return column.field(name)


def _numbers(column: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
    """The values [n, *shape] of a column of numbers, or of lists of a fixed size."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.null_count:
        raise ValueError("a column has empty cells")
    n = len(column)
    if pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise ValueError(f"a column holds {column.type}, not numbers")
    values = column.to_numpy(zero_copy_only=False)
    return values.reshape(n, *shape) if shape or values.size == n else values.reshape(n, -1)


def _infos(column: Any) -> dict[str, np.ndarray]:
    """The columns of numbers; others are left out."""
    if not pa.types.is_struct(column.type):
        return {}
    found = {}
    for k, part in enumerate(column.type):
        values = column.field(k)
        sizes = (part.metadata or {}).get(b"shape", b"")
        try:
            found[part.name] = _numbers(values, tuple(int(n) for n in sizes.split(b",") if n))
        except ValueError:  # text and the like
            continue
    return found


def write_arrow(folder: Path, first: int, episodes: Sequence[Episode], kind: str, compression: str) -> None:
    """Write episodes into the folders first, first + 1, ..., all at once; those of an earlier attempt are replaced.

    Args:
        kind: arrow or parquet.    compression: none, lz4 or zstd.
    """
    new = folder / ".new"
    shutil.rmtree(new, ignore_errors=True)
    codec = None if (kind, compression) == ("arrow", "none") else compression
    form = pads.IpcFileFormat() if kind == "arrow" else pads.ParquetFileFormat()
    options = form.make_write_options(compression=codec)
    tables = [_table_of(episode, first + k) for k, episode in enumerate(episodes)]
    for _, alike in itertools.groupby(tables, lambda table: table.schema):  # what is recorded besides may differ
        table = pa.concat_tables(alike)
        pads.write_dataset(
            table, new, format=form, file_options=options, partitioning=["episode_id"], use_threads=False,
            max_partitions=len(episodes), max_open_files=len(episodes) + 1, max_rows_per_file=0, min_rows_per_group=0,
            max_rows_per_group=1 << 30, existing_data_behavior="overwrite_or_ignore",
        )  # fmt: skip
    for k, episode in enumerate(episodes):
        own, to = new / str(first + k), folder / str(first + k)
        (own / "metadata.json").write_text(json.dumps({"id": first + k, "total_steps": len(episode)}))
        shutil.rmtree(to, ignore_errors=True)
        os.replace(own, to)
    shutil.rmtree(new, ignore_errors=True)


def _table_of(episode: Episode, number: int) -> pa.Table:
    n = len(episode) + 1
    columns = {"episode_id": pa.array(np.full(n, number, np.int32))}
    columns |= {name: _encoded(tree, n) for name, tree in episode.columns().items()}
    if episode.info:
        columns["infos"] = _encoded_infos(episode.info, n)
    return pa.table(columns)


def _padded(x: np.ndarray, n: int, before: bool = False) -> np.ndarray:
    missing = n - len(x)
    if not missing:
        return np.ascontiguousarray(x)
    rows = np.zeros((missing, *x.shape[1:]), x.dtype)
    return np.concatenate([rows, x] if before else [x, rows])


def _encoded(tree: Tree, n: int) -> Any:
    """A column of n rows."""
    if isinstance(tree, dict | tuple):
        items = tree.items() if isinstance(tree, dict) else ((str(k), x) for k, x in enumerate(tree))
        arrays = {name: _encoded(x, n) for name, x in items}
        return pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))
    return _list_array(_padded(np.asarray(tree), n))


def _list_array(x: np.ndarray) -> Any:
    if x.ndim == 1:
        return pa.array(x)
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x[0].size)


def _encoded_infos(info: Mapping[str, np.ndarray], n: int) -> Any:
    """The first row is the reset's, of which there is nothing to say."""
    arrays, fields = [], []
    for name, x in info.items():
        array = _list_array(_padded(x, n, before=True))
        arrays.append(array)
        shape = {"shape": ",".join(map(str, x.shape[1:]))} if x.ndim > 1 else None
        fields.append(pa.field(name, array.type, metadata=shape))
    return pa.StructArray.from_arrays(arrays, fields=fields)
