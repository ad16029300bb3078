"""One run's part of the machine, dealt out evenly to the ranks that it has there."""

from __future__ import annotations

from dataclasses import replace

from rlframe.core.errors import ConfigError
from rlframe.system.affinity import Affinity, Cpu, Gpu, Topology, plan


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
