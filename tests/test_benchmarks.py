"""The benchmarks run; what they measure is for a machine that has nothing else to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def smoke(tmp_path: Path, only: str) -> dict[str, list[dict[str, object]]]:
    """A smoke run of benchmarks/sampling.py: what it wrote to out=."""
    out = tmp_path / "sampling.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/sampling.py"), "small=true", f"only={only}", f"out={out}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_sampling_is_measured_beside_stable_baselines3(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    found = smoke(tmp_path, "cartpole8")
    assert len(found["rates"]) == 2
    assert [(ratio["group"], ratio["asked"]) for ratio in found["ratios"]] == [("cartpole8", 1.5)]


@pytest.mark.slow
def test_sampling_on_pong_is_measured_beside_its_parts(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    found = smoke(tmp_path, "pong8")
    assert len(found["rates"]) == 4
    assert [ratio["asked"] for ratio in found["ratios"]] == [0.9, 0.0]
