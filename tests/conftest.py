"""What holds for every test process and for those that it starts: one compute thread, and imports done once.

Networks in tests are tiny. With more threads, or threads that wait awake, processes on few cores wait for one another.
Bytecode is written whatever the environment says: to compile the tests takes each process longer than all its imports.
Nothing waits for a disk: temporary folders are in memory, if there is enough. Imports and collected tests stay for the
whole session: garbage collection passes them over. The process that only hands tests to others imports no torch.
"""

import gc
import os
import shutil
import sys
from pathlib import Path

TESTS = Path(__file__).parent
QUICK = {  # folders and files of pure functions, configurations, and rules for the code
    "agents",
    "core",
    "distributions",
    "kernels",
    "models",
    "ops",
    "rollout",
    "test_layering.py",
    "algos/test_losses.py",
    "algos/test_minibatches.py",
    "replay/test_transitions.py",
    "system/test_affinity.py",
    "experiment/test_presets.py",
    "experiment/test_trust.py",
    "experiment/test_tuning.py",
}
gc.disable()  # until all tests are collected
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ |= {**_ONE_THREAD, "OMP_WAIT_POLICY": "PASSIVE"}  # read by libraries when they are loaded: before torch is
_IN_MEMORY, _ENOUGH = "/dev/shm", 4e9  # bytes
if os.path.isdir(_IN_MEMORY) and shutil.disk_usage(_IN_MEMORY).free > _ENOUGH:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _IN_MEMORY)
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compile=auto compiles nothing, also in runs that a test ends early
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent), os.getenv("PYTHONPATH")]))

import pytest  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    if os.getenv("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.running")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is quick by where it is."""
    for item in items:
        place = item.path.relative_to(TESTS)
        if str(place) in QUICK or place.parts[0] in QUICK:
            item.add_marker("quick")
