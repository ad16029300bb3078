"""Damaged snapshots are skipped for the previous one; hostile ones are errors before memory is allocated."""

import hashlib
import json
import logging
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.record import codec, rank_state
from rlframe.record import snapshot as snapshots
from rlframe.record.codec import ChunkedArray
from rlframe.record.retention import Retention, SnapshotPolicy
from rlframe.record.snapshot import (
    SnapshotError,
    load_newest,
    load_snapshot,
    read_meta,
    remove_snapshot,
    save_snapshot,
    self_hash,
)

N = 400_000  # float32: larger than rank_state.LARGE_BYTES


def run_of_two(directory: Path) -> tuple[Path, Path]:
    """A run's two snapshots, of one small and one large array each."""
    return tuple(  # type: ignore[return-value]
        save_snapshot(
            directory / "snapshot",
            {"agent": {"n": n, "small": torch.full((3,), float(n))}, "replay": np.full(N, n, np.float32)},
            {"env_steps": n},
        )
        for n in (1, 2)
    )


def files_of(snapshot: Path) -> list[Path]:
    return sorted(file for file in snapshot.rglob("*") if file.is_file())


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("which", range(3))  # arrays, a chunk, the manifest
def test_the_previous_snapshot_is_used_with_a_warning_naming_both(
    damage: Any, which: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = run_of_two(tmp_path)
    file = files_of(newest)[which]
    damage(file)
    with caplog.at_level(logging.WARNING, "rlframe"):
        found, state, meta = load_newest(tmp_path)
    assert (found, state["agent"]["n"], meta["env_steps"], state["replay"][0]) == (before, 1, 1, 1.0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert all(word in message for word in (newest.name, before.name, str(file)))


@pytest.mark.parametrize("name", ["", "snapshot/last", "snapshot/step_000000000002"])
def test_a_damaged_snapshot_that_is_named_is_an_error(name: str, tmp_path: Path) -> None:
    for snapshot in run_of_two(tmp_path):
        if name or snapshot.name.endswith("2"):
            cut(snapshot / "arrays.safetensors")
    if name:
        with pytest.raises(SnapshotError, match=r"step_000000000002/arrays\.safetensors has .* bytes"):
            load_newest(tmp_path / name)
    else:
        assert load_newest(tmp_path)[2]["env_steps"] == 1


def test_if_all_are_damaged_the_error_names_the_newest(tmp_path: Path) -> None:
    for snapshot in run_of_two(tmp_path):
        flip(snapshot / "arrays.safetensors")
    with pytest.raises(SnapshotError, match="step_000000000002/arrays"):
        load_newest(tmp_path)


def test_the_agent_is_read_without_the_rest(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    for chunk in (newest / "chunks").iterdir():
        chunk.unlink()
    state, meta = load_snapshot(tmp_path, key="agent")
    assert (state["n"], state["small"].tolist(), meta["env_steps"]) == (2, [2.0] * 3, 2)
    with pytest.raises(SnapshotError, match="does not describe a state with 'policy'"):
        load_snapshot(tmp_path, key="policy")


def test_a_future_format_is_refused_by_name_and_not_passed_over(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    rewrite(newest, format=101, rlframe="9.0")
    says = r"2/manifest\.json has format 101, written by rlframe 9\.0; rlframe .* reads format 5 only"
    with pytest.raises(SnapshotError, match=says):
        load_newest(tmp_path)


def rewrite(snapshot: Path, large: dict[str, Any] | None = None, **changes: Any) -> None:
    """A manifest as an attacker writes it, with a hash that fits; `large`: of the only large array."""
    manifest = json.loads((snapshot / "manifest.json").read_text()) | changes
    for facts in manifest["ranks"][0]["large"].values():
        facts |= large or {}
    manifest["sha256"] = self_hash(manifest)
    (snapshot / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "large",
    [
        {"chunks": [["../../secret", 4 * N]]},
        {"chunks": [["0" * 63 + "/", 4 * N]]},
        {"chunks": [["0" * 64, -4]]},
        {"chunks": [["0" * 64, 2**40]], "shape": [2**38]},
        {"chunks": [["0" * 64]]},
        {"chunks": {}},
        {"shape": [N, 0]},
        {"shape": [N + 1]},
        {"shape": []},
        {"shape": [-1, -N]},
        {"shape": [1, -1, -N]},
        {"shape": [N, *[1] * 99]},
        {"shape": [0, 2**70], "chunks": []},
        {"dtype": "object"},
        {"dtype": "float64"},
    ],
)
def test_an_impossible_large_array_is_refused_by_its_manifest_entry(large: dict[str, Any], tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    rewrite(newest, large)
    with pytest.raises(SnapshotError, match=r"manifest\.json has an invalid entry for the large array 'state\.replay'"):
        load_snapshot(newest)


def test_a_chunk_repeated_beyond_free_memory_is_an_error_before_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = run_of_two(tmp_path)[1]
    (chunk,) = (newest / "chunks").iterdir()
    rewrite(newest, {"chunks": [[chunk.name, 4 * N]] * 100, "shape": [N * 100]})
    monkeypatch.setattr(codec, "available_memory", lambda: 10**8)
    with pytest.raises(SnapshotError, match=r"needs 160,000,000 bytes of memory and 100,000,000 are free"):
        load_snapshot(newest)


def test_chunks_listed_far_more_often_than_they_exist_are_refused(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    (chunk,) = (newest / "chunks").iterdir()
    rewrite(newest, {"chunks": [[chunk.name, 4 * N]] * 1_000, "shape": [N * 1_000]})
    with pytest.raises(SnapshotError, match=r"lists 1,600,000,000 bytes of arrays, but its snapshot has 1,600,000 dif"):
        load_snapshot(newest)


def test_a_replay_whose_rows_repeat_a_map_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_state, "_MAX_REPEATED", 0)
    row, counts = np.arange(2**18, dtype=np.float32), [1] * 20
    state = {"replay": ChunkedArray(row.dtype, row.shape, counts, lambda i: row[None], [""] * 20)}
    newest = save_snapshot(tmp_path, state, {"env_steps": 1})
    stored = load_snapshot(newest)[0]["replay"]
    assert stored.shape == (20, 2**18)
    np.testing.assert_array_equal(stored.read(19), row[None])
    with pytest.raises(SnapshotError, match="lists 20,971,520 bytes of arrays, but its snapshot has 1,048,576 dif"):
        stored.to_numpy()


@pytest.mark.parametrize("name", ["small", "replay"])
def test_an_array_named_twice_is_refused(name: str, tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    ranks = json.loads((newest / "manifest.json").read_text())["ranks"]
    state = ranks[0]["tree"]["dict"]
    one = state["agent"]["dict"]["small"] if name == "small" else state["replay"]
    state["more"] = [one] * 3
    rewrite(newest, ranks=ranks)
    with pytest.raises(SnapshotError, match=r"is missing, or named twice"):
        load_snapshot(newest)


def test_a_manifest_of_millions_of_empty_lists_is_refused_before_they_are_made(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    (newest / "manifest.json").write_bytes(b"[" + b"[]," * 3_000_000 + b"0]")
    tracemalloc.start()
    with pytest.raises(SnapshotError, match=r"it has 6,000,001 entries, more than the limit"):
        load_snapshot(newest)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_a_snapshot_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.core.files._MAX_NODES", 2_000)
    directory = run_of_two(tmp_path)[1].parent
    state = {"agent": 1, "envs": [{"step": 1}, {"prices": [[1.0, 2]] * 700}]}
    with pytest.raises(TypeError, match=r"2,\d+ entries, more than the limit .* in state.envs.1.prices; make it arr"):
        save_snapshot(directory, state, {"env_steps": 3})
    assert sorted(each.name for each in directory.iterdir()) == ["last", "step_000000000001", "step_000000000002"]


def test_a_huge_file_of_holes_takes_no_memory(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    os.truncate(newest / "arrays.safetensors", 2**42)
    tracemalloc.start()
    with pytest.raises(SnapshotError, match="its manifest says"):
        load_snapshot(newest)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda file: file.symlink_to(file.with_name("elsewhere"))])
@pytest.mark.parametrize("which", range(3))  # arrays, a chunk, the manifest
def test_only_plain_files_are_read(put: Any, which: int, tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    file = files_of(newest)[which]
    file.rename(file.with_name("elsewhere"))
    put(file)
    with pytest.raises(SnapshotError, match=f"{file} is not a regular file"):
        load_snapshot(newest)


def test_a_linked_folder_of_chunks_is_an_error(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    (newest / "chunks").rename(tmp_path / "elsewhere")
    (newest / "chunks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match="not a regular folder"):
        load_snapshot(newest)


def test_a_symlink_named_as_a_snapshot_is_none(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    assert load_newest(tmp_path)[2]["env_steps"] == 1


def test_a_chunk_truncated_after_its_check_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_state, "LARGE_BYTES", 8)
    array = ChunkedArray(np.dtype(np.float32), (), [100], lambda i: np.ones(100, np.float32), [""])
    path = save_snapshot(tmp_path, {"x": array}, {"env_steps": 1})
    loaded = load_snapshot(path)[0]["x"]
    cut(next((path / "chunks").iterdir()))
    with pytest.raises(SnapshotError, match="was truncated"):
        loaded.to_numpy()


def test_a_truncated_chunk_is_rewritten_by_the_next_snapshot(tmp_path: Path) -> None:
    digests = [""]
    array = ChunkedArray(np.dtype(np.float32), (), [N], lambda i: np.ones(N, np.float32), digests)
    first = save_snapshot(tmp_path, {"x": array}, {"env_steps": 1})
    cut(first / "chunks" / digests[0])
    second = save_snapshot(tmp_path, {"x": array}, {"env_steps": 2})
    assert load_snapshot(second)[0]["x"].to_numpy().sum() == N
    assert hashlib.sha256((second / "chunks" / digests[0]).read_bytes()).hexdigest() == digests[0]


def test_meta_needs_no_arrays(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    for file in files_of(newest)[:2]:
        file.unlink()
    assert read_meta(newest) == {"env_steps": 2}


@pytest.mark.parametrize("meta", [{}, {"env_steps": "2"}, {"env_steps": -2}, {"env_steps": True}, {"env_steps": 2.5}])
def test_a_manifest_without_its_step_is_refused(meta: dict[str, Any], tmp_path: Path) -> None:
    newest = run_of_two(tmp_path)[1]
    rewrite(newest, meta=meta)
    with pytest.raises(SnapshotError, match="does not give its env_steps"):
        load_newest(tmp_path)


def test_a_flipped_format_is_damage_and_no_newer_version(tmp_path: Path) -> None:
    before, newest = run_of_two(tmp_path)
    file = newest / "manifest.json"
    file.write_text(file.read_text().replace(f'"format": {snapshots.FORMAT}', f'"format": {snapshots.FORMAT ^ 1}', 1))
    assert load_newest(tmp_path)[0] == before


@pytest.mark.parametrize("keep", [0, 1])
def test_a_snapshot_that_is_rotated_away_while_it_is_read_gives_way_to_the_newer_one(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`keep`: of those before, such as the best one, which is no substitute."""
    found = run_of_two(tmp_path)
    read_manifest = snapshots.read_manifest

    def and_then_it_goes(folder: Path) -> Any:
        manifest = read_manifest(folder)
        monkeypatch.setattr(snapshots, "read_manifest", read_manifest)
        save_snapshot(tmp_path / "snapshot", {"agent": {"n": 3}}, {"env_steps": 3})
        for each in found[keep:]:
            remove_snapshot(each)
        return manifest

    monkeypatch.setattr(snapshots, "read_manifest", and_then_it_goes)
    assert load_newest(tmp_path, key="agent")[1] == {"n": 3}
    assert not caplog.records


def test_a_directory_of_snapshots_elsewhere_is_refused(tmp_path: Path) -> None:
    run_of_two(tmp_path)
    (tmp_path / "snapshot").rename(tmp_path / "elsewhere")
    (tmp_path / "snapshot").symlink_to("elsewhere")
    with pytest.raises(SnapshotError, match="is a link to elsewhere"):
        load_newest(tmp_path)
    with pytest.raises(SnapshotError, match="is a link to elsewhere"):
        Retention(tmp_path / "snapshot", SnapshotPolicy())


def test_last_names_a_snapshot_beside_it_or_nothing(tmp_path: Path) -> None:
    newest = run_of_two(tmp_path / "other")[1]
    run_of_two(tmp_path / "run")
    link = tmp_path / "run/snapshot/last"
    link.unlink()
    link.symlink_to(newest)
    with pytest.raises(SnapshotError, match="not to a snapshot in the same directory"):
        load_newest(link)
