"""Stop and resume runs, and compare two runs."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe import launch
from rlframe.core.struct import as_numpy
from rlframe.core.types import Trajectory
from rlframe.record.codec import ChunkedArray
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.runners import Runner
from tests.tables import read_csv

ANYWHERE = ("affinity=none", "device=cpu", "threads=1")
TRUST = "trust=true"  # for environments of tests, which are not part of rlframe
OF_TIME = ("time/", "memory/", "system/")  # metrics that differ between equal runs


def words(case: str, directory: Path) -> list[str]:
    """The command line of a run in `directory`."""
    own = case.split()
    given = {word.partition("=")[0] for word in own}
    return [*own, *(word for word in ANYWHERE if word.partition("=")[0] not in given), f"log_dir={directory}"]


def stopped_at(env_steps: int, case: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *changed: str) -> None:
    """Train, stop by SIGTERM after `env_steps`, and resume to the end with changed words."""
    stop_at(env_steps, case, directory, monkeypatch)
    assert launch.main([f"resume={directory / 'run_0'}", TRUST, *changed]) == 0


def stop_at(env_steps: int, case: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and stop by SIGTERM after `env_steps`."""
    record_episodes = Runner.record_episodes

    def record_and_stop(runner: Runner) -> list[Trajectory]:
        if runner.env_steps >= env_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return record_episodes(runner)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "record_episodes", record_and_stop)
        assert launch.main(words(case, directory)) == 128 + signal.SIGTERM


def assert_resumed_exactly(case: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compare a run with one that is stopped after 90 env_steps and resumed; the directory of the whole one."""
    whole, parts = directory / "whole", directory / "parts"
    assert launch.main(words(case, whole)) == 0
    stopped_at(90, case, parts, monkeypatch)
    assert_runs_equal(whole / "run_0", parts / "run_0")
    return whole / "run_0"


def assert_runs_equal(one: Path, other: Path, rank: int = 0) -> None:
    """Compare logs except times, episodes, and the state of a rank in the last snapshots."""
    logs = [log(run) for run in (one, other)]
    assert len(logs[0]) > 2
    assert logs[0] == logs[1]
    episodes = [(run / "episodes.csv").read_text() for run in (one, other)]
    assert episodes[0] == episodes[1], "no episode is lost or doubled"
    assert count_equal(last_state(one, rank), last_state(other, rank), "state") > 5


def log(run: Path) -> list[dict[str, str]]:
    """The rows of progress.csv without metrics of time."""
    rows = read_csv(run / "progress.csv")[1]
    return [{name: cell for name, cell in row.items() if not name.startswith(OF_TIME)} for row in rows]


def last_state(run: Path, rank: int = 0) -> Any:
    """The state in the newest snapshot, without the elapsed time."""
    state = load_snapshot(resolve_snapshot(run), rank)[0]
    del state["runner"]["elapsed_s"]
    latest = state["runner"]["latest"]
    state["runner"]["latest"] = {name: value for name, value in latest.items() if not name.startswith(OF_TIME)}
    for key in state:
        if key.partition("/")[0] == "algo":
            state[key].get("replay", {}).get("reader", {}).pop("state", None)  # of rows before an episode: not read
    return state


def count_equal(one: Any, other: Any, path: str) -> int:
    """Assert that two states are equal, and count their arrays."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        known = one.keys() - {"space"}  # not sampled from, and Gymnasium seeds it at random
        return sum(count_equal(one[key], other[key], f"{path}/{key}") for key in known)
    if isinstance(one, list | tuple):
        assert len(one) == len(other), path
        return sum(count_equal(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(one, other, strict=True)))
    one, other = (each.to_numpy() if isinstance(each, ChunkedArray) else each for each in (one, other))
    if hasattr(one, "shape"):
        np.testing.assert_array_equal(as_numpy(one), as_numpy(other), err_msg=path)
        return 1
    assert one == other or (one is not None and math.isnan(one) and math.isnan(other)), path
    return 0
