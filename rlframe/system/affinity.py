"""Which CPUs and GPUs each process of a run gets: the arithmetic that deals out what the machine has.

`read_topology` asks the operating system, `plan` is a pure function of what it found, and `pin` carries it out. Cores
are physical: hyperthread siblings always go together, and sockets and NUMA nodes come from the topology.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rlframe.core.errors import ConfigError
from rlframe.system.machine import Cpu, Gpu, Topology, read_topology

__all__ = ["TOKENS", "Affinity", "Cpu", "Gpu", "Topology", "pin", "plan", "read_topology"]

TOKENS = {  # of an affinity code, each with a number before it
    "cpu": "physical cores in all; what the machine has, unless given",
    "gpu": "GPUs in all, 0 for none; what the machine has, unless given",
    "cpr": "cores per run",
    "gpr": "GPUs per run",
    "rpg": "runs per GPU, which share it",
    "res": "cores reserved for other uses: the first ones",
    "wkr": "workers per run",
    "slt": "which of the slots, from 0",
}
_MAY_BE_ZERO = ("gpu", "res", "slt")
_N_SHOWN = 8  # workers that a description lists one by one

_log = logging.getLogger("rlframe")


_Core = tuple[Cpu, ...]  # the siblings that may be used, at least one


@dataclass(frozen=True)
class Affinity:
    """The part of the machine that one run gets: a slot among equal ones. CPUs are logical; none means not pinned.

    The main process, which acts and learns, has all of the slot: synchronous workers sleep when it computes. Where a
    process of its own samples, the two divide the cores between them, and the workers are on those of the sampler.
    """

    master: tuple[int, ...]  # CPUs of the main process
    workers: tuple[tuple[int, ...], ...]  # CPUs of each worker
    threads: int  # for the main process to compute with: the slot's cores, within the quota
    gpus: tuple[int, ...]  # as CUDA numbers them in this process
    slot: int
    n_slots: int
    sampler: tuple[int, ...] = ()  # CPUs of the sampler's own process
    sampler_threads: int = 0  # for it to compute with; 0: there is no such process

    def describe(self) -> str:
        """The plan in a few lines, to be printed when a run starts."""
        pinned = [_spans(cpus) for cpus in self.workers if cpus]
        if len(pinned) > _N_SHOWN:
            pinned[_N_SHOWN // 2 : -1] = ["..."]
        workers = f"{len(self.workers)}: {' | '.join(pinned) or 'not pinned'}" if self.workers else "none"
        sampler = f"  sampler  {_spans(self.sampler) or 'not pinned'}\n" if self.sampler_threads else ""
        return (
            f"affinity:{f' slot {self.slot} of {self.n_slots}' if self.n_slots > 1 else ''}\n"
            f"  master   {_spans(self.master) or 'not pinned'}\n"
            f"{sampler}"
            f"  workers  {workers}\n"
            f"  threads  {self.threads}\n"
            f"  gpus     {_spans(self.gpus) or 'none'}"
        )


def _spans(ids: Iterable[int]) -> str:
    """Ids, compressed: 0-7,16-23."""
    spans: list[list[int]] = []
    for id_ in sorted(ids):
        if spans and id_ == spans[-1][-1] + 1:
            spans[-1][1:] = [id_]
        else:
            spans.append([id_])
    return ",".join("-".join(map(str, span)) for span in spans)


def pin(cpus: tuple[int, ...]) -> None:
    """Keep the calling thread, and those it will start, on `cpus`; nothing happens without any, or where no OS can."""
    if sys.platform == "linux" and cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            _log.warning(f"not pinned to CPUs {_spans(cpus)}, which may be offline or out of our cpuset: {error}")


def plan(code: str, topology: Topology, n_workers: int = 0, slot: int = 0, learner_cores: int = 0) -> Affinity:
    """Deal out the machine: pure, and the same for every process that asks.

    Args:
        code: `auto`, one slot with everything, not pinned if the quota is less than the cores; `none`, that and never
            pinned; or tokens such as `16cpu_4gpu_1gpr`, in any order (see TOKENS). There are as many slots as cpr, or
            gpr and rpg, make of the totals; gpu alone means 1gpr; without any of these there is one. A total that is
            given must come out even; of one that is not, what the machine has, the rest stays idle.
        n_workers: of the run; 0: one per core of the slot, within the quota.
        slot: which part of the machine, from 0; `slt` in the code wins.
        learner_cores: of the slot, for the main process alone, the rest being for a process that samples; of a slot of
            one core both have that. 0: nothing samples apart.
    Raises:
        ConfigError: the code cannot be read, or asks for what the machine has not or for what does not divide.
    """
    try:
        return _plan(code, topology, n_workers, slot, learner_cores)
    except ConfigError as error:
        raise ConfigError(f"affinity={code}: {error}") from None


def _plan(code: str, topology: Topology, n_workers: int, slot: int, learner_cores: int) -> Affinity:
    tokens = {} if code in ("auto", "none") else _tokens(code)
    cores = _cores(topology.cpus)
    shape = _divide(tokens, len(cores), len(topology.gpus))
    slot = tokens.get("slt", slot)
    if not 0 <= slot < shape.n_slots:
        fit = f"{shape.n_slots} runs of {shape.cores} cores and {shape.gpus} GPUs fit side by side"
        raise ConfigError(f"there is no slot {slot}: {fit}, so slots go from 0 to {shape.n_slots - 1}")
    gpus = [shape.gpus_of(k, topology.gpus) for k in range(shape.n_slots)]
    near = [list(dict.fromkeys(gpu.node for gpu in of_slot)) for of_slot in gpus]
    mine = _deal(cores[tokens.get("res", 0) :], near, shape.cores)[slot]
    within_quota = max(1, int(min(len(mine), topology.quota / shape.n_slots)))
    order = _by_distance(mine, near[slot])
    learner, sampler = _apart(order, learner_cores)
    threads = min(len(learner), max(1, within_quota - (1 if learner_cores else 0)))
    sampler_threads = max(1, min(len(sampler), within_quota - threads)) if learner_cores else 0
    n = _n_workers(tokens, n_workers) or sampler_threads or within_quota
    # A container that is granted a part of its CPUs' time has neighbours there. If each of them pinned itself to the
    # first ones they would fight for these while the others idle: leave it to the scheduler, unless told.
    alone = topology.quota >= len(cores)
    pinned = topology.pinnable and (bool(tokens) or (code == "auto" and alone))
    return Affinity(
        master=tuple(sorted(_ids(learner))) if pinned else (),
        workers=tuple(_ids([sampler[i % len(sampler)]]) if pinned else () for i in range(n)),
        threads=threads,
        gpus=tuple(gpu.index for gpu in gpus[slot]),
        slot=slot,
        n_slots=shape.n_slots,
        sampler=tuple(sorted(_ids(sampler))) if pinned and learner_cores else (),
        sampler_threads=sampler_threads,
    )


def _apart(cores: list[_Core], learner_cores: int) -> tuple[list[_Core], list[_Core]]:
    """The cores of the main process, nearest to the GPU, and those of who samples; the same without `learner_cores`."""
    if not learner_cores or len(cores) == 1:
        return cores, cores
    if learner_cores >= len(cores):
        raise ConfigError(
            f"{learner_cores} cores for learning leave none of {len(cores)} for sampling; "
            f"use runner.learner_cores={len(cores) - 1} or less"
        )
    return cores[:learner_cores], cores[learner_cores:]


def _tokens(code: str) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for token in code.split("_"):
        match = re.fullmatch("([0-9]{1,9})([A-Za-z]+)", token)
        name = match[2] if match else token.strip("0123456789")
        if not match or name not in TOKENS:
            near = difflib.get_close_matches(name, [*TOKENS, "auto", "none"], n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else "write auto, none or a code such as 16cpu_4gpu"
            raise ConfigError(f"{token!r} is no number before one of {', '.join(TOKENS)}; {hint}")
        if name in tokens:
            raise ConfigError(f"{tokens[name]}{name} and {token}: {name} can be given once only")
        tokens[name] = int(match[1])
        if tokens[name] == 0 and name not in _MAY_BE_ZERO:
            raise ConfigError(f"{token} ({TOKENS[name]}) must be at least 1{name}")
    return tokens


def _n_workers(tokens: dict[str, int], n_workers: int) -> int:
    if n_workers < 0:
        raise ConfigError(f"n_workers={n_workers} must be at least 0")
    if n_workers and tokens.get("wkr", n_workers) != n_workers:
        raise ConfigError(f"{tokens['wkr']}wkr contradicts n_workers={n_workers}; leave one of them out")
    return tokens.get("wkr", n_workers)


@dataclass(frozen=True)
class _Shape:
    """What all the slots are like."""

    n_slots: int
    cores: int  # per run
    gpus: int  # per run
    runs_per_gpu: int

    def gpus_of(self, slot: int, gpus: Sequence[Gpu]) -> Sequence[Gpu]:
        start = slot // self.runs_per_gpu * self.gpus
        return gpus[start : start + self.gpus]


def _divide(tokens: dict[str, int], n_cores: int, n_gpus: int) -> _Shape:
    """The arithmetic of the slots."""
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
        raise ConfigError(f"{n_slots} runs cannot share GPUs {runs_per_gpu} to each; use {_divisors(n_slots, 'rpg')}")
    return _Shape(n_slots, _even_cores(tokens, n_slots, n_cores), gpus, runs_per_gpu)


def _total(tokens: dict[str, int], name: str, noun: str, available: int, reserved: int) -> int:
    """How much there is to deal out."""
    left = available - reserved
    n = tokens.get(name, left)
    if n > left:
        less = f" less {reserved} reserved" if reserved else ""
        raise ConfigError(
            f"{n}{name} is more than the {available} {noun}{less} of this process; use at most {left}{name}"
        )
    return n


def _groups(tokens: dict[str, int], total: str, per: str, noun: str, available: int, size: int) -> int:
    """How many groups of `size` there are."""
    if total in tokens and available % size:
        raise ConfigError(f"{available} {noun} cannot be dealt {size} to a run; use {_divisors(available, per)}")
    if size > available:
        raise ConfigError(f"a run cannot get {size} {noun} of {available}")
    return available // size


def _even_gpus(n_slots: int, n_gpus: int) -> tuple[int, int]:
    """GPUs per run and runs per GPU, where the cores alone have said how many runs there are."""
    if n_gpus % n_slots == 0:
        return n_gpus // n_slots, 1
    if n_slots % n_gpus == 0:
        return 1, n_slots // n_gpus
    fitting = [n for n in range(n_gpus) if n == 0 or n % n_slots == 0 or n_slots % n == 0]
    raise ConfigError(f"{n_gpus} GPUs cannot be dealt evenly to {n_slots} runs; use {_or(fitting, 'gpu')}")


def _even_cores(tokens: dict[str, int], n_slots: int, n_cores: int) -> int:
    """Cores per run."""
    if "cpr" in tokens:
        return tokens["cpr"]
    if n_slots > n_cores:
        raise ConfigError(f"{n_slots} runs cannot get a core each of {n_cores}; use less gpu or rpg, or more gpr")
    cores, left = divmod(n_cores, n_slots)
    if left and "cpu" in tokens:
        raise ConfigError(f"{n_cores} cores cannot be dealt evenly to {n_slots} runs; use {cores * n_slots}cpu")
    return cores


def _divisors(n: int, name: str) -> str:
    return _or([d for d in range(1, n + 1) if n % d == 0], name)


def _or(numbers: Sequence[int], name: str) -> str:
    return " or ".join(", ".join(f"{number}{name}" for number in numbers).rsplit(", ", 1))


def _cores(cpus: Iterable[Cpu]) -> list[_Core]:
    """Logical CPUs grouped by physical core, in the order of their first ids."""
    cores: dict[tuple[int, int], list[Cpu]] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        cores.setdefault((cpu.socket, cpu.core), []).append(cpu)
    return [tuple(siblings) for siblings in cores.values()]


def _ids(cores: Iterable[_Core]) -> tuple[int, ...]:
    return tuple(cpu.id for core in cores for cpu in core)


def _deal(cores: list[_Core], near: Sequence[Sequence[int]], n: int) -> list[list[_Core]]:
    """`n` cores to each slot, given the NUMA nodes near each slot's GPUs.

    First everybody takes what is near; then those who found too little fill up from the nodes with most cores left,
    so that a slot without preference stays on one node where it fits.
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


def _by_distance(cores: Sequence[_Core], near: Sequence[int]) -> list[_Core]:
    """The order in which workers get cores: near the run's GPUs first, over the nodes in turn."""
    far = sorted({core[0].node for core in cores} - set(near))
    return _in_turn(cores, near) + _in_turn(cores, far)


def _in_turn(cores: Iterable[_Core], nodes: Sequence[int]) -> list[_Core]:
    """The cores on `nodes`: the first of each node, the second of each, and so on."""
    columns = [[core for core in cores if core[0].node == node] for node in nodes]
    return [core for row in zip_longest(*columns, fillvalue=()) for core in row if core]


def share(affinity: Affinity, topology: Topology, n_workers: int, rank: int, world_size: int) -> Affinity:
    """What one rank of this machine gets of the run's part: cores side by side, and GPUs of its own if they suffice.

    Args:
        affinity: the run's.    topology: what it was planned for.    n_workers: of each rank; 0: one a core of its own.
        rank, world_size: among the ranks of this machine.
    Raises:
        ConfigError: there are fewer cores than ranks.
    """
    if world_size == 1:
        return affinity
    gpus = _gpus_of(affinity, topology, rank, world_size)
    if not affinity.master:  # not pinned
        quota = max(1.0, affinity.threads / world_size)
        mine = plan("none", replace(topology, gpus=gpus, quota=quota), n_workers)
    else:
        cpus = _cpus_of(affinity, topology, rank, world_size)
        mine = plan("auto", Topology(cpus, gpus, float("inf"), topology.pinnable), n_workers)
    return replace(mine, slot=affinity.slot, n_slots=affinity.n_slots)


def _gpus_of(affinity: Affinity, topology: Topology, rank: int, world_size: int) -> tuple[Gpu, ...]:
    gpus = [gpu for gpu in topology.gpus if gpu.index in affinity.gpus]
    if len(gpus) >= world_size:
        n = len(gpus) // world_size
        return tuple(gpus[rank * n : rank * n + n])
    return tuple(gpus[rank % len(gpus) :][:1]) if gpus else ()


def _cpus_of(affinity: Affinity, topology: Topology, rank: int, world_size: int) -> tuple[Cpu, ...]:
    """Whole cores: hyperthread siblings stay together."""
    cores: dict[tuple[int, int], list[Cpu]] = {}
    for cpu in topology.cpus:
        if cpu.id in affinity.master:
            cores.setdefault((cpu.socket, cpu.core), []).append(cpu)
    n = len(cores) // world_size
    if not n:
        raise ConfigError(
            f"world_size={world_size} ranks on this machine cannot get a core each of {len(cores)}; use fewer ranks, "
            f"or affinity=none to let them share"
        )
    hand = list(cores.values())[rank * n : rank * n + n]
    return tuple(cpu for core in hand for cpu in core)
