"""Small files that claim or unpack to huge arrays are one line, and what they claim is never taken."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from rlframe.core.errors import ConfigError
from rlframe.data import NewDataset, bounds, open_dataset, tools
from tests.data.episodes import CARTPOLE, episodes

LIMIT = 1 << 20
WIDE = 1 << 20  # numbers in a cell


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_BYTES", LIMIT)


def dataset(folder: Path, kind: str) -> tuple[Path, Path]:
    """A dataset of an episode of 3 steps, and the file of its rows."""
    tools.write(NewDataset(f"{folder}/test-v0", *CARTPOLE, format=kind), episodes([3], *CARTPOLE))
    data = folder / "test-v0/data"
    return folder / "test-v0", data / "main_data.hdf5" if kind == "hdf5" else next(data.glob(f"0/*.{kind}"))


def wide(values: pa.Array) -> pa.Array:
    """An infos column with WIDE equal numbers in each of four cells."""
    cells = pa.FixedSizeListArray.from_arrays(values, WIDE)
    return pa.StructArray.from_arrays([cells], ["x"])


def with_infos(path: Path, infos: pa.Array) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    path.unlink()
    return table.set_column(table.column_names.index("infos"), "infos", infos)


def write_ipc(path: Path, table: pa.Table, compression: str | None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table)


@contextmanager
def taking_little() -> Iterator[None]:
    """Not for a moment does Arrow take LIMIT, or Python what is claimed."""
    pool = pa.default_memory_pool()
    held = pa.allocate_buffer(pool.max_memory() - pool.bytes_allocated())  # so that anything more is a new maximum
    most = pool.max_memory()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 20 * LIMIT  # claims are of 32 or more, and HDF5's buffers take 16
    finally:
        tracemalloc.stop()
    assert pool.max_memory() - most < LIMIT
    del held


def refused(path: Path, says: str) -> None:
    says = f"episode 0 of the dataset {path} is damaged: .*{says}"
    with taking_little(), pytest.raises(ConfigError, match=says):
        list(open_dataset(path).episodes())


def test_an_arrow_file_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    path, file = dataset(tmp_path, "arrow")
    write_ipc(file, with_infos(file, wide(pa.array(np.zeros(4 * WIDE, np.uint8)))), "zstd")
    assert file.stat().st_size < 1 << 14
    refused(path, "claims .* bytes, and an episode may have 1,048,576 here")


def test_an_arrow_file_whose_lengths_exceed_its_buffers_is_refused(tmp_path: Path) -> None:
    path, file = dataset(tmp_path, "arrow")
    data = file.read_bytes()
    assert struct.pack("<q", 4) in data
    file.write_bytes(data.replace(struct.pack("<q", 4), struct.pack("<q", 1 << 40)))
    refused(path, "")


def test_a_parquet_file_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    path, file = dataset(tmp_path, "parquet")
    table = pq.read_table(file)
    infos = wide(pa.array(np.zeros(4 * WIDE, np.uint8)))
    pq.write_table(table.set_column(table.column_names.index("infos"), "infos", infos), file, compression="zstd")
    assert file.stat().st_size < 1 << 16
    refused(path, "claims .* bytes, and an episode may have 1,048,576 here")


def test_text_in_a_parquet_file_is_left_out_unread(tmp_path: Path) -> None:
    path, file = dataset(tmp_path, "parquet")
    table = pq.read_table(file)
    text = pa.array(["x" * WIDE] * 4).dictionary_encode()
    infos = pa.StructArray.from_arrays([text, pa.array(np.arange(4.0))], ["text", "number"])
    pq.write_table(table.set_column(table.column_names.index("infos"), "infos", infos), file, compression="zstd")
    with taking_little():
        (episode,) = open_dataset(path).episodes()
    assert list(episode.info) == ["number"]


@pytest.mark.parametrize("attack", ["wide", "chunk", "twice", "many", "stream"])
def test_an_hdf5_file_that_unpacks_to_much_is_refused(tmp_path: Path, attack: str) -> None:
    path, file = dataset(tmp_path, "hdf5")
    with h5py.File(file, "a") as opened:
        group = opened["episode_0"]
        match attack:
            case "wide":
                group["infos"].create_dataset("x", data=np.zeros((3, WIDE), np.uint8), compression="gzip")
            case "many":
                for k in range(8):
                    group["infos"].create_dataset(f"x{k}", data=np.zeros((3, WIDE // 16), np.uint8), compression="gzip")
            case "chunk":  # of which the dataset has a part
                del group["rewards"]
                chunked = group.create_dataset("rewards", (3,), "f4", chunks=(WIDE,), maxshape=(None,))
                chunked[:] = 0
            case "stream":  # of a chunk goes on beyond it
                del group["rewards"]
                chunked = group.create_dataset("rewards", (3,), "f4", chunks=(3,), compression="gzip")
                rest = np.random.default_rng(0).bytes(2 << 20)
                chunked.id.write_direct_chunk((0,), zlib.compress(bytes(12) + rest))
            case "twice":
                del group["rewards"]
                space = h5py.h5s.create_simple((3,))
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_chunk((3,))
                plist.set_deflate(9)
                plist.set_deflate(9)
                found = h5py.h5d.create(group.id, b"rewards", h5py.h5t.NATIVE_FLOAT, space, plist)
                h5py.Dataset(found)[:] = np.zeros(3, np.float32)
    says = {"twice": "is compressed twice", "stream": "a chunk of /episode_0/rewards unpacks to more"}
    refused(path, says.get(attack, "claims .* bytes, and an episode may have"))


def test_images_are_unpacked_one_by_one_within_the_room_of_an_episode(tmp_path: Path) -> None:
    image = spaces.Box(0, 255, (256, 256, 3), np.uint8)
    tools.write(NewDataset(f"{tmp_path}/i-v0", image, CARTPOLE[1], format="hdf5"), episodes([2], image, CARTPOLE[1]))
    file = tmp_path / "i-v0/data/main_data.hdf5"
    metadata = file.with_name("metadata.json")
    metadata.write_text(metadata.read_text().replace('"jpeg_encoding": false', '"jpeg_encoding": true'))
    with h5py.File(file, "a") as opened:
        group = opened["episode_0"]
        del group["observations"]
        group.create_dataset("observations", (10**9,), h5py.vlen_dtype(np.uint8), chunks=(1024,))
    refused(tmp_path / "i-v0", "claims .* bytes, and an episode may have")
