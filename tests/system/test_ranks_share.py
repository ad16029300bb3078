"""The part of a run's machine that each of its ranks gets."""

from __future__ import annotations

import math

import pytest

from rlframe.core.errors import ConfigError
from rlframe.system.affinity import Affinity, Cpu, Gpu, Topology, affinity_share, plan

# Four cores of two hyperthreads: CPUs 0 and 4 are siblings, and so on; two GPUs.
MACHINE = Topology(tuple(Cpu(i, i % 4, 0, 0) for i in range(8)), (Gpu(0, 0), Gpu(1, 0)), math.inf)


def shares(code: str, world_size: int, topology: Topology = MACHINE, n_workers: int = 0) -> list[Affinity]:
    return [affinity_share(code, topology, n_workers, rank, world_size) for rank in range(world_size)]


def test_a_single_rank_gets_all() -> None:
    assert shares("auto", 1) == [plan("auto", MACHINE)]


def test_cores_are_dealt_whole_and_side_by_side_and_gpus_one_each() -> None:
    one, two = shares("auto", 2)
    assert (one.master, two.master) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert (one.workers, two.workers) == (((0, 4), (1, 5)), ((2, 6), (3, 7)))
    assert (one.gpus, two.gpus) == ((0,), (1,))
    assert one.threads == two.threads == 2


def test_ranks_beyond_the_gpus_share_them() -> None:
    assert [each.gpus for each in shares("auto", 4)] == [(0,), (1,), (0,), (1,)]


def test_a_slot_is_dealt_out_not_the_machine() -> None:
    one, two = shares("4cpu_2cpr_0gpu_1slt", 2)
    assert (one.master, two.master) == ((2, 6), (3, 7))
    assert (one.slot, one.n_slots, one.gpus) == (1, 2, ())


def test_what_is_said_of_workers_and_of_the_main_process_holds_in_each_rank() -> None:
    one, two = shares("1drv_1hpc_2wpc", 2)
    assert (one.master, one.workers, one.threads) == ((0,), ((1,), (1,)), 1)
    assert (two.master, two.workers, two.threads) == ((2,), ((3,), (3,)), 1)
    with pytest.raises(ConfigError, match=r"^affinity=2drv: 2drv leaves none of 2 cores for workers"):
        shares("2drv", 2)


def test_the_number_of_workers_in_a_code_is_that_of_each_rank() -> None:
    assert [len(each.workers) for each in shares("4cpu_1wkr", 2, Topology(MACHINE.cpus, (), math.inf))] == [1, 1]


def test_gpus_of_samplers_are_not_for_ranks() -> None:
    with pytest.raises(ConfigError, match=r"^affinity=2gpr_1sgr: 1sgr is for runs of one rank"):
        shares("2gpr_1sgr", 2)


def test_without_pins_threads_and_workers_are_dealt() -> None:
    one, two = shares("none", 2)
    assert one.master == two.master == ()
    assert one.threads == two.threads == len(one.workers) == 2
    assert [len(each.workers) for each in shares("none", 2, n_workers=3)] == [3, 3]


def test_more_ranks_than_cores_are_refused_unless_they_may_share() -> None:
    with pytest.raises(ConfigError, match="4 cores are too few for 8 ranks on this machine"):
        shares("auto", 8)
    assert [each.threads for each in shares("none", 8)] == [1] * 8
