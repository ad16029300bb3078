"""What holds for every test process and for those that it starts: one compute thread, and imports done once.

Networks in tests are tiny. With more threads, or threads that wait awake, processes on few cores wait for one another.
Bytecode is written whatever the environment says: to compile the tests takes each process longer than all its imports.
Nothing waits for a disk: temporary folders are in memory, if there is enough. Imports and collected tests stay for the
whole session: garbage collection passes them over.
"""

import functools
import gc
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
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
import torch  # noqa: E402

import tests.other_bits  # noqa: E402, F401
from rlframe.record import directory  # noqa: E402
from rlframe.samplers import auto  # noqa: E402
from rlframe.system.service import Supervision  # noqa: E402
from tests.ranks.forked import forking_ranks  # noqa: E402
from tests.samplers.made import keeps_bits  # noqa: E402

torch.set_num_threads(1)

# All children of a test process are forked by one server, which imports what any of them may need.
_set_preload = multiprocessing.set_forkserver_preload
_set_preload(["tests.preloaded"])
multiprocessing.set_forkserver_preload = lambda modules: _set_preload([*modules, "tests.preloaded"])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip comparisons of bits between batches of different sizes where the processor does not keep them."""
    marker = item.get_closest_marker("same_bits")
    if marker and not keeps_bits(*marker.args):
        pytest.skip("this processor rounds a row differently among other rows")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is quick by where it is."""
    for item in items:
        place = item.path.relative_to(TESTS)
        if str(place) in QUICK or place.parts[0] in QUICK:
            item.add_marker("quick")


@pytest.fixture(autouse=True, scope="session")
def _own_cache_and_no_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests do not read or change what the user's runs remember of this machine, and survive no loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(os, "fsync", lambda descriptor: None)
        git = functools.cache(lambda folder, of=directory._git: of())
        patch.setattr(directory, "_git", lambda: git(os.getcwd()))
        patch.setattr(auto, "Supervision", lambda timeout_s, **_: Supervision(timeout_s))  # forked too, not spawned
        yield


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Ranks that the test starts in this process are forked."""
    with forking_ranks():
        yield


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    """A test that pins this process, as a run does, leaves it to the next one as it was."""
    before = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    yield
    if before and os.sched_getaffinity(0) != before:
        os.sched_setaffinity(0, before)
