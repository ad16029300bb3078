"""Affinity: known plans on recorded machines, properties on all of them, and errors."""

import logging
import math
import os
import pickle
import sys
from itertools import product

import pytest

from rlframe.core.errors import ConfigError
from rlframe.system.affinity import Affinity, Cpu, Gpu, Topology, pin, plan, read_topology

LAPTOP = Topology(tuple(Cpu(i, i % 4, 0, 0) for i in range(8)), (), math.inf)  # siblings 0/4, 1/5, 2/6, 3/7
HYBRID = Topology(  # an i7-1260P: four cores with siblings 0/1, 2/3, 4/5, 6/7, and eight without
    (*(Cpu(i, i // 2, 0, 0) for i in range(8)), *(Cpu(i, i, 0, 0) for i in range(8, 16))), (Gpu(0, -1),), math.inf
)
SERVER = Topology(  # two sockets of 32 cores, siblings 0/64 ... 63/127; four GPUs to each
    tuple(Cpu(i, i % 32, i % 64 // 32, i % 64 // 32) for i in range(128)),
    tuple(Gpu(i, i // 4) for i in range(8)),
    math.inf,
)
GAPS = Topology((Cpu(5, 5, 0, 0), Cpu(11, 11, 0, 0)), (), math.inf)
QUOTA = Topology(tuple(Cpu(i, i, 0, 0) for i in range(64)), (), 1.5)
CPUSET = Topology(  # of the server: twelve cores on its first socket and four on its second, where the GPU is
    tuple(Cpu(i, i % 64, i % 64 // 32, i % 64 // 32) for i in (*range(4, 16), *range(40, 44))), (Gpu(0, 1),), math.inf
)
MACHINES = {"laptop": LAPTOP, "hybrid": HYBRID, "server": SERVER, "gaps": GAPS, "quota": QUOTA, "cpuset": CPUSET}


def slots(code: str, topology: Topology, n_workers: int = 0) -> list[Affinity]:
    n = plan(code, topology, n_workers).n_slots
    return [plan(code, topology, n_workers, slot) for slot in range(n)]


def cores_of(affinity: Affinity, topology: Topology) -> set[tuple[int, int]]:
    return {(cpu.socket, cpu.core) for cpu in topology.cpus if cpu.id in affinity.master}


def test_a_laptop_gives_each_worker_a_core_with_both_siblings():
    assert plan("auto", LAPTOP) == Affinity(
        master=tuple(range(8)), workers=((0, 4), (1, 5), (2, 6), (3, 7)), threads=4, gpus=(), slot=0, n_slots=1
    )


def test_efficiency_cores_have_no_siblings_and_count_as_cores():
    affinity = plan("auto", HYBRID)
    assert affinity.workers[2:6] == ((4, 5), (6, 7), (8,), (9,))
    assert (len(affinity.workers), affinity.threads, affinity.gpus) == (12, 12, (0,))


def test_more_workers_than_cores_wrap_around():
    assert plan("auto", LAPTOP, n_workers=6).workers == ((0, 4), (1, 5), (2, 6), (3, 7), (0, 4), (1, 5))


def test_fewer_workers_than_cores_spread_over_the_nodes():
    assert plan("0gpu", SERVER, n_workers=4).workers == ((0, 64), (32, 96), (1, 65), (33, 97))


def test_fewer_workers_than_cores_sit_near_the_gpu_first():
    assert plan("auto", CPUSET, n_workers=6).workers == ((40,), (41,), (42,), (43,), (4,), (5,))


def test_none_pins_nothing_and_is_otherwise_auto():
    auto, none = plan("auto", SERVER, n_workers=3), plan("none", SERVER, n_workers=3)
    assert (none.master, none.workers) == ((), ((), (), ()))
    assert (none.threads, none.gpus, none.slot, none.n_slots) == (auto.threads, auto.gpus, auto.slot, auto.n_slots)


def test_a_sampler_apart_gets_the_cores_that_the_learner_leaves():
    affinity = plan("auto", LAPTOP, learner_cores=1)
    assert (affinity.master, affinity.sampler) == ((0, 4), (1, 2, 3, 5, 6, 7))
    assert affinity.workers == ((1, 5), (2, 6), (3, 7))
    assert (affinity.threads, affinity.sampler_threads) == (1, 3)
    assert "  sampler  1-3,5-7\n" in affinity.describe()
    assert "sampler" not in plan("auto", LAPTOP).describe()


def test_the_learners_cores_are_those_next_to_the_gpu():
    affinity = plan("auto", CPUSET, learner_cores=2)
    assert (affinity.master, affinity.workers[:3]) == ((40, 41), ((42,), (43,), (4,)))


def test_of_one_core_learner_and_sampler_both_have_it():
    affinity = plan("1cpu", GAPS, learner_cores=1)
    assert affinity.master == affinity.sampler == (5,)
    assert affinity.workers == ((5,),)


def test_two_cores_are_one_each():
    affinity = plan("auto", GAPS, learner_cores=1)
    assert (affinity.master, affinity.sampler, affinity.workers) == ((5,), (11,), ((11,),))


def test_cores_of_a_main_process_that_does_not_sample_are_a_key():
    with pytest.raises(ConfigError, match=r"1drv is for a main process that samples; .* use runner.learner_cores"):
        plan("1drv", LAPTOP, learner_cores=1)


def test_a_learner_that_would_leave_no_core_is_refused():
    with pytest.raises(
        ConfigError, match=r"4 cores for learning leave none of 4 .* use runner.learner_cores=3 or less"
    ):
        plan("auto", LAPTOP, learner_cores=4)


def test_a_sampler_apart_is_not_pinned_where_nothing_is():
    affinity = plan("none", SERVER, learner_cores=4)
    assert (affinity.master, affinity.sampler) == ((), ())
    assert (affinity.threads, affinity.sampler_threads, len(affinity.workers)) == (4, 60, 60)


def test_ids_with_gaps_are_used_as_they_are():
    affinity = plan("auto", GAPS)
    assert (affinity.master, affinity.workers, affinity.threads) == ((5, 11), ((5,), (11,)), 2)


def test_a_quota_bounds_threads_and_workers():
    affinity = plan("auto", QUOTA)
    assert (affinity.threads, len(affinity.workers)) == (1, 1)
    assert len(plan("auto", QUOTA, n_workers=4).workers) == 4


def test_slots_share_the_quota():
    topology = Topology(SERVER.cpus, (), 16.0)
    assert {affinity.threads for affinity in slots("16cpr", topology)} == {4}


def test_under_a_quota_auto_leaves_the_cpus_to_the_scheduler_and_a_code_does_not():
    assert plan("auto", QUOTA).master == ()
    assert plan("auto", QUOTA, n_workers=2).workers == ((), ())
    assert plan("2cpu", QUOTA).master == (0, 1)


def test_nothing_is_pinned_where_the_operating_system_cannot():
    topology = Topology(LAPTOP.cpus, (), math.inf, pinnable=False)
    affinity = plan("2cpr", topology, slot=1)
    assert (affinity.master, affinity.workers, affinity.threads) == ((), ((), ()), 2)


def test_eight_runs_of_one_gpu_get_eight_cores_each_on_its_node():
    runs = slots("64cpu_8gpu_1gpr", SERVER)
    assert [affinity.gpus for affinity in runs] == [(i,) for i in range(8)]
    assert [affinity.master[:8] for affinity in runs] == [tuple(range(8 * i, 8 * i + 8)) for i in range(8)]
    assert runs[4].workers[0] == (32, 96)


def test_few_cores_are_taken_from_the_nodes_of_the_gpus():
    assert [affinity.master for affinity in slots("8cpu_8gpu", SERVER)] == [
        (i, i + 64) for i in (*range(4), *range(32, 36))
    ]


def test_runs_that_find_no_core_near_their_gpu_take_the_others():
    assert [min(affinity.master) for affinity in slots("64cpu_4gpu_1gpr", SERVER)] == [0, 16, 32, 48]


def test_a_run_with_gpus_on_two_nodes_has_cores_on_both():
    topology = Topology(SERVER.cpus, (Gpu(0, 0), Gpu(1, 1)), math.inf)
    assert plan("4cpu_2gpu_2gpr", topology).workers == ((0, 64), (32, 96), (1, 65), (33, 97))


def test_runs_without_gpus_stay_on_one_node_where_they_fit():
    runs = slots("0gpu_12cpr", SERVER)
    assert [min(affinity.master) for affinity in runs] == [0, 32, 12, 44, 24]
    assert runs[4].master[:8] == tuple(range(24, 32))


@pytest.mark.parametrize(
    ("code", "n_slots", "n_cores", "gpus_of_last"),
    [
        ("16cpu", 1, 16, tuple(range(8))),
        ("16cpr", 4, 16, (6, 7)),
        ("4cpr", 16, 4, (7,)),
        ("8gpu", 8, 8, (7,)),
        ("2gpr", 4, 16, (6, 7)),
        ("3gpr", 2, 32, (3, 4, 5)),
        ("2rpg", 16, 4, (7,)),
        ("1gpu_3rpg", 3, 21, (0,)),
        ("1gpr_4cpr", 8, 4, (7,)),
        ("4cpr_16cpu_1gpr_4gpu", 4, 4, (3,)),
        ("2gpr_2rpg", 8, 8, (6, 7)),
        ("4res_1gpr", 8, 7, (7,)),
        ("24cpr_0gpu", 2, 24, ()),
        ("4cpr_8cpu_1gpr_2gpu", 2, 4, (1,)),
        ("64cpu_4gpu_4cpr", 16, 4, (3,)),
    ],
)
def test_affinity_codes_on_the_server(code: str, n_slots: int, n_cores: int, gpus_of_last: tuple[int, ...]):
    runs = slots(code, SERVER)
    assert len(runs) == n_slots
    assert {len(cores_of(affinity, SERVER)) for affinity in runs} == {n_cores}
    assert runs[-1].gpus == gpus_of_last


def test_reserved_cores_are_the_first_ones():
    assert plan("1res", LAPTOP).master == (1, 2, 3, 5, 6, 7)


def test_workers_and_slot_can_stand_in_the_code():
    affinity = plan("2cpr_3wkr_1slt", LAPTOP, slot=0)
    assert (affinity.slot, affinity.workers) == (1, ((2, 6), (3, 7), (2, 6)))


def test_the_order_of_tokens_does_not_matter():
    assert plan("8gpu_1gpr_64cpu", SERVER, slot=5) == plan("64cpu_8gpu_1gpr", SERVER, slot=5)


def test_a_worker_may_have_several_cores_which_are_on_one_node():
    assert plan("2cpw", LAPTOP).workers == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert plan("3cpw", LAPTOP, n_workers=2).workers == ((0, 4, 1, 5, 2, 6),) * 2
    nodes = [{topology_node(cpu) for cpu in cpus} for cpus in plan("0gpu_4cpu_2cpw", SERVER).workers]
    assert nodes == [{0}, {0}]
    nodes = [{topology_node(cpu) for cpu in cpus} for cpus in plan("8cpw", SERVER).workers]
    assert nodes == [{0}] * 4 + [{1}] * 4


def topology_node(cpu: int) -> int:
    """Of a CPU of SERVER."""
    return cpu % 64 // 32


def test_workers_of_alternating_groups_share_their_cores():
    assert plan("2wpc", LAPTOP).workers == ((0, 4), (1, 5), (2, 6), (3, 7)) * 2
    assert plan("2cpw_2wpc", LAPTOP).workers == ((0, 4, 1, 5), (2, 6, 3, 7)) * 2
    assert plan("2wpc_3wkr", LAPTOP).workers == ((0, 4), (1, 5), (2, 6))


def test_hyperthreads_may_be_left_idle():
    affinity = plan("1hpc", LAPTOP)
    assert (affinity.master, affinity.workers, affinity.threads) == ((0, 1, 2, 3), ((0,), (1,), (2,), (3,)), 4)
    assert plan("2hpc", HYBRID).workers == plan("auto", HYBRID).workers


def test_the_main_process_may_have_cores_of_its_own():
    affinity = plan("1drv", LAPTOP)
    assert (affinity.master, affinity.workers, affinity.threads) == ((0, 4), ((1, 5), (2, 6), (3, 7)), 1)
    assert affinity.cpus == tuple(range(8))
    assert (affinity.sampler, affinity.sampler_threads) == ((), 0)
    assert plan("2drv", CPUSET).master == (40, 41)  # next to the GPU
    assert len(plan("2drv", Topology(SERVER.cpus, (), 16.0)).workers) == 16


def test_samplers_may_have_the_last_gpus_of_a_run():
    affinity = plan("4gpr_2sgr_1slt", SERVER)
    assert (affinity.gpus, affinity.sampler_gpus) == ((4, 5, 6, 7), (6, 7))
    assert affinity.describe().endswith("gpus     4-7, of which for samplers 6-7")
    assert plan("4gpr", SERVER).sampler_gpus == ()


@pytest.mark.parametrize(
    ("code", "topology", "message"),
    [
        ("5cpw", LAPTOP, "5cpw is more than the 4 cores for workers; use 4cpw or less"),
        ("1drv_4cpw", LAPTOP, "4cpw is more than the 3 cores for workers"),
        ("4drv", LAPTOP, "4drv leaves none of 4 cores for workers; use less"),
        ("3hpc", LAPTOP, "3hpc is more than a core of this machine has"),
        ("1gpr_1sgr", SERVER, "1sgr leaves none of 1 GPUs of a run for learning; use 2gpr"),
        ("0wpc", LAPTOP, "must be at least 1wpc"),
        ("16cpu_4gpu_3gpr", SERVER, "4 GPUs cannot be divided into 3 per run; use 1gpr, 2gpr or 4gpr"),
        ("16cpu", GAPS, "16cpu is more than the 2 cores of this process; use at most 2cpu"),
        ("2gpu", HYBRID, "2gpu is more than the 1 GPUs of this process; use at most 1gpu"),
        ("4cpu_1res", LAPTOP, "4cpu is more than the 4 cores less 1 reserved of this process; use at most 3cpu"),
        ("4res", LAPTOP, "4res leaves no core of the 4"),
        ("1gpr", LAPTOP, "a run cannot get 1 of 0 GPUs"),
        ("8cpr", LAPTOP, "a run cannot get 8 of 4 cores"),
        ("4cpu_3cpr", LAPTOP, "4 cores cannot be divided into 3 per run; use 1cpr, 2cpr or 4cpr"),
        ("10cpu_4gpu", SERVER, "10 cores cannot be divided evenly among 4 runs; use 8cpu"),
        ("6cpr", SERVER, "8 GPUs cannot be divided evenly among 10 runs; use 0gpu, 1gpu, 2gpu or 5gpu"),
        ("16cpu_4cpr_8gpu_1gpr", SERVER, "16 cores at 4 a run make 4 runs, but 8 GPUs at 1 a run make 8"),
        ("64cpu_4cpr_8gpu_4rpg", SERVER, "make 16 runs, but 8 GPUs at 1 a run, each shared by 4, make 32"),
        ("12cpu_4cpr_2rpg", SERVER, "3 runs cannot share GPUs by 2; use 1rpg or 3rpg"),
        ("13rpg", HYBRID, "12 cores are too few for 13 runs"),
        ("2cpr_2slt", LAPTOP, "no slot 2: 2 runs of 2 cores and 0 GPUs fit; use a slot from 0 to 1"),
        ("4cpu_2cpu", LAPTOP, "4cpu and 2cpu: give cpu only once"),
        ("0cpr", LAPTOP, r"0cpr \(cores per run\) must be at least 1cpr"),
        ("4cpus", LAPTOP, "'4cpus' is not a number followed by one of .*did you mean cpu"),
        ("cpu4", LAPTOP, "'cpu4' is not a number"),
        ("2xyz", LAPTOP, "write auto, none or a code such as 16cpu_4gpu"),
        ("atuo", LAPTOP, "did you mean auto"),
        ("", LAPTOP, "'' is not a number"),
    ],
)
def test_impossible_codes_are_errors_with_the_arithmetic(code: str, topology: Topology, message: str):
    with pytest.raises(ConfigError, match=f"^affinity={code}: .*{message}"):
        plan(code, topology)


@pytest.mark.parametrize("slot", [-1, 1])
def test_auto_has_one_slot(slot: int):
    with pytest.raises(ConfigError, match=f"no slot {slot}"):
        plan("auto", LAPTOP, slot=slot)


def test_two_counts_of_workers_are_refused():
    with pytest.raises(ConfigError, match="2wkr contradicts n_workers=4"):
        plan("2wkr", LAPTOP, n_workers=4)
    with pytest.raises(ConfigError, match="n_workers=-1 must be at least 0"):
        plan("auto", LAPTOP, n_workers=-1)


CODES = [
    "_".join(tokens)
    for tokens in product(
        ["1cpr", "2cpr", "5cpr", "8cpu", "1res"], ["0gpu", "1gpr", "2gpr", "4gpu", "1rpg"], ["1wkr", "9wkr"]
    )
]


@pytest.mark.parametrize("topology", MACHINES.values(), ids=MACHINES)
def test_slots_are_equal_and_disjoint_and_hold_their_workers(topology: Topology):
    n_planned = 0
    for code in ["auto", *CODES]:
        try:
            runs = slots(code, topology)
        except ConfigError:
            continue
        n_planned += 1
        held = [cpu for affinity in runs for cpu in affinity.master]
        assert len(held) == len(set(held)), code
        assert set(held) <= {cpu.id for cpu in topology.cpus}, code
        used = [cores_of(affinity, topology) for affinity in runs]
        assert len({len(cores) for cores in used}) == 1, code
        assert sum(map(len, used)) == len(set().union(*used)), f"{code}: siblings are parted"
        for affinity in runs:
            assert affinity.threads >= 1
            assert all(set(cpus) <= set(affinity.master) for cpus in affinity.workers), code
            assert set(affinity.gpus) <= {gpu.index for gpu in topology.gpus}, code
        n_gpus = len({gpu for affinity in runs for gpu in affinity.gpus})
        assert "rpg" in code or "cpr" in code or n_gpus == sum(len(affinity.gpus) for affinity in runs), code
    assert n_planned >= 5


def test_the_description_is_short_and_says_everything():
    assert plan("64cpu_8gpu_2gpr", SERVER, slot=2).describe().splitlines() == [
        "affinity: slot 2 of 4",
        "  master   32-47,96-111",
        "  workers  16: 32,96 | 33,97 | 34,98 | 35,99 | ... | 47,111",
        "  threads  16",
        "  gpus     4-5",
    ]
    assert plan("none", LAPTOP).describe().splitlines()[1:3] == ["  master   not pinned", "  workers  4: not pinned"]
    assert plan("none", LAPTOP).describe().endswith("gpus     none")


def test_a_plan_can_be_sent_to_another_process():
    affinity = plan("auto", LAPTOP)
    assert pickle.loads(pickle.dumps(affinity)) == affinity


def test_this_machine_can_be_read_and_planned():
    topology = read_topology()
    affinity = plan("auto", topology)
    assert 1 <= affinity.threads <= len(topology.cpus)
    assert set(affinity.master) <= {cpu.id for cpu in topology.cpus}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
def test_pinning_keeps_to_the_cpus_and_none_leaves_all():
    before = os.sched_getaffinity(0)
    try:
        pin(())
        assert os.sched_getaffinity(0) == before
        pin((max(before),))
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
def test_a_kernel_that_refuses_is_a_warning(monkeypatch, caplog):
    def refuse(pid: int, cpus: tuple[int, ...]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with caplog.at_level(logging.WARNING, "rlframe"):
        pin((4, 5, 6))
    assert "not pinned to CPUs 4-6" in caplog.text
