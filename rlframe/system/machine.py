"""The machine: its cores and GPUs, memory and allocator settings, and how many threads libraries may use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlframe.system.parent_death import QUEUE_CPUS


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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_BYTES = 1 << 30
_LARGE_PAGE = 1 << 21


def keep_freed_memory() -> bool:
    """Tell glibc to reuse blocks up to 1 GiB instead of returning them; False where the C library is another.

    A Nature-CNN training step of 256 rows on two threads takes about a third less time with it. The first half of a
    GiB is in large pages, where Linux has them for who asks: a processor finds those sooner than small ones, and DQN on
    Pong trains 1.03 times as fast.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)  # absent from musl
    if mallopt is None:
        return False
    kept = bool(mallopt(_M_MMAP_THRESHOLD, _BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _BYTES))
    if kept:
        _ask_for_large_pages(libc, _BYTES // 2)
    return kept


def _ask_for_large_pages(libc: ctypes.CDLL, n_bytes: int) -> None:
    """For the next so many bytes of the heap: address space, of which none is taken before it is written to."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(n_bytes)
    if block is None:
        return
    first = -(-block // _LARGE_PAGE) * _LARGE_PAGE
    libc.madvise(first, block + n_bytes - first, mmap.MADV_HUGEPAGE)  # refused by a kernel without: then as it was
    libc.free(block)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """For imports: what they leave stays, so Python need not search it for garbage, neither meanwhile nor later.

    Of the two seconds in which torch is imported that takes 0.3. Where that is imported already, nothing is done.
    """
    if "torch" in sys.modules:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def resident_bytes() -> int:
    """Resident memory of this process and all that descend from it; pages that several share count for each."""
    this = psutil.Process()
    total = this.memory_info().rss
    for child in this.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            total += child.memory_info().rss
    return total


# What wants the cores while torch's threads have nothing to do, and how many turns of a loop OpenMP's then stay awake;
# None: as many as it thinks best, which with GNU's are 300,000.
_SPINS = {"nothing": None, "update": 10_000, "processes": 10_000, "threads": 1_000}


def variables(beside: str) -> Mapping[str, str]:
    """For the environment of a process that trains. NumPy has one thread: what it multiplies is small.

    OpenMP's threads wait awake between the operations of one update, and sleep some time after it. How long says what
    is `beside` them. Two threads, on two cores of an AMD EPYC:

    - `nothing`, as with one environment, which this process steps or waits for: they stay awake. TD3 on HalfCheetah
      trains 1.09 times as fast as where they sleep as soon as with `processes`.
    - `update`, a part of which is computed by a thread of its own while one environment steps (see algos.dqn): DQN on
      Pong takes 172 steps/s, and 137 where they stay awake.
    - `processes` that step environments: SAC on eight HalfCheetahs takes 990 steps/s, and 660 where they stay awake.
      They do between the operations of one update: SAC on one HalfCheetah takes 200 steps/s, and 140 where they sleep
      as soon as with `threads`.
    - `threads` that do, as Atari's and EnvPool's, while this process acts for images: PPO on Pong takes 910 steps/s,
      and 770 where they sleep as late as with `processes`.
    """
    spins = _SPINS[beside]
    return {"OPENBLAS_NUM_THREADS": "1"} | ({} if spins is None else {"GOMP_SPINCOUNT": str(spins)})


def limit_threads(beside: str = "threads") -> None:
    """Set these variables, unless the environment says otherwise; before NumPy and torch are first imported."""
    for name, value in variables(beside).items():
        if name != "GOMP_SPINCOUNT" or "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault(name, value)


def n_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
