"""What a machine has that a run may use: its cores, GPUs and CPU time, as the operating system tells."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlframe.system.leash import QUEUE_CPUS


@dataclass(frozen=True)
class Cpu:
    """A logical CPU. Hyperthread siblings have (socket, core) in common."""

    id: int
    core: int
    socket: int
    node: int


@dataclass(frozen=True)
class Gpu:
    """A GPU by the index that CUDA gives it in this process; node -1 is unknown, as in the kernel."""

    index: int
    node: int


@dataclass(frozen=True)
class Topology:
    """What this process may use of the machine."""

    cpus: tuple[Cpu, ...]
    gpus: tuple[Gpu, ...]
    quota: float  # CPUs' worth of time that the cgroup grants; inf: unlimited
    pinnable: bool = True  # the operating system knows how to pin


def read_topology(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> Topology:
    """What this process may use of the machine; what cannot be found out is taken for the simplest case.

    Args:
        root: where /sys, /proc and /dev are looked for.
        allowed: logical CPUs that may be used; unless given, those of our queue, or that the system allows us.
    """
    allowed = map(int, os.environ[QUEUE_CPUS].split(",")) if allowed is None and QUEUE_CPUS in os.environ else allowed
    if allowed is None and sys.platform != "linux":
        cpus = tuple(Cpu(i, i, 0, 0) for i in range(os.cpu_count() or 1))
        return Topology(cpus, (), math.inf, pinnable=False)
    ids = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    return Topology(tuple(_read_cpu(root, id_) for id_ in ids), _read_gpus(root), _read_quota(root))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _number(text: str, default: int) -> int:
    """The number that a text starts with; the kernel's -1 for unknown is none."""
    match = re.match("[0-9]+", text)
    return int(match[0]) if match else default


def _read_cpu(root: Path, id_: int) -> Cpu:
    """A core goes by its lowest sibling: core_id is repeated on the dies of some packages, and -1 on some boards."""
    folder = root / f"sys/devices/system/cpu/cpu{id_}"
    core = _number(_read(folder / "topology/thread_siblings_list"), id_)
    socket = _number(_read(folder / "topology/physical_package_id"), 0)
    nodes = sorted(int(link.name.removeprefix("node")) for link in folder.glob("node[0-9]*"))
    return Cpu(id_, core, socket, nodes[0] if nodes else 0)


def _read_gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA's GPUs as CUDA numbers them: by PCI address, which needs CUDA_DEVICE_ORDER=PCI_BUS_ID if models differ."""
    addresses = [path.name.lower() for path in root.glob("proc/driver/nvidia/gpus/*")]
    addresses.sort(key=lambda address: (len(address), address))
    nodes = [_number(_read(root / f"sys/bus/pci/devices/{address}/numa_node"), -1) for address in addresses]
    nodes = nodes or [-1 for _ in root.glob("dev/nvidia[0-9]*")]
    visible: list[int] = []
    for name in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(nodes))))).split(","):
        if nodes and name.startswith(("GPU-", "MIG-")):
            visible.append(-1)
        elif name.strip().isdecimal() and int(name) < len(nodes):
            visible.append(nodes[int(name)])
        else:  # CUDA ignores whatever follows an invalid one
            break
    return tuple(Gpu(index, node) for index, node in enumerate(visible))


def _read_quota(root: Path) -> float:
    """The tightest limit on the way from the cgroup file system's root, which is a container's own, to our cgroup."""
    quota = math.inf
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        steps = [step for step in path.split("/") if step not in ("", "..")]
        for mount in ("cpu", controllers) if controllers else ("", "unified"):
            for depth in range(len(steps) + 1):
                quota = min(quota, _granted((root / "sys/fs/cgroup" / mount).joinpath(*steps[:depth])))
    return quota


def _granted(cgroup: Path) -> float:
    """Quota over period; version 2 writes both, or `max`, into one file, and version 1 writes -1 for no limit."""
    words = _read(cgroup / "cpu.max").split() or [_read(cgroup / f"cpu.cfs_{word}_us") for word in ("quota", "period")]
    if len(words) == 2 and all(re.fullmatch("[0-9]+", word) for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return math.inf
