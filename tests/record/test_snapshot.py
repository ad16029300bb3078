"""Snapshots: round trips, errors and kills."""

import hashlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.record import rank_state
from rlframe.record.snapshot import (
    SnapshotError,
    list_snapshots,
    load_snapshot,
    remove_snapshot,
    resolve_snapshot,
    save_snapshot,
    self_hash,
    write_rank_state,
)
from tests.fork_server import run_python

EMPTY: dict[str, Any] = {}
STATE: dict[str, Any] = {"weights": torch.arange(6.0).reshape(2, 3), "lr": 0.1}


def saved(directory: Path, env_steps: int = 100, state: Any = STATE) -> Path:
    return save_snapshot(directory / "snapshot", state, {"env_steps": env_steps, "updates": 3})


def round_trip(directory: Path, value: Any) -> Any:
    return load_snapshot(saved(directory, state={"value": value}))[0]["value"]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64),
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_a_tensor_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = round_trip(tmp_path, tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    if tensor.numel():
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_nan_payloads_and_infinities_in_a_tensor_survive(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x7FFFFFFF], dtype=torch.int32)
    assert torch.equal(round_trip(tmp_path, bits.view(torch.float32)).view(torch.int32), bits)


@pytest.mark.parametrize("dtype", [bool, np.uint64, np.int8, np.float16, np.float64, np.complex128])
def test_a_numpy_array_comes_back_as_one(tmp_path: Path, dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = round_trip(tmp_path, array)
    assert isinstance(back, np.ndarray)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_what_comes_back_can_be_written_to(tmp_path: Path) -> None:
    state, _ = load_snapshot(saved(tmp_path, state={"t": torch.zeros(3), "n": np.zeros(3)}))
    state["t"] += 1
    state["n"] += 1
    assert state["t"].sum() == state["n"].sum() == 3


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -(2**53), 2**127 + 1, "", "a/b ü", 0.1, -0.0, 1e-320, float("inf"), float("-inf")),
        *([], (), {}, [1, (2, [3.5, None])], (1,), {"dict": {"float": "nan"}}, {"tensor": "x"}),
        *([0.5, -0.0, float("inf")] * 500, [-(2**63), 1] * 500, [2**63] * 1000, [1, 0.5] * 500, [True, 1] * 500),
        *({0: {"step": 1.0}, "0": [2], 3.5: (1,), (1, 2): None}, {True: "yes", 2: "no"}),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_plain_value_comes_back_equal_and_of_its_type(tmp_path: Path, value: Any) -> None:
    assert repr(round_trip(tmp_path, value)) == repr(value)


def test_nan_and_numpy_scalars_survive(tmp_path: Path) -> None:
    nan, scalar = round_trip(tmp_path, [float("nan"), np.float32(0.1)])
    assert np.isnan(nan)
    assert type(scalar) is np.float32
    assert scalar == np.float32(0.1)


def test_generators_and_an_optimizer_continue_exactly(tmp_path: Path) -> None:
    numpy_generator, torch_generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight])
    weight.sum().backward()
    adam.step()
    state = {
        "numpy": numpy_generator.bit_generator.state,
        "torch": torch_generator.get_state(),
        "adam": adam.state_dict(),
    }
    back, _ = load_snapshot(saved(tmp_path, state=state))
    other, other_torch = np.random.default_rng(2), torch.Generator()
    other.bit_generator.state = back["numpy"]
    other_torch.set_state(back["torch"])
    assert other.random() == numpy_generator.random()
    assert torch.equal(torch.rand(3, generator=other_torch), torch.rand(3, generator=torch_generator))
    twin = torch.nn.Parameter(weight.detach().clone())
    twin_adam = torch.optim.Adam([twin])
    twin_adam.load_state_dict(back["adam"])
    for parameter, optimizer in ((weight, adam), (twin, twin_adam)):
        parameter.grad = torch.tensor([1.0, -2.0, 0.5])
        optimizer.step()
    assert torch.equal(weight, twin)


@pytest.mark.parametrize(
    ("value", "place"), [(object(), "state.a.1"), (np.array(["x"]), "state.a.1"), (np.array([None]), "state.a.1")]
)
def test_an_unsupported_value_is_an_error_with_its_path(tmp_path: Path, value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        saved(tmp_path, state={"a": [0, value]})
    assert list((tmp_path / "snapshot").iterdir()) == []


def test_no_bit_of_a_manifest_can_flip_unnoticed(tmp_path: Path) -> None:
    file = saved(tmp_path, state={"lr": 0.25, "n": 7}) / "manifest.json"
    data, before = file.read_bytes(), load_snapshot(tmp_path)
    for index in range(len(data)):
        file.write_bytes(data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :])
        try:
            assert load_snapshot(tmp_path) == before  # one blank for another between values
        except SnapshotError:
            continue


def rewritten(path: Path, rank: dict[str, Any] = EMPTY, **changes: Any) -> None:
    """A manifest as an attacker writes it: changed, with a hash that fits."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["ranks"][0] |= rank
    manifest |= changes
    manifest["sha256"] = self_hash(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "tree",
    [
        {"call": "os.system"},
        {"tensor": "missing", "dtype": "float32", "shape": [1]},
        {"tensor": "state.weights", "dtype": "float32", "shape": [10**12]},
        {"tensor": "state.weights", "dtype": "bfloat16", "shape": [10**12]},
        {"array": "state.weights", "dtype": "object", "shape": [6]},
        {"int": "x"},
        {"pairs": [[{"dict": {}}, 1]]},
        {"pairs": [1]},
    ],
)
def test_an_invalid_tree_is_an_error(tmp_path: Path, tree: Any) -> None:
    path = saved(tmp_path)
    rewritten(path, {"tree": tree})
    with pytest.raises(SnapshotError, match=str(path / "manifest.json")):
        load_snapshot(tmp_path)


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["arrays.safetensors", "manifest.json"])
def test_a_pickle_named_as_ours_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    data = pickle.dumps(Bomb(tmp_path / "ran"))
    (path / name).write_bytes(data)
    if name != "manifest.json":
        rewritten(path, {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    with pytest.raises(SnapshotError, match=name):
        load_snapshot(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_run_its_snapshot_directory_a_link_and_a_step_all_resolve(tmp_path: Path) -> None:
    saved(tmp_path, 100)
    newest = saved(tmp_path, 200).resolve()
    for path in (tmp_path, tmp_path / "snapshot", tmp_path / "snapshot/last", newest):
        assert resolve_snapshot(path) == newest


def test_the_newest_is_that_of_the_most_steps_not_of_the_longest_name(tmp_path: Path) -> None:
    for env_steps in (5_000_000_000_000, 999, 10_000):
        saved(tmp_path, env_steps)
    assert [int(path.name[5:]) for path in list_snapshots(tmp_path / "snapshot")] == [999, 10_000, 5_000_000_000_000]


def test_a_run_without_its_links_still_resolves(tmp_path: Path) -> None:
    newest = saved(tmp_path)
    (tmp_path / "snapshot/last").unlink()
    assert resolve_snapshot(tmp_path) == newest.resolve()


def test_a_missing_snapshot_is_explained(tmp_path: Path) -> None:
    (tmp_path / "exp/run_0").mkdir(parents=True)
    (tmp_path / "exp/run_0/params.json").write_text("{}")
    with pytest.raises(SnapshotError, match="does not exist"):
        resolve_snapshot(tmp_path / "nowhere")
    with pytest.raises(SnapshotError, match="it holds run_0: give one of them"):
        resolve_snapshot(tmp_path / "exp")
    with pytest.raises(SnapshotError, match="it holds exp/run_0: give one of them"):
        resolve_snapshot(tmp_path)
    with pytest.raises(SnapshotError, match="a run without a snapshot"):
        resolve_snapshot(tmp_path / "exp/run_0")


def test_a_second_snapshot_of_one_step_keeps_the_first(tmp_path: Path) -> None:
    first = saved(tmp_path, 100, {"n": 1})
    second = saved(tmp_path, 100, {"n": 2})
    assert (load_snapshot(first)[0], load_snapshot(second)[0]) == ({"n": 1}, {"n": 2})
    assert resolve_snapshot(tmp_path) == second.resolve()


def test_a_removed_snapshot_is_gone(tmp_path: Path) -> None:
    remove_snapshot(saved(tmp_path))
    assert list_snapshots(tmp_path / "snapshot") == []


def test_leftovers_of_a_dead_logger_are_never_a_snapshot_and_go_with_the_next(tmp_path: Path) -> None:
    saved(tmp_path, 100)
    for name in (".writing-999", ".removing-step_000000000300"):
        (tmp_path / "snapshot" / name).mkdir()
        (tmp_path / "snapshot" / name / "arrays.safetensors").write_bytes(b"half")
    (tmp_path / "snapshot/.linking-last").symlink_to("step_000000000300")
    assert load_snapshot(tmp_path)[1]["env_steps"] == 100
    saved(tmp_path, 200)
    names = sorted(entry.name for entry in (tmp_path / "snapshot").iterdir())
    assert names == ["last", "step_000000000100", "step_000000000200"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the names of open files from /proc")
def test_everything_is_flushed_before_the_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.split('-')[0]}")
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    def others(folder: Path) -> list[dict[str, Any]]:
        return [write_rank_state(folder, 1, STATE)]

    monkeypatch.setattr(rank_state, "LARGE_BYTES", 100)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    path = save_snapshot(tmp_path / "snapshot", {**STATE, "large": np.arange(50)}, {"env_steps": 1}, others)
    (chunk,) = (path / "chunks").iterdir()
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    of_first = ["flush arrays.safetensors", f"flush {chunk.name}", "flush chunks"]
    assert before == [*of_first, "flush rank_1.safetensors", "flush manifest.json", "flush .writing"]
    assert after == ["flush snapshot", "flush snapshot"]  # the new name, then the link


def killed_everywhere(folder: Path, case: str, timeout: float) -> int:
    """How many operations there were to be killed at; see kill_sweep.py."""
    done = run_python([sys.executable, "-m", "tests.record.kill_sweep", folder, case], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[1])


def test_a_kill_at_any_file_operation_leaves_a_complete_snapshot(tmp_path: Path) -> None:
    assert killed_everywhere(tmp_path, "small", 100) > 50  # the sweep did reach the operations


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("case", ["ppo", "sac"])
def test_a_run_resumes_after_a_kill_anywhere_in_its_snapshot(case: str, tmp_path: Path) -> None:
    assert killed_everywhere(tmp_path, case, 1_200) > 20


def test_every_rank_finds_its_own_state_and_no_other(tmp_path):
    def others(folder):
        return [write_rank_state(folder, rank, {"x": torch.full((2,), float(rank)), "rank": rank}) for rank in (1, 2)]

    path = save_snapshot(tmp_path, {"x": torch.zeros(2), "rank": 0}, {"env_steps": 3}, others)
    for rank in range(3):
        state, meta = load_snapshot(path, rank)
        assert (state["rank"], state["x"].tolist(), meta["env_steps"]) == (rank, [rank, rank], 3)
    with pytest.raises(SnapshotError, match="written by 3 ranks; it has no state of rank 3"):
        load_snapshot(path, 3)
    (path / "rank_2.safetensors").unlink()
    assert load_snapshot(path, 1)[0]["rank"] == 1
    with pytest.raises(SnapshotError, match=r"rank_2\.safetensors"):
        load_snapshot(path, 2)
