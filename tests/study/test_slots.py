"""The slots of affinity codes on several machines."""

import os
import sys
from math import inf

import pytest

from rlframe.core.errors import ConfigError
from rlframe.study import process
from rlframe.study.plan import Slot, describe_slots, make_slots
from rlframe.system.affinity import Cpu, Gpu, Topology, read_topology
from rlframe.system.parent_death import QUEUE_CPUS


def machine(n_cores: int, n_gpus: int = 0, quota: float = inf, threads: int = 1) -> Topology:
    cpus = tuple(Cpu(i, i % n_cores, 0, 0) for i in range(n_cores * threads))
    return Topology(cpus, tuple(Gpu(i, 0) for i in range(n_gpus)), quota)


def codes(slots: list[Slot]) -> list[str]:
    return [slot.code for slot in slots]


def test_auto_makes_one_slot_per_core_with_its_hyperthreads() -> None:
    slots = make_slots("auto", machine(2, threads=2), n_runs=8)
    assert codes(slots) == ["1cpr_0slt", "1cpr_1slt"]
    assert [slot.affinity.master for slot in slots] == [(0, 2), (1, 3)]


def test_auto_gives_few_runs_more_cores_each() -> None:
    assert [slot.affinity.master for slot in make_slots("auto", machine(8), n_runs=2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert codes(make_slots("auto", machine(2), n_runs=1)) == ["2cpr"]


def test_auto_makes_one_slot_per_gpu_unless_the_runs_use_none() -> None:
    slots = make_slots("auto", machine(8, n_gpus=2), n_runs=6)
    assert [(slot.affinity.gpus, slot.affinity.master) for slot in slots] == [
        ((0,), (0, 1, 2, 3)),
        ((1,), (4, 5, 6, 7)),
    ]
    assert len(make_slots("auto", machine(8, n_gpus=2), n_runs=6, on_gpu=False)) == 8


def test_auto_in_a_container_with_a_cpu_quota_pins_nothing() -> None:
    slots = make_slots("auto", machine(8, quota=2.5), n_runs=6)
    assert codes(slots) == ["none", "none"]
    assert all(slot.affinity.master == () for slot in slots)


def test_none_and_codes_without_runs_are_one_slot() -> None:
    assert codes(make_slots("none", machine(4), n_runs=9)) == ["none"]
    assert codes(make_slots("4cpu", machine(4), n_runs=9)) == ["4cpu"]


def test_several_runs_share_a_gpu_and_no_core() -> None:
    slots = make_slots("2rpg", machine(8, n_gpus=2), n_runs=9)
    assert [slot.affinity.gpus for slot in slots] == [(0,), (0,), (1,), (1,)]
    assert [slot.affinity.master for slot in slots] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
def test_a_run_that_is_pinned_reads_the_cpus_of_its_queue_which_its_code_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUEUE_CPUS, raising=False)
    given, whole, before = process._environment()[QUEUE_CPUS], read_topology(), os.sched_getaffinity(0)
    monkeypatch.setenv(QUEUE_CPUS, given)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert read_topology() == whole
    finally:
        os.sched_setaffinity(0, before)


def test_a_code_that_names_a_slot_or_does_not_fit_raises_an_error() -> None:
    with pytest.raises(ConfigError, match="leave out slt"):
        make_slots("1cpr_0slt", machine(2), n_runs=2)
    with pytest.raises(ConfigError, match="8cpu is more than"):
        make_slots("8cpu_1cpr", machine(2), n_runs=2)


def test_the_description_lists_cpus_and_gpus() -> None:
    text = describe_slots(make_slots("1gpr", machine(4, n_gpus=2), n_runs=2))
    assert text.splitlines() == [
        "2 slots:",
        "  slot 0  CPU 0,1, GPU 0  (affinity=1gpr_0slt)",
        "  slot 1  CPU 2,3, GPU 1  (affinity=1gpr_1slt)",
    ]
