"""Episodes of ES with two workers over those with one, beside what two cores give a bare loop.

    python -m benchmarks.evolution
    python -m benchmarks.evolution rounds=9 only=swimmer out=evolution.json
    python -m benchmarks.evolution small=true     a smoke test; its numbers mean nothing

What is compared: whole iterations of runner=evolution with algo=es, 32 directions and a network of 32 units, without
logs and evaluations, on the group's environment. Its episodes all have the same length, so that episodes and env steps
are the same measure.

  1 worker, 2 workers   sampler=cpu, each worker on a core of its own; the process that learns shares the cores.
  serial                the same in the process that learns.
  bare loop, split      the environment stepped by a plain loop with that network in NumPy, in one process and in two on
                        a core each: what two cores give together, which on shared machines may be less than twice.

Method: as in sampling.py: built and warmed up in separate processes, then turns of `seconds` for `rounds` rounds; a
ratio is the median of the ratios within each round. Run it on an idle machine.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import chz
import gymnasium
import numpy as np

from benchmarks.parts.chosen import chosen
from benchmarks.parts.ours import worker_cpus
from benchmarks.parts.turns import Comparison, Contender, Group, Unit, run_groups
from rlframe.algos import es
from rlframe.core.types import BatchSpec
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.runners import EvolutionRl, EvolutionRlConfig, Learner
from rlframe.samplers import cpu, serial
from rlframe.system.machine import limit_threads

ENVS = {"pendulum": ("Pendulum-v1", ()), "swimmer": ("Swimmer-v5", ("mujoco",))}  # and what they need
HIDDEN, N_STEPS = 32, 10**9
ASKED = 1.8  # where the bare loop gives that


def evolving(env: str, n_workers: int, stack: ExitStack) -> Unit:
    """Generations of ES; 0 workers: in this process."""
    algo_config, config = es.Config(), EvolutionRlConfig(n_steps=N_STEPS)
    sampler_config: Any = cpu.Config(n_workers=n_workers) if n_workers else serial.Config()
    envs = config.make_envs(sampler_config, EnvConfig(env), 0, worker_cpus(n_workers))
    stack.callback(envs.close)
    spaces_ = envs.observation_space, envs.action_space
    agent = algo_config.make_agent(*spaces_, ModelConfig(hidden=(HIDDEN,)), 0)
    sampler = config.make_sampler(sampler_config, algo_config, envs, agent, 0)
    algo = algo_config.make_algorithm(agent, BatchSpec(1, 2 * algo_config.directions), N_STEPS)
    runner = EvolutionRl(sampler, Learner(agent, algo), config)

    def unit() -> int:
        before = runner.env_steps
        runner.iterate()
        return runner.env_steps - before

    return unit


def looping(id_: str, stack: ExitStack) -> Unit:
    """Episodes of plain Gymnasium, with the network in plain NumPy."""
    env = gymnasium.make(id_)
    stack.callback(env.close)
    rng, n_in, n_out = np.random.default_rng(0), env.observation_space.shape[0], env.action_space.shape[0]
    first, last = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((n_in, HIDDEN), (HIDDEN, n_out)))

    def unit() -> int:
        observation, _ = env.reset(seed=1)
        for n in range(1, 10**6):
            action = np.tanh(np.tanh(observation.astype(np.float32).dot(first)).dot(last))
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                return n
        raise RuntimeError(f"{id_} has no time limit")

    return unit


def group(name: str) -> Group:
    id_, needs = ENVS[name]
    here, one, two, bare, split = "ES, serial", "ES, 1 worker", "ES, 2 workers", "the bare loop", "the bare loop, split"
    contenders = [
        Contender(bare, partial(looping, id_)),
        Contender(split, partial(looping, id_), n_processes=2),
        Contender(here, partial(evolving, id_, 0)),
        Contender(one, partial(evolving, id_, 1), n_cores=2),
        Contender(two, partial(evolving, id_, 2), n_cores=2),
    ]
    comparisons = [
        Comparison("ES, 2 workers over 1", (two,), ((one,),), ASKED),
        Comparison("the bare loop, split over two cores or not", (split,), ((bare,),)),
        Comparison("ES, serial over the bare loop", (here,), ((bare,),)),
    ]
    return Group(contenders, comparisons, needs)


def main(rounds: int = 5, seconds: float = 3.0, only: str = "", small: bool = False, out: str = "") -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn.    only: groups, separated by commas.
        small: one very short round.    out: JSON file for all results."""
    limit_threads()
    names = chosen(only, ENVS)
    rounds, seconds = (1, 0.05) if small else (rounds, seconds)
    run_groups({name: group(name) for name in names}, rounds, seconds, out)


if __name__ == "__main__":
    chz.entrypoint(main)
