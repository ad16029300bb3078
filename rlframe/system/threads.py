"""How many threads there may be, and how they wait: OpenMP's spin while idle, and take the cores of environments."""

import os
import sys
from collections.abc import Mapping

# What wants the cores while torch's threads have nothing to do, and how many turns of a loop OpenMP's then stay awake;
# None: as many as it thinks best, which with GNU's are 300,000.
_SPINS = {"nothing": None, "update": 10_000, "processes": 10_000, "threads": 1_000}


def variables(beside: str) -> Mapping[str, str]:
    """For the environment of a process that trains. NumPy has one thread: what it multiplies is small.

    OpenMP's threads wait awake between the operations of one update, and sleep some time after it. How long says what
    is `beside` them. Two threads, on two cores of an AMD EPYC:

    - `nothing`, as with one environment, which this process steps or waits for: they stay awake. TD3 on HalfCheetah
      trains 1.09 times as fast as where they sleep as soon as with `processes`.
    - `update`, a part of which is computed by a thread of its own while one environment steps (see algos.dqn): DQN on
      Pong takes 172 steps/s, and 137 where they stay awake.
    - `processes` that step environments: SAC on eight HalfCheetahs takes 990 steps/s, and 660 where they stay awake.
      They do between the operations of one update: SAC on one HalfCheetah takes 200 steps/s, and 140 where they sleep
      as soon as with `threads`.
    - `threads` that do, as Atari's and EnvPool's, while this process acts for images: PPO on Pong takes 910 steps/s,
      and 770 where they sleep as late as with `processes`.
    """
    spins = _SPINS[beside]
    return {"OPENBLAS_NUM_THREADS": "1"} | ({} if spins is None else {"GOMP_SPINCOUNT": str(spins)})


def limit_threads(beside: str = "threads") -> None:
    """Set these variables, unless the environment says otherwise; before NumPy and torch are first imported."""
    for name, value in variables(beside).items():
        if name != "GOMP_SPINCOUNT" or "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault(name, value)


def n_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
