"""The machine's CPUs, GPUs and quota, what of them is used, and settings of a process: malloc, collection, threads."""

import contextlib
import ctypes
import gc
import math
import mmap
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlframe.core.memory import control_groups
from rlframe.system.parent_death import QUEUE_CPUS


@dataclass(frozen=True)
class Cpu:
    """A logical CPU. Hyperthread siblings share (socket, core)."""

    id: int
    core: int
    socket: int
    node: int


@dataclass(frozen=True)
class Gpu:
    """A GPU by its CUDA index in this process; node -1 means unknown, as in the kernel."""

    index: int
    node: int


@dataclass(frozen=True)
class Topology:
    cpus: tuple[Cpu, ...]
    gpus: tuple[Gpu, ...]
    quota: float  # CPUs' worth of time granted by the cgroup; inf: unlimited
    pinnable: bool = True  # whether the operating system can pin processes


def read_topology(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> Topology:
    """Read what this process may use of the machine; unknown facts get simple defaults.

    Args:
        root: the folder that holds /sys, /proc and /dev.
        allowed: logical CPUs to use; default: those of the run queue, else those that the system allows.
    """
    allowed = map(int, os.environ[QUEUE_CPUS].split(",")) if allowed is None and QUEUE_CPUS in os.environ else allowed
    if allowed is None and sys.platform != "linux":
        cpus = tuple(Cpu(i, i, 0, 0) for i in range(os.cpu_count() or 1))
        return Topology(cpus, (), math.inf, pinnable=False)
    ids = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    quota = min(map(_granted, control_groups("cpu", root)))
    return Topology(tuple(_read_cpu(root, id_) for id_ in ids), _read_gpus(root), quota)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _number(text: str, default: int) -> int:
    """The number at the start of a text; the kernel's -1 means unknown."""
    match = re.match("[0-9]+", text)
    return int(match[0]) if match else default


def _read_cpu(root: Path, id_: int) -> Cpu:
    """Identify a core by its lowest sibling: core_id repeats on the dies of some packages, and is -1 on some boards."""
    folder = root / f"sys/devices/system/cpu/cpu{id_}"
    core = _number(_read(folder / "topology/thread_siblings_list"), id_)
    socket = _number(_read(folder / "topology/physical_package_id"), 0)
    nodes = sorted(int(link.name.removeprefix("node")) for link in folder.glob("node[0-9]*"))
    return Cpu(id_, core, socket, nodes[0] if nodes else 0)


def _read_gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA GPUs in CUDA's order by PCI address; mixed models need CUDA_DEVICE_ORDER=PCI_BUS_ID."""
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
        else:  # CUDA ignores all entries after an invalid one
            break
    return tuple(Gpu(index, node) for index, node in enumerate(visible))


def choose_egl_device(worker: int, gpus: Sequence[int] = (), root: Path = Path("/")) -> None:
    """Make this process, worker number `worker`, render MuJoCo's images on the GPU whose turn it is.

    `gpus`: CUDA indices; empty: all of them. Only with MUJOCO_GL=egl; a MUJOCO_EGL_DEVICE_ID that is set already stays.
    """
    if os.environ.get("MUJOCO_GL", "").lower() == "egl" and (known := gpus or [gpu.index for gpu in _read_gpus(root)]):
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(known[worker % len(known)]))


def _granted(cgroup: Path) -> float:
    """Quota over period of a cgroup. Version 2 writes both, or `max`, to one file; version 1 writes -1 for no limit."""
    words = _read(cgroup / "cpu.max").split() or [_read(cgroup / f"cpu.cfs_{word}_us") for word in ("quota", "period")]
    if len(words) == 2 and all(re.fullmatch("[0-9]+", word) for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return math.inf


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_BYTES = 1 << 30
_LARGE_PAGE = 1 << 21


def retain_freed_memory() -> bool:
    """Let glibc reuse freed blocks up to 1 GiB instead of returning them; False with another C library.

    Updates of images then take less time. The first 0.5 GiB uses huge pages where Linux supports them.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)  # glibc only
    if mallopt is None:
        return False
    retained = bool(mallopt(_M_MMAP_THRESHOLD, _BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _BYTES))
    if retained:
        _request_huge_pages(libc)
    return retained


def _request_huge_pages(libc: ctypes.CDLL) -> None:
    """Request huge pages for the next half of _BYTES of the heap. This reserves address space only."""
    n_bytes = _BYTES // 2
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(n_bytes)
    if block is None:
        return
    first = -(-block // _LARGE_PAGE) * _LARGE_PAGE
    libc.madvise(first, block + n_bytes - first, mmap.MADV_HUGEPAGE)  # fails harmlessly without huge pages
    libc.free(block)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection where much is made that stays: imports, compilation.

    What the import of torch creates is excluded from later collections too.
    """
    importing, collects = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if importing:
            gc.freeze()
        if collects:
            gc.enable()


# Loop iterations for which idle OpenMP threads spin; None: the default, 300,000 with GNU OpenMP.
_SPINS = {"nothing": None, "processes": 10_000, "threads": 1_000}


def thread_variables(concurrent: str) -> Mapping[str, str]:
    """Environment variables of a training process. NumPy gets one thread: its matrices are small.

    OpenMP threads spin between the operations of an update and sleep some time after it. How long they spin depends on
    what needs the cores in between, `concurrent`: `nothing` (one environment in this process), `processes` that step
    environments, or `threads` that do (Atari, EnvPool).
    """
    spins = _SPINS[concurrent]
    return {"OPENBLAS_NUM_THREADS": "1"} | ({} if spins is None else {"GOMP_SPINCOUNT": str(spins)})


def limit_threads(concurrent: str = "threads") -> None:
    """Set `thread_variables` unless the environment sets them already. Call before importing NumPy and torch."""
    for name, value in thread_variables(concurrent).items():
        if name != "GOMP_SPINCOUNT" or "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault(name, value)


def n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 100
_REFRESH = 10  # looks between searches for new children
_BUSY = (0, 1, 2, 5, 6)  # columns of /proc/stat: user, nice, system, irq, softirq


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """All processes below one, as Linux lists them by thread; psutil would read every process of the machine."""
    if not os.path.exists(f"/proc/{process.pid}/task/{process.pid}/children"):
        return list(process.children(recursive=True))
    found, pids = list[psutil.Process](), [process.pid]
    for pid in pids:  # and those that are found
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended meanwhile
            if pid != process.pid:
                found.append(psutil.Process(pid))
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


class FreeCpus:
    """Compares the CPU time of all processes with that of this one and its children, since the last look."""

    def __init__(self) -> None:
        self.n = n_cpus()
        self._cpus = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        self._children: list[psutil.Process] = []
        self._n_looks = 0
        self._seen = self._times()

    def look(self) -> float:
        """CPUs that were free for this process since the last look, from 0 to n; n where the system does not tell."""
        before, self._seen = self._seen, self._times()
        seconds, busy, own = (now - then for now, then in zip(self._seen, before, strict=True))
        if not self._cpus or seconds <= 0.0:
            return float(self.n)
        return min(float(self.n), max(0.0, self.n - max(0.0, busy - own) / seconds))

    def _times(self) -> tuple[float, float, float]:
        """Seconds: the clock, CPU time of all on our CPUs, CPU time of this process and its children."""
        return time.monotonic(), self._busy_s(), self._own_s()

    def _busy_s(self) -> float:
        if not self._cpus:
            return 0.0
        names = {f"cpu{cpu}" for cpu in self._cpus}
        lines = (line.split() for line in _STAT.read_text().splitlines())
        return sum(int(cells[1 + i]) for cells in lines if cells[0] in names for i in _BUSY) / _TICKS

    def _own_s(self) -> float:
        """CPU seconds of this process and of its children; those that have ended count through their parent."""
        me = psutil.Process()
        if self._n_looks % _REFRESH == 0:
            self._children = children_of(me)
        self._n_looks += 1
        total = sum(me.cpu_times()[:4])
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(child.cpu_times()[:4])
        return float(total)


class Usage:
    """Measures between two calls of `metrics`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._seconds: dict[int, float] = {}  # CPU time of each process so far
        self._measured_at = time.monotonic()
        self.metrics()

    def metrics(self) -> dict[str, float]:
        """Resident memory in MB, shared pages counted in each process, and CPUs used since the last call."""
        resident: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for process in (self._process, *children_of(self._process)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has exited meanwhile
                times = process.cpu_times()
                resident[process.pid] = process.memory_info().rss
                seconds[process.pid] = times.user + times.system
        before, self._seconds = self._seconds, seconds
        start, self._measured_at = self._measured_at, time.monotonic()
        used = sum(now - before.get(pid, 0.0) for pid, now in seconds.items())
        return {
            "memory/resident_mb": sum(resident.values()) / 1e6,
            "memory/main_mb": resident.get(self._process.pid, 0) / 1e6,
            "system/cpus_used": used / max(self._measured_at - start, 1e-9),
            "system/cpus_busy": psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1),
        }
