"""ParameterServer: the newest version for who asks, in any process; nothing older; what stays when its actor dies."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from rlframe.core.errors import ConfigError, ReadableError
from rlframe.system.parameter_server import ParameterServer
from tests.clusters import ray as ray
from tests.clusters import with_cluster
from tests.processes import until


class Follower:
    """Of another process."""

    def __init__(self, server: ParameterServer) -> None:
        self.server, self.version = server, -1

    def follow(self) -> float:
        newer = self.server.pull(self.version)
        if newer is None:
            return -1.0
        self.version = newer[0]
        return float(newer[1]["weight"].sum())


@with_cluster
def test_all_get_the_newest_version_once(ray: Any, tmp_path: Path) -> None:
    server = ParameterServer()
    assert server.pull() is None
    with pytest.raises(ReadableError, match="no parameters yet"):
        server.get()
    followers = [ray.remote(num_cpus=0)(Follower).remote(server) for _ in range(2)]
    server.push(3, {"weight": np.full((300, 300), 2.0, np.float32)})  # large enough for the store
    for follower in followers:
        assert [ray.get(follower.follow.remote()) for _ in range(2)] == [180_000.0, -1.0]
    server.push(2, {"weight": np.zeros(1)})
    assert server.pull(2) is not None, "2 came later than 3, but is older"
    server.push(4, {"weight": np.full(3, 5.0)})
    assert [ray.get(follower.follow.remote()) for follower in followers] == [15.0, 15.0]
    for _ in range(2):
        assert server.save(tmp_path / "last.safetensors") == 4
    with safe_open(tmp_path / "last.safetensors", "numpy") as file:
        assert file.metadata() == {"version": "4"}
        assert file.get_tensor("weight").tolist() == [5.0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["last.safetensors"]
    ray.kill(server._store, no_restart=False)
    until(lambda: server.pull() is None)
    server.push(4, {"weight": np.ones(2)})
    assert server.get()[0] == 4


@with_cluster
def test_without_a_cluster_it_says_what_to_call(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"ParameterServer needs a Ray cluster: call rlframe.system.cluster.connect"):
        ParameterServer()


def test_a_full_disk_leaves_the_last_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    server = object.__new__(ParameterServer)  # without Ray
    monkeypatch.setattr(server, "get", lambda: (1, {"weight": np.ones(3)}))
    assert server.save(tmp_path / "last.safetensors") == 1
    before = (tmp_path / "last.safetensors").read_bytes()
    monkeypatch.setattr("rlframe.system.parameter_server.write_file", half)
    with pytest.raises(OSError, match="No space left"):
        server.save(tmp_path / "last.safetensors")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("last.safetensors", before)]
