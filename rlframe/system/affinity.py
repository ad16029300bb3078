"""Which CPUs and GPUs each process of a run gets.

`machine.read_topology` reads the machine, the pure function `plan` divides it into slots, and `pin` applies the result.
Cores are physical: hyperthread siblings stay together, and sockets and NUMA nodes come from the topology.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import NamedTuple

from rlframe.core.errors import ConfigError, prefixed, spans
from rlframe.system.affinity_code import TOKENS, WITHIN, tokens_of
from rlframe.system.machine import Cpu, Gpu, Topology, read_topology

__all__ = ["TOKENS", "Affinity", "Cpu", "Gpu", "Topology", "pin", "pinned", "plan", "read_topology"]

_N_SHOWN = 8  # workers listed one by one in a description

_log = logging.getLogger("rlframe")
_Core = tuple[Cpu, ...]  # its usable logical CPUs, at least one


@dataclass(frozen=True)
class Affinity:
    """The part of the machine for one run: one of several equal slots. CPUs are logical; empty means not pinned.

    The main process gets the whole slot, because synchronous workers sleep while it computes. If the sampler has its
    own process, the two divide the cores, and the workers use those of the sampler.
    """

    master: tuple[int, ...]  # CPUs of the main process
    workers: tuple[tuple[int, ...], ...]  # CPUs of each worker
    threads: int  # compute threads of the main process: the slot's cores, within the quota
    gpus: tuple[int, ...]  # CUDA indices in this process
    slot: int
    n_slots: int
    sampler: tuple[int, ...] = ()  # CPUs of the sampler process
    sampler_threads: int = 0  # its compute threads; 0: there is no sampler process
    sampler_gpus: tuple[int, ...] = ()  # those of `gpus` where sampler processes act, in turn; empty: by sampler.device

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs of the slot that are used; empty: not pinned."""
        return tuple(sorted({*self.master, *self.sampler, *chain(*self.workers)}))

    def describe(self) -> str:
        """The plan in a few lines, printed when a run starts."""
        pinned = [spans(cpus) for cpus in self.workers if cpus]
        if len(pinned) > _N_SHOWN:
            pinned[_N_SHOWN // 2 : -1] = ["..."]
        workers = f"{len(self.workers)}: {' | '.join(pinned) or 'not pinned'}" if self.workers else "none"
        sampler = f"  sampler  {spans(self.sampler) or 'not pinned'}\n" if self.sampler_threads else ""
        return (
            f"affinity:{f' slot {self.slot} of {self.n_slots}' if self.n_slots > 1 else ''}\n"
            f"  master   {spans(self.master) or 'not pinned'}\n"
            f"{sampler}"
            f"  workers  {workers}\n"
            f"  threads  {self.threads}\n"
            f"  gpus     {spans(self.gpus) or 'none'}"
            f"{f', of which for samplers {spans(self.sampler_gpus)}' if self.sampler_gpus else ''}"
        )


def pin(cpus: tuple[int, ...]) -> None:
    """Pin the calling thread, and threads it starts, to `cpus`. Does nothing if empty or not on Linux."""
    if sys.platform == "linux" and cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            _log.warning(f"not pinned to CPUs {spans(cpus)}, which may be offline or outside our cpuset: {error}")


@contextmanager
def pinned(cpus: tuple[int, ...]) -> Iterator[None]:
    """Pin the calling thread as `pin` does, and at the end to the CPUs that it had before."""
    before = os.sched_getaffinity(0) if sys.platform == "linux" else ()
    pin(cpus)
    try:
        yield
    finally:
        pin(tuple(before))


def plan(code: str, topology: Topology, n_workers: int = 0, slot: int = 0, learner_cores: int = 0) -> Affinity:
    """Divide the machine into slots and return one of them. A pure function: all processes compute the same plan.

    Args:
        code: `auto`: one slot with everything, not pinned if the quota is less than the cores. `none`: the same, never
            pinned. Else tokens such as `16cpu_4gpu_1gpr` in any order (see TOKENS): cpr, or gpr and rpg, give the
            number of slots; gpu alone means 1gpr; without any of these there is one slot. A total that is given must
            divide evenly; the rest of a default total stays idle.
        n_workers: per run; 0: one per core of the slot, within the quota.
        slot: index of the slot from 0; `slt` in the code overrides it.
        learner_cores: cores of the slot for the main process only, if a sampler process uses the rest; 0: no sampler
            process. With a single core, both use it.
    Raises:
        ConfigError: an invalid code, or more than the machine has, or totals that do not divide evenly.
    """
    with prefixed(f"affinity={code}"):
        tokens = tokens_of(code)
        return _plan(tokens, bool(tokens) or code == "auto", topology, n_workers, slot, learner_cores)


def _plan(
    tokens: Mapping[str, int], pins: bool, topology: Topology, n_workers: int, slot: int, learner_cores: int
) -> Affinity:
    """`pins`: unless there is no token and a quota."""
    cores = _cores(topology.cpus, tokens.get("hpc", 0))
    shape = _divide(tokens, len(cores), len(topology.gpus))
    slot = tokens.get("slt", slot)
    if not 0 <= slot < shape.n_slots:
        fit = f"{shape.n_slots} runs of {shape.cores} cores and {shape.gpus} GPUs fit"
        raise ConfigError(f"no slot {slot}: {fit}; use a slot from 0 to {shape.n_slots - 1}")
    starts = [k // shape.runs_per_gpu * shape.gpus for k in range(shape.n_slots)]
    gpus = [topology.gpus[start : start + shape.gpus] for start in starts]
    near = [list(dict.fromkeys(gpu.node for gpu in of_slot)) for of_slot in gpus]
    mine = _deal(cores[tokens.get("res", 0) :], near, shape.cores)[slot]
    within_quota = max(1, int(min(len(mine), topology.quota / shape.n_slots)))
    far = sorted({core[0].node for core in mine} - set(near[slot]))
    order = _in_turn(mine, near[slot]) + _in_turn(mine, far)  # nearest to the GPUs first
    learner, sampler = _split_learner(order, learner_cores, tokens.get("drv", 0))
    threads = min(len(learner), max(1, within_quota - (1 if learner_cores else 0)))
    sampler_threads = max(1, min(len(sampler), within_quota - threads)) if learner_cores else 0
    places = _places(sampler, tokens.get("cpw", 1))
    n_free = sampler_threads or min(within_quota, len(sampler))
    n = _n_workers(tokens, n_workers) or max(1, n_free // tokens.get("cpw", 1)) * tokens.get("wpc", 1)
    # A container with a CPU quota shares its CPUs with others. If each pinned itself to the first CPUs, the rest would
    # idle: leave it to the scheduler, unless a code asks for pinning.
    no_quota = topology.quota >= len(cores)
    pinned = topology.pinnable and pins and (bool(tokens) or no_quota)
    indices = tuple(gpu.index for gpu in gpus[slot])
    return Affinity(
        master=tuple(sorted(_ids(learner))) if pinned else (),
        workers=tuple(_ids(places[i % len(places)]) if pinned else () for i in range(n)),
        threads=threads,
        gpus=indices,
        slot=slot,
        n_slots=shape.n_slots,
        sampler=tuple(sorted(_ids(sampler))) if pinned and learner_cores else (),
        sampler_threads=sampler_threads,
        sampler_gpus=_sampler_gpus(indices, tokens.get("sgr", 0)),
    )


def _sampler_gpus(gpus: tuple[int, ...], n: int) -> tuple[int, ...]:
    if n and n >= len(gpus):
        raise ConfigError(f"{n}sgr leaves none of {len(gpus)} GPUs of a run for learning; use {n + 1}gpr")
    return gpus[len(gpus) - n :]


def _places(cores: list[_Core], size: int) -> list[list[_Core]]:
    """Cores of a worker, for as many workers as have some of their own; several are on one node where that can be."""
    if size > len(cores):
        raise ConfigError(f"{size}cpw is more than the {len(cores)} cores for workers; use {len(cores)}cpw or less")
    near = sorted(cores, key=lambda core: core[0].node) if size > 1 else cores
    return [near[start : start + size] for start in range(0, len(cores) - size + 1, size)]


def _split_learner(cores: list[_Core], learner_cores: int, own: int) -> tuple[list[_Core], list[_Core]]:
    """Cores of the main process, nearest to the GPU, and of workers or the sampler process; both get all by default.

    `learner_cores`: if there is a sampler process; `own`: of the main process that samples by workers.
    """
    if own and learner_cores:
        raise ConfigError(f"{own}drv is for a main process that samples; with runner=async_rl use runner.learner_cores")
    if own:
        if own >= len(cores):
            raise ConfigError(f"{own}drv leaves none of {len(cores)} cores for workers; use less, or leave drv out")
        return cores[:own], cores[own:]
    if not learner_cores or len(cores) == 1:
        return cores, cores
    if learner_cores >= len(cores):
        raise ConfigError(
            f"{learner_cores} cores for learning leave none of {len(cores)} for sampling; "
            f"use runner.learner_cores={len(cores) - 1} or less"
        )
    return cores[:learner_cores], cores[learner_cores:]


def _n_workers(tokens: Mapping[str, int], n_workers: int) -> int:
    if n_workers < 0:
        raise ConfigError(f"n_workers={n_workers} must be at least 0")
    if n_workers and tokens.get("wkr", n_workers) != n_workers:
        raise ConfigError(f"{tokens['wkr']}wkr contradicts n_workers={n_workers}; give only one of them")
    return tokens.get("wkr", n_workers)


class _Shape(NamedTuple):
    n_slots: int
    cores: int  # per run
    gpus: int  # per run
    runs_per_gpu: int


def _divide(tokens: Mapping[str, int], n_cores: int, n_gpus: int) -> _Shape:
    reserved = tokens.get("res", 0)
    if reserved >= n_cores:
        raise ConfigError(f"{reserved}res leaves no core of the {n_cores} that this process may use")
    n_cores = _total(tokens, "cpu", "cores", n_cores, reserved)
    n_gpus = _total(tokens, "gpu", "GPUs", n_gpus, 0)
    per_gpu = "gpr" in tokens or "rpg" in tokens or (tokens.get("gpu", 0) > 0 and "cpr" not in tokens)
    gpus, runs_per_gpu = tokens.get("gpr", 1), tokens.get("rpg", 1)
    runs = {}
    if "cpr" in tokens:
        runs["cpu"] = _groups(tokens, "cpu", "cpr", "cores", n_cores, tokens["cpr"])
    if per_gpu:
        runs["gpu"] = _groups(tokens, "gpu", "gpr", "GPUs", n_gpus, gpus) * runs_per_gpu
    n_slots = min(runs.values(), default=1)
    if any(runs[total] != n_slots for total in runs if total in tokens):
        shared = f", each shared by {runs_per_gpu}," if runs_per_gpu > 1 else ""
        raise ConfigError(
            f"{n_cores} cores at {tokens['cpr']} a run make {runs['cpu']} runs, "
            f"but {n_gpus} GPUs at {gpus} a run{shared} make {runs['gpu']}"
        )
    if not per_gpu:
        gpus, runs_per_gpu = _even_gpus(n_slots, n_gpus)
    elif n_slots % runs_per_gpu:
        raise ConfigError(f"{n_slots} runs cannot share GPUs by {runs_per_gpu}; use {_divisors(n_slots, 'rpg')}")
    return _Shape(n_slots, _even_cores(tokens, n_slots, n_cores), gpus, runs_per_gpu)


def _total(tokens: Mapping[str, int], name: str, noun: str, available: int, reserved: int) -> int:
    left = available - reserved
    n = tokens.get(name, left)
    if n > left:
        less = f" less {reserved} reserved" if reserved else ""
        raise ConfigError(
            f"{n}{name} is more than the {available} {noun}{less} of this process; use at most {left}{name}"
        )
    return n


def _groups(tokens: Mapping[str, int], total: str, per: str, noun: str, available: int, size: int) -> int:
    if total in tokens and available % size:
        raise ConfigError(f"{available} {noun} cannot be divided into {size} per run; use {_divisors(available, per)}")
    if size > available:
        raise ConfigError(f"a run cannot get {size} of {available} {noun}")
    return available // size


def _even_gpus(n_slots: int, n_gpus: int) -> tuple[int, int]:
    """GPUs per run and runs per GPU, if the number of runs follows from the cores."""
    if n_gpus % n_slots == 0:
        return n_gpus // n_slots, 1
    if n_slots % n_gpus == 0:
        return 1, n_slots // n_gpus
    fitting = [n for n in range(n_gpus) if n == 0 or n % n_slots == 0 or n_slots % n == 0]
    raise ConfigError(f"{n_gpus} GPUs cannot be divided evenly among {n_slots} runs; use {_or(fitting, 'gpu')}")


def _even_cores(tokens: Mapping[str, int], n_slots: int, n_cores: int) -> int:
    if "cpr" in tokens:
        return tokens["cpr"]
    if n_slots > n_cores:
        raise ConfigError(f"{n_cores} cores are too few for {n_slots} runs; use less gpu or rpg, or more gpr")
    cores, left = divmod(n_cores, n_slots)
    if left and "cpu" in tokens:
        raise ConfigError(f"{n_cores} cores cannot be divided evenly among {n_slots} runs; use {cores * n_slots}cpu")
    return cores


def _divisors(n: int, name: str) -> str:
    return _or([d for d in range(1, n + 1) if n % d == 0], name)


def _or(numbers: Sequence[int], name: str) -> str:
    return " or ".join(", ".join(f"{number}{name}" for number in numbers).rsplit(", ", 1))


def _cores(cpus: Iterable[Cpu], n_threads: int = 0) -> list[_Core]:
    """The cores, each with the first `n_threads` of its hyperthreads; 0: all."""
    cores: dict[tuple[int, int], list[Cpu]] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        cores.setdefault((cpu.socket, cpu.core), []).append(cpu)
    if n_threads > max(map(len, cores.values()), default=0):
        raise ConfigError(f"{n_threads}hpc is more than a core of this machine has; use less, or leave it out")
    return [tuple(siblings[: n_threads or None]) for siblings in cores.values()]


def _ids(cores: Iterable[_Core]) -> tuple[int, ...]:
    return tuple(cpu.id for core in cores for cpu in core)


def _deal(cores: list[_Core], near: Sequence[Sequence[int]], n: int) -> list[list[_Core]]:
    """`n` cores for each slot, given the NUMA nodes near each slot's GPUs.

    Each slot first takes cores near its GPUs; slots with too few then take cores of the nodes with most cores left, so
    that a slot without GPUs stays on one node if it fits.
    """
    left, hands = cores, []
    for nodes in near:
        hands.append(_in_turn(left, nodes)[:n])
        left = [core for core in left if core not in hands[-1]]
    for hand in hands:
        while len(hand) < n:
            nodes_left = [core[0].node for core in left]
            roomiest = max(sorted(set(nodes_left)), key=nodes_left.count)
            hand += _in_turn(left, [roomiest])[: n - len(hand)]
            left = [core for core in left if core not in hand]
    return [sorted(hand, key=lambda core: core[0].id) for hand in hands]


def _in_turn(cores: Iterable[_Core], nodes: Sequence[int]) -> list[_Core]:
    """The cores on `nodes`: the first of each node, the second of each, and so on."""
    columns = [[core for core in cores if core[0].node == node] for node in nodes]
    return [core for row in zip_longest(*columns, fillvalue=()) for core in row if core]


def affinity_share(
    code: str, topology: Topology, n_workers: int, rank: int, world_size: int, learner_cores: int = 0
) -> Affinity:
    """One rank's part of a run's affinity: contiguous cores, and its own GPUs if there are enough.

    Args:
        code, topology: of the run, as of `plan`; cpw, wpc, drv and hpc are of each rank.
        n_workers: per rank; 0: one per core of the rank.
        rank, world_size: among the ranks of this machine; ConfigError if it has fewer cores than ranks.
        learner_cores: of the rank, see `plan`.
    """
    if world_size == 1:
        return plan(code, topology, n_workers, 0, learner_cores)
    with prefixed(f"affinity={code}"):
        tokens = tokens_of(code)
        if "sgr" in tokens:
            raise ConfigError(f"{tokens['sgr']}sgr is for runs of one rank; leave it out with world_size and learners")
        within = {name: n for name, n in tokens.items() if name in WITHIN}
        pins = bool(tokens) or code == "auto"
        slot = {name: n for name, n in tokens.items() if name not in WITHIN}
        whole = _plan(slot, pins, topology, n_workers, 0, 0)
        gpus = _gpus_of(whole, topology, rank, world_size)
        if not whole.master:  # not pinned
            part = replace(topology, gpus=gpus, quota=max(1.0, whole.threads / world_size))
        else:
            cpus = _cpus_of(whole, topology, rank, world_size)
            part = Topology(cpus, gpus, float("inf"), topology.pinnable)
        mine = _plan(within, bool(whole.master), part, n_workers or tokens.get("wkr", 0), 0, learner_cores)
    return replace(mine, slot=whole.slot, n_slots=whole.n_slots)


def _gpus_of(affinity: Affinity, topology: Topology, rank: int, world_size: int) -> tuple[Gpu, ...]:
    gpus = [gpu for gpu in topology.gpus if gpu.index in affinity.gpus]
    if len(gpus) >= world_size:
        n = len(gpus) // world_size
        return tuple(gpus[rank * n : rank * n + n])
    return tuple(gpus[rank % len(gpus) :][:1]) if gpus else ()


def _cpus_of(affinity: Affinity, topology: Topology, rank: int, world_size: int) -> tuple[Cpu, ...]:
    cores = _cores(cpu for cpu in topology.cpus if cpu.id in affinity.master)
    n = len(cores) // world_size
    if not n:
        raise ConfigError(
            f"{len(cores)} cores are too few for {world_size} ranks on this machine (world_size, learners); use fewer, "
            f"or affinity=none to share cores"
        )
    return tuple(cpu for core in cores[rank * n : rank * n + n] for cpu in core)
