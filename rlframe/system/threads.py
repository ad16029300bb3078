"""How many threads there may be, and how they wait: OpenMP's spin while idle, and take the cores of environments."""

import os
import sys
from collections.abc import Mapping

# OpenMP's threads sleep soon after an update, though not between its operations: SAC on HalfCheetah with two of them
# takes 240 steps/s, and 160 where they sleep at once. NumPy has one: what it multiplies, for acting, is small.
VARIABLES: Mapping[str, str] = {"GOMP_SPINCOUNT": "30000", "OPENBLAS_NUM_THREADS": "1"}


def limit_threads() -> None:
    """Set these variables, unless the environment says otherwise; before NumPy and torch are first imported."""
    for name, value in VARIABLES.items():
        if name != "GOMP_SPINCOUNT" or "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault(name, value)


def n_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
