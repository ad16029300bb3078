"""How many threads there may be, and how they wait: OpenMP's spin while idle, and take the cores of environments."""

import os
import sys
from collections.abc import Mapping


def variables(env_threads: bool = True) -> Mapping[str, str]:
    """For the environment of a process that trains. NumPy has one thread: what it multiplies is small.

    OpenMP's threads wait awake between the operations of one update, and sleep soon after it: with two of them SAC on
    HalfCheetah takes 200 steps/s, and 140 where they sleep at once. They do sleep at once with `env_threads`, where
    environments step on threads of their own, as Atari's and EnvPool's: PPO on Pong takes 910 steps/s, not 770.
    """
    return {"GOMP_SPINCOUNT": "1000" if env_threads else "10000", "OPENBLAS_NUM_THREADS": "1"}


def limit_threads(env_threads: bool = True) -> None:
    """Set these variables, unless the environment says otherwise; before NumPy and torch are first imported."""
    for name, value in variables(env_threads).items():
        if name != "GOMP_SPINCOUNT" or "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault(name, value)


def n_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
