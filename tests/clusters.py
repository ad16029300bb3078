"""Ray for tests: the marks of those that need a cluster, which takes seconds and some processes to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlframe.system.cluster import RayOptions, connect

OF_CLUSTER = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # a cluster starts, and its actors import torch
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


def with_cluster(test: Any) -> Any:
    for mark in OF_CLUSTER:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, connected to a cluster of two CPUs."""
    found = pytest.importorskip("ray")
    connect(RayOptions(num_cpus=2, object_store_gb=0.1))
    yield found
    found.shutdown()
