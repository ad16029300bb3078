"""The gain of AsyncRl, sampling and learning at the same time, where each takes as long as the other; and its cost.

    python -m benchmarks.runners
    python -m benchmarks.runners rounds=9 only=balanced out=runners.json
    python -m benchmarks.runners small=true     a smoke test; its numbers mean nothing

What is compared, on two cores, with 8 environments whose step burns 200 us of CPU time and batches of 8 time steps:

  balanced   learning burns 200 us for each row, on one thread, as long as stepping; policy and value of 64x64 act.
             AsyncRl has SerialSampler's process on one core and the learner on the other. MinibatchRl has both cores:
             with SerialSampler, which does the same work on one thread and uses one core at a time; and with CpuSampler
             and two workers, which steps on both cores and then learns on one. If a row takes s to step and s to learn,
             these take 2 s and 1.5 s, and AsyncRl takes s. So the ratios are at best 2 and 1.5, if a core is as fast
             next to a busy one as alone. The bare work, on one core and split over both, shows whether it is.
  impala     IMPALA with the same network, whose learning takes a small part of that time: AsyncRl against SerialSampler
             alone. The loss is the cost of copying batches, publishing parameters and handing over.
  uneven     IMPALA on four environments, of which one sleeps 20 ms in each step: AsyncRl with one sampler that waits
             for it, serial and with four workers, and with runner.n_samplers=4, whose samplers wait for nobody.

Method: as in sampling.py. Each contender is built and warmed up in separate processes, then they take turns of
`seconds` for `rounds` rounds; a ratio is the median of the ratios within each round. Turns begin with full slots, two
batches of the 150 of a turn. No row is logged, nothing is evaluated. Run it on an idle machine.
"""

from __future__ import annotations

from functools import partial

import chz

from benchmarks.parts import ours
from benchmarks.parts.chosen import chosen
from benchmarks.parts.running import ENV, MODEL, UNEVEN, impala_of, loop, make_in_turn, make_side_by_side
from benchmarks.parts.synthetic import agree
from benchmarks.parts.turns import Comparison, Contender, Group, run_groups
from rlframe.samplers import cpu, serial
from rlframe.system.machine import limit_threads

T, B = 8, 8


def balanced() -> Group:
    """Sampling takes as long as learning."""
    alone, split = serial.Config(batch_T=T, batch_B=B), cpu.Config(batch_T=T, batch_B=B, n_workers=2)
    apart, one, two = "AsyncRl, serial", "MinibatchRl, serial", "MinibatchRl, 2 workers"
    bare, both = "the bare work", "the bare work, split"
    contenders = [
        Contender(bare, loop),
        Contender(both, loop, n_processes=2),
        Contender(apart, make_side_by_side(alone), n_cores=2),
        Contender(one, make_in_turn(alone), n_cores=2),
        Contender(two, make_in_turn(split), n_cores=2),
    ]
    comparisons = [
        Comparison("AsyncRl over MinibatchRl, the same sampler", (apart,), ((one,),), 1.6),
        Comparison("AsyncRl over MinibatchRl with 2 workers", (apart,), ((two,),)),
        Comparison("AsyncRl over the bare work, split", (apart,), ((both,),)),
        Comparison("the bare work, split over two cores or not", (both,), ((bare,),)),
    ]
    return Group(contenders, comparisons)


def impala() -> Group:
    """Learning takes less than sampling."""
    config = serial.Config(batch_T=T, batch_B=B)
    apart, alone = "AsyncRl, IMPALA", "SerialSampler alone"
    contenders = [
        Contender(apart, make_side_by_side(config, impala_of), n_cores=2),
        Contender(alone, partial(ours.sampling, config, ENV, MODEL)),
    ]
    return Group(contenders, [Comparison("IMPALA over its sampler", (apart,), ((alone,),), 0.8)])


def uneven() -> Group:
    """One of four environments is slow."""
    one, many = serial.Config(batch_T=T, batch_B=4), cpu.Config(batch_T=T, batch_B=4, n_workers=4)
    serial_, workers, free = "one serial sampler", "one sampler of 4 workers", "4 samplers"
    contenders = [
        Contender(serial_, make_side_by_side(one, impala_of, env=UNEVEN), n_cores=2),
        Contender(workers, make_side_by_side(many, impala_of, env=UNEVEN), n_cores=2),
        Contender(free, make_side_by_side(one, impala_of, 4, UNEVEN), n_cores=2),
    ]
    comparisons = [
        Comparison("4 samplers over a serial one", (free,), ((serial_,),), 2.5),
        Comparison("4 samplers over one of 4 workers", (free,), ((workers,),), 2.5),
    ]
    return Group(contenders, comparisons)


GROUPS = {"balanced": balanced, "impala": impala, "uneven": uneven}


def main(rounds: int = 5, seconds: float = 2.0, only: str = "", small: bool = False, out: str = "") -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn.    only: groups, separated by commas.
        small: one very short round.    out: JSON file for all results."""
    limit_threads()
    groups = chosen(only, GROUPS)
    agree()
    rounds, seconds = (1, 0.05) if small else (rounds, seconds)
    run_groups({name: GROUPS[name]() for name in groups}, rounds, seconds, out)


if __name__ == "__main__":
    chz.entrypoint(main)
