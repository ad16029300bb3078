"""Training 2N env_steps is training N, going on from the snapshot in a new process, and N more: bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.core.struct import as_numpy
from rlframe.record.chunks import Chunked
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from tests.algos.resumed import CASES, HALF, WHOLE, train
from tests.processes import DEADLINE_S


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every case, the second half of each trained by another process."""
    directory = tmp_path_factory.mktemp("resumed")
    for case in CASES:
        train(case, directory / case, HALF, resume=False)
    command = [sys.executable, "-m", "tests.algos.resumed", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=2 * DEADLINE_S, env=environment, stdout=subprocess.DEVNULL)
    return directory


def same(one: Any, other: Any, path: str) -> int:
    """How many arrays two states have, which are the same."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        return sum(same(one[key], other[key], f"{path}/{key}") for key in one)
    if isinstance(one, list | tuple):
        assert len(one) == len(other), path
        return sum(same(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(one, other, strict=True)))
    if isinstance(one, Chunked):
        one, other = one.whole(), other.whole()
    if hasattr(one, "shape"):
        np.testing.assert_array_equal(as_numpy(one), as_numpy(other), err_msg=path)
        return 1
    assert one == other, path
    return 0


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_as_one_that_never_stopped(case: str, resumed: Path, tmp_path: Path) -> None:
    train(case, tmp_path, WHOLE, resume=False)
    whole = load_snapshot(resolve_snapshot(tmp_path / "run_0"))[0]
    parts = load_snapshot(resolve_snapshot(resumed / case / "run_0"))[0]
    assert whole["algo"]["progress"]["updates"] > 40
    for state in (whole, parts):
        del state["runner"]["elapsed_s"]
        state["algo"]["replay"]["reader"].pop("state", None)  # of memory before an episode begins: nobody reads it
    assert same(whole, parts, case) > 20
