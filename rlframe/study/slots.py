"""The slots of a study: parts of the machine that runs are dealt to, and what `auto` means for many runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlframe.core.errors import ConfigError, counted
from rlframe.system.affinity import Affinity, Topology, plan


@dataclass(frozen=True)
class Slot:
    """A place for one run at a time."""

    index: int
    code: str  # what its runs' `affinity=` says
    affinity: Affinity

    def where(self) -> str:
        """Its CPUs and GPUs, for a table."""
        gpus = f", GPU {','.join(map(str, self.affinity.gpus))}" if self.affinity.gpus else ""
        cpus = ",".join(map(str, self.affinity.master))
        return (f"CPU {cpus}" if cpus else "not pinned") + gpus


def deal(code: str, topology: Topology, n_runs: int, on_gpu: bool = True) -> list[Slot]:
    """All slots that an affinity code makes.

    Args:
        code: `none`: one, of everything, not pinned; a code without slt; or `auto`: a slot a GPU, the cores dealt
            evenly to them. Where there is no GPU, a slot a core, or fewer and larger ones if there are fewer runs than
            cores. A container that is granted less CPU time than it has cores gets a slot for each CPU granted, none
            pinned.
        on_gpu: runs use a GPU where there is one.
    Raises:
        ConfigError: the code does not fit the machine, or names a slot.
    """
    if re.search(r"(^|_)\d+slt(_|$)", code):
        raise ConfigError(f"affinity={code}: the runs of a study go to all slots; leave out slt")
    if code == "auto":
        code, n_copies = _auto(topology, max(1, n_runs), on_gpu)
        if n_copies > 1:
            return [Slot(index, code, plan(code, topology)) for index in range(n_copies)]
    n_slots = plan(code, topology).n_slots
    if n_slots == 1:
        return [Slot(0, code, plan(code, topology))]
    return [Slot(k, f"{code}_{k}slt", plan(code, topology, slot=k)) for k in range(n_slots)]


def _auto(topology: Topology, n_runs: int, on_gpu: bool) -> tuple[str, int]:
    """A code, and how many times it is to be had side by side as it is."""
    n_cores = len({(cpu.socket, cpu.core) for cpu in topology.cpus})
    n_gpus = len(topology.gpus)
    if n_gpus and on_gpu:
        return f"{min(n_gpus, n_cores, n_runs)}gpu_1gpr", 1
    if topology.quota < n_cores:
        return "none", max(1, min(int(topology.quota), n_runs))
    return f"{max(1, n_cores // n_runs)}cpr" + ("_0gpu" if n_gpus else ""), 1


def describe(slots: Sequence[Slot]) -> str:
    """What there is, in a few lines."""
    lines = [counted(len(slots), "slot") + ":"]
    lines += [f"  slot {slot.index}  {slot.where()}  (affinity={slot.code})" for slot in slots]
    return "\n".join(lines)
