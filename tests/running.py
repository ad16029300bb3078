"""What holds for a process that runs tests, as a plugin of pytest."""

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tests.other_bits  # noqa: F401
from rlframe.record import directory
from rlframe.samplers import auto
from rlframe.system.service import Supervision
from tests.ranks.forked import forking_ranks
from tests.samplers.made import keeps_bits

torch.set_num_threads(1)

# All children of a test process are forked by one server, which imports what any of them may need.
_set_preload = multiprocessing.set_forkserver_preload
_set_preload(["tests.preloaded"])
multiprocessing.set_forkserver_preload = lambda modules: _set_preload([*modules, "tests.preloaded"])


def pytest_collection(session: pytest.Session) -> None:
    """Import a share of all test files, another in each process, so that no two of them compile the same file."""
    worker, tests = os.getenv("PYTEST_XDIST_WORKER"), Path(__file__).parent
    if not worker or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted(tests.rglob("test_*.py"))
    for file in files[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        with suppress(Exception, pytest.skip.Exception):  # which is raised again when the file is collected
            importlib.import_module(".".join(file.relative_to(tests.parent).with_suffix("").parts))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip comparisons of bits between batches of different sizes where the processor does not keep them."""
    marker = item.get_closest_marker("same_bits")
    if marker and not keeps_bits(*marker.args):
        pytest.skip("this processor rounds a row differently among other rows")


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
