"""HDF5 files of datasets, in Minari's layout: a group for each episode with a dataset for each column."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from gymnasium import Space, spaces

from rlframe.core.files import is_regular_file
from rlframe.core.struct import Tree
from rlframe.data.bounds import Room
from rlframe.data.episodes import Episode
from rlframe.data.images import decode_images, is_image

FILE = "main_data.hdf5"
_RATIO = 1_100  # more than a filter of HDF5 compresses; an array that claims more was never written
_WHOLE_BYTES = 1 << 20  # of a chunk, or of all, below which none is looked at: it unpacks to 1.1 GB at most
_CHECKSUMS = 64  # bytes of filters beside the values of a chunk
_PACKING = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_SZIP}
_KEEPING = {h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}  # the size


class HDF5Columns:
    """Reads episodes. Links, external files and objects are never followed or decoded."""

    def __init__(self, folder: Path, observation_space: Space, action_space: Space, jpeg: bool) -> None:
        if not is_regular_file(folder / FILE):
            raise OSError(f"{FILE} is not a regular file")
        self._file = h5py.File(folder / FILE, "r")
        self._spaces, self._jpeg = (observation_space, action_space), jpeg

    def read(self, i: int) -> dict[str, Any]:
        group, room = _child(self._file, f"episode_{i}"), Room()
        found = {
            key: self._tree(_child(group, key), space, room)
            for key, space in zip(("observations", "actions"), self._spaces, strict=True)
        }
        found |= {key: _array(_child(group, key), room) for key in ("rewards", "terminations", "truncations")}
        infos = _child(group, "infos") if "infos" in group else {}
        arrays = {key: _child(infos, key) for key in infos}
        return {**found, "infos": {key: _array(x, room) for key, x in arrays.items() if _is_numeric(x)}}

    def _tree(self, node: Any, space: Space, room: Room) -> Tree:
        match space:
            case spaces.Dict():
                return {key: self._tree(_child(node, key), sub, room) for key, sub in space.spaces.items()}
            case spaces.Tuple():
                return tuple(self._tree(_child(node, f"_index_{k}"), sub, room) for k, sub in enumerate(space.spaces))
            case spaces.Box() if self._jpeg and is_image(space):
                return _images(node, space, room)
        return _array(node, room)

    def close(self) -> None:
        self._file.close()


def _child(group: Any, name: str) -> Any:
    """A member that lies in this file."""
    if not isinstance(group, h5py.Group) or name not in group:
        raise KeyError(f"it lacks {name}")
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name} is a link")
    return group[name]


def _is_numeric(node: Any) -> bool:
    return isinstance(node, h5py.Dataset) and node.dtype.kind in "fiub" and node.ndim > 0


def _array(node: Any, room: Room) -> np.ndarray:
    """The values of a dataset, if they can be as many as it says."""
    if not isinstance(node, h5py.Dataset):
        raise ValueError(f"{node.name} is not an array")
    if node.dtype.kind not in "fiub":
        raise ValueError(f"{node.name} holds {node.dtype}, not numbers")
    stored = node.id.get_storage_size()
    if node.size * node.dtype.itemsize > _RATIO * stored:
        raise ValueError(f"{node.name} claims {node.size:,} values in {stored:,} bytes")
    _check_storage(node, room)
    room.take(node.size * node.dtype.itemsize, node.name)
    return np.asarray(node[()])


def _images(node: Any, space: Space, room: Room) -> np.ndarray:
    """The JPEG images of a dataset: an array of bytes for each, or if all have one length, a row of bytes."""
    is_array = isinstance(node, h5py.Dataset)
    rows = is_array and node.dtype == np.uint8 and node.ndim == 2
    if not (rows or (is_array and h5py.check_vlen_dtype(node.dtype) == np.uint8 and node.ndim == 1)):
        raise ValueError(f"{node.name} holds no images")
    _check_storage(node, room)
    room.check(math.prod(node.shape[1:]), f"an image of {node.name}")
    return decode_images((node[k] for k in range(len(node))), len(node), space, room)


def _check_storage(node: Any, room: Room) -> None:
    """Raise ValueError if values lie in another file, or a chunk of them takes too much when it is unpacked.

    A chunk is unpacked as a whole, and a stream of gzip up to its end, whatever the size of the chunk.
    """
    if node.is_virtual or node.external:
        raise ValueError(f"{node.name} lies in another file")
    if not node.chunks:
        return
    room.check(math.prod(node.chunks) * node.dtype.itemsize, f"a chunk of {node.name}")
    plist = node.id.get_create_plist()
    filters = [plist.get_filter(k)[0] for k in range(plist.get_nfilters())]
    if others := set(filters) - _PACKING - _KEEPING:
        raise ValueError(f"{node.name} has the filter {others.pop()}, which is not read")
    if (n := sum(each in _PACKING for each in filters)) > 1:
        raise ValueError(f"{node.name} is compressed twice")
    if n and node.id.get_storage_size() > _WHOLE_BYTES:
        _check_chunks(node)


def _check_chunks(node: Any) -> None:
    """Raise ValueError if a large chunk of gzip unpacks to more than a chunk. LZF, at most 90 times, needs no look."""
    most = math.prod(node.chunks) * node.dtype.itemsize + _CHECKSUMS
    chunks: list[tuple[int, tuple[int, ...]]] = []
    node.id.chunk_iter(lambda chunk: chunks.append((chunk.size, chunk.chunk_offset)))
    for size, offset in chunks if node.compression == "gzip" else ():
        if size <= _WHOLE_BYTES:
            continue
        try:
            n_bytes = len(zlib.decompressobj().decompress(node.id.read_direct_chunk(offset)[1], most + 1))
        except zlib.error:  # not compressed, or damaged
            continue
        if n_bytes > most:
            raise ValueError(f"a chunk of {node.name} unpacks to more than its {most:,} bytes")


def write_hdf5(folder: Path, episodes: Iterator[Episode], compression: Mapping[str, str]) -> tuple[int, int]:
    """Write all episodes to a new file in `folder`; returns their number and their steps.

    Args:
        compression: gzip or lzf by column (observations, actions, rewards, infos); other columns are not compressed.
    """
    n = n_steps = 0
    with h5py.File(folder / FILE, "x") as file:
        for n, episode in enumerate(episodes, 1):
            group = file.create_group(f"episode_{n - 1}")
            group.attrs.update({"id": n - 1, "total_steps": len(episode)})
            for key, tree in {**episode.columns(), "infos": dict(episode.info)}.items():
                _write(group, key, tree, compression.get(key))
            n_steps += len(episode)
    return n, n_steps


def _write(group: Any, key: str, tree: Tree, compression: str | None) -> None:
    if isinstance(tree, dict | tuple):
        below = group.create_group(key)
        items = tree.items() if isinstance(tree, dict) else ((f"_index_{k}", x) for k, x in enumerate(tree))
        for name, part in items:
            _write(below, name, part, compression)
    else:
        group.create_dataset(key, data=tree, compression=compression)
