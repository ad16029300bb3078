"""The replay benchmark runs; its numbers need an idle machine."""

import json
import sys
from pathlib import Path

import pytest

from tests.fork_server import run_python

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["stable_baselines3"])
def test_the_replay_benchmark_runs(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    out = tmp_path / "replay.json"
    done = run_python(
        [sys.executable, "-m", "benchmarks.replay", "small=true", "only=cheetah,prioritized", f"out={out}"],
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    groups = json.loads(out.read_text())["groups"]
    assert list(groups) == ["cheetah", "prioritized"]
    assert "Stable-Baselines3 / rlframe" in groups["cheetah"]["ratios"]
