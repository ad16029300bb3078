"""Reading the machine from the operating system, with defaults for unknown facts; and which CPUs are free."""

import math
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from rlframe.system.affinity import plan
from rlframe.system.machine import Cpu, FreeCpus, Gpu, Topology, choose_egl_device, read_topology


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n", encoding="utf-8")
    return root


def cpu_files(id_: int, siblings: str, socket: int, node: int, core_id: int) -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu{id_}"
    return {
        f"{folder}/topology/thread_siblings_list": siblings,
        f"{folder}/topology/physical_package_id": str(socket),
        f"{folder}/topology/core_id": str(core_id),
        f"{folder}/node{node}/cpulist": "",
    }


def gpu_files(address: str, node: int) -> dict[str, str]:
    return {
        f"proc/driver/nvidia/gpus/{address}/information": "Model: NVIDIA H200",
        f"sys/bus/pci/devices/{address}/numa_node": str(node),
    }


@pytest.fixture(autouse=True)
def _all_gpus_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_siblings_sockets_and_nodes_are_read(tmp_path):
    files = cpu_files(0, "0,4", 0, 0, 0) | cpu_files(4, "0,4", 0, 0, 0)
    files |= cpu_files(2, "2-3", 1, 1, 0) | cpu_files(3, "2-3", 1, 1, 0)  # the same core_id on another socket
    topology = read_topology(write(tmp_path, files), allowed=[4, 3, 2, 0])
    assert topology.cpus == (Cpu(0, 0, 0, 0), Cpu(2, 2, 1, 1), Cpu(3, 2, 1, 1), Cpu(4, 0, 0, 0))
    assert plan("auto", topology).workers == ((0, 4), (2, 3))


def test_only_allowed_cpus_are_read_also_if_their_siblings_are_not(tmp_path):
    files = cpu_files(5, "1,5", 0, 0, 1) | cpu_files(1, "1,5", 0, 0, 1) | cpu_files(11, "3,11", 0, 0, 3)
    topology = read_topology(write(tmp_path, files), allowed={5, 11})
    assert plan("auto", topology).workers == ((5,), (11,))


def test_without_sysfs_each_cpu_is_a_core(tmp_path):
    topology = read_topology(tmp_path, allowed=range(3))
    assert topology == Topology(tuple(Cpu(i, i, 0, 0) for i in range(3)), (), math.inf)
    assert plan("auto", topology).workers == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [("1,0", [1, 0]), ("1", [1]), ("", []), ("-1", []), ("0,-1,1", [0]), ("7", []), ("GPU-8932f937,MIG-1", [-1, -1])],
)
def test_gpus_are_numbered_as_cuda_sees_them(tmp_path, monkeypatch, visible: str, nodes: list[int]):
    write(tmp_path, gpu_files("0000:d1:00.0", 1) | gpu_files("0000:1b:00.0", 0))
    assert read_topology(tmp_path, [0]).gpus == (Gpu(0, 0), Gpu(1, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert read_topology(tmp_path, [0]).gpus == tuple(Gpu(i, node) for i, node in enumerate(nodes))


def test_gpus_of_unknown_node_are_found_by_their_device_files(tmp_path):
    write(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    assert read_topology(tmp_path, [0]).gpus == (Gpu(0, -1), Gpu(1, -1))


def test_visible_devices_without_a_driver_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert read_topology(tmp_path, [0]).gpus == ()


V1 = "sys/fs/cgroup/cpu"
HOST_V1 = "4:memory:/m\n1:cpu,cpuacct:/docker/a1\n0::/"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/c/cpu.max": "100000 100000",
            },
            4.0,
        ),
        ({"proc/self/cgroup": "0::/../a", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        ({"proc/self/cgroup": HOST_V1, f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"}, math.inf),
        ({"proc/self/cgroup": HOST_V1, f"{V1}/cpu.cfs_quota_us": "300000", f"{V1}/cpu.cfs_period_us": "100000"}, 3.0),
        (
            {
                "proc/self/cgroup": HOST_V1,
                f"{V1},cpuacct/docker/a1/cpu.cfs_quota_us": "250000",
                f"{V1},cpuacct/docker/a1/cpu.cfs_period_us": "100000",
                f"{V1}/m/cpu.cfs_quota_us": "1",  # of the cgroup that limits our memory only
                f"{V1}/m/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        ({"sys/fs/cgroup/cpu.max": "garbage"}, math.inf),
    ],
)
def test_the_tightest_quota_on_the_way_to_our_cgroup_holds(tmp_path, files: dict[str, str], quota: float):
    assert read_topology(write(tmp_path, files), [0]).quota == quota


@pytest.mark.parametrize(
    ("given", "gpus", "devices"),
    [
        ({"MUJOCO_GL": "egl"}, (2, 5), ["2", "5", "2"]),
        ({"MUJOCO_GL": "egl"}, (), ["0", "1", "2"]),  # all of the machine
        ({"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "7,1"}, (), ["0", "1", "0"]),  # indices of those that are visible
        ({"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "4"}, (2, 5), ["4", "4", "4"]),
        ({"MUJOCO_GL": "osmesa"}, (2, 5), [None] * 3),
        ({}, (2, 5), [None] * 3),
    ],
)
def test_workers_render_on_the_gpus_in_turn(
    given: dict[str, str],
    gpus: tuple[int, ...],
    devices: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(8):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    found = []
    for worker in range(3):
        with monkeypatch.context() as patch:
            for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "CUDA_VISIBLE_DEVICES"):
                patch.setenv(name, "")
                patch.delenv(name)
            for name, value in given.items():
                patch.setenv(name, value)
            choose_egl_device(worker, gpus, tmp_path)
            found.append(os.environ.get("MUJOCO_EGL_DEVICE_ID"))
    assert found == devices


BUSY = [sys.executable, "-S", "-c", "while True: pass"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The kernel's accounts, as the test says."""
    seen = {"clock": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(FreeCpus, "_times", lambda _: (seen["clock"], seen["busy"], seen["own"]))
    return seen


def test_what_others_use_is_not_free(fake: dict[str, float]) -> None:
    cpus = FreeCpus()
    for seconds, busy, own, free in ((2, 3, 3, cpus.n), (2, 3, 1, cpus.n - 1), (1, 9, 0, 0), (1, 0, 5, cpus.n)):
        fake["clock"] += seconds
        fake["busy"] += busy
        fake["own"] += own
        assert cpus.look() == pytest.approx(max(0, free))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_our_own_work_and_that_of_children_is_free_for_us() -> None:
    with ExitStack() as stack:
        child = stack.enter_context(subprocess.Popen(BUSY))
        stack.callback(child.kill)
        cpus, deadline = FreeCpus(), time.monotonic() + 60
        before, begin = cpus._own_s(), sum(psutil.Process(child.pid).cpu_times()[:2])
        while sum(psutil.Process(child.pid).cpu_times()[:2]) - begin < 0.4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        used = cpus._own_s() - before
        assert used > 0.35, "the child's"
        child.kill()
        child.wait()
        assert cpus._own_s() - before >= used - 0.02, "what a child has used stays ours"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_the_work_of_low_priority_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It delays operations of several threads as any other."""
    cpus = FreeCpus()
    monkeypatch.setattr("rlframe.system.machine._STAT", tmp_path / "stat")
    ticks = {"user": 100, "nice": 200, "system": 300, "idle": 4000, "iowait": 5000, "irq": 10, "softirq": 20}
    cells = " ".join(map(str, ticks.values()))
    (tmp_path / "stat").write_text(f"cpu  9 9 9 9 9 9 9\ncpu{cpus._cpus[0]} {cells}\n")
    assert cpus._busy_s() == pytest.approx((100 + 200 + 300 + 10 + 20) / os.sysconf("SC_CLK_TCK"))
