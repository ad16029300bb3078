"""Samplers in actors of Ray, beside the same sampler in a process of its own, and beside RLlib's environment runners.

    python -m benchmarks.ray_sampling
    python -m benchmarks.ray_sampling rounds=7 only=cartpole out=ray.json

What is compared, with policy and value of 64x64, which are sent anew for each batch of 128 time steps:

  cartpole   64 environments a sampler (rlframe: native, RLlib: its vector environment)
  cheetah    8 HalfCheetahs a sampler

The process of its own and the actor collect ahead, as with async_rl. Two actors have twice as many environments. RLlib
has one environment runner, asked for a batch after the last has come, and so has rlframe's actor in that comparison.

Method: as in sampling.py. Each contender has two cores and one torch thread a process. Use two idle cores. RLlib is no
dependency of rlframe: pip install "ray[rllib]".
"""

from __future__ import annotations

from functools import partial

import chz

from benchmarks.parts import remote
from benchmarks.parts.chosen import chosen
from benchmarks.parts.turns import Comparison, Contender, Group, run_groups
from rlframe.envs import EnvConfig
from rlframe.system.machine import limit_threads

ENVS = {"cartpole": (EnvConfig("CartPole-v1", backend="native"), 64), "cheetah": (EnvConfig("HalfCheetah-v5"), 8)}


def group(name: str) -> Group:
    """The samplers of one environment."""
    env, n = ENVS[name]
    own, one, two = "a process of its own", "one actor, ahead", "two actors, ahead"
    bare, bare_two = "serial sampler, here", "serial sampler, here and in a second process"
    asked, rllib = "one actor, asked", "RLlib, one environment runner"
    contenders = [
        Contender(own, partial(remote.in_process, env, n), n_cores=2),
        Contender(one, partial(remote.in_actors, env, n, 1), n_cores=2),
        Contender(two, partial(remote.in_actors, env, n, 2), n_cores=2),
        Contender(bare, partial(remote.here, env, n)),
        Contender(bare_two, partial(remote.here, env, n), n_processes=2),
        Contender(asked, partial(remote.in_one_actor_asked, env, n), n_cores=2),
        Contender(rllib, partial(remote.rllib, env.id, n), n_cores=2),
    ]
    comparisons = [
        Comparison("an actor over a process of its own", (one,), ((own,),), 0.8),
        Comparison("two actors over one", (two,), ((one,),), 1.6),
        Comparison("two samplers over one, without Ray", (bare_two,), ((bare,),)),
        Comparison("an actor over RLlib's", (asked,), ((rllib,),), 3.0),
    ]
    return Group(contenders, comparisons)


def main(rounds: int = 5, seconds: float = 3.0, only: str = "", out: str = "") -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn.    only: groups, separated by commas.
        out: JSON file for all results."""
    limit_threads()
    run_groups({name: group(name) for name in chosen(only, ENVS)}, rounds, seconds, out)


if __name__ == "__main__":
    chz.entrypoint(main)
