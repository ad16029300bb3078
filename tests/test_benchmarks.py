"""The benchmarks run; what they measure is for a machine that has nothing else to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import equal_clock
from benchmarks.parts.kept_rows import add_rows, rows_in
from tests.fork_server import run_python

ROOT = Path(__file__).parents[1]


def smoke(tmp_path: Path, only: str, name: str = "sampling") -> dict[str, list[dict[str, Any]]]:
    """A smoke run of one of the benchmarks: what it wrote to out=."""
    out = tmp_path / f"{name}.json"
    done = run_python(
        [sys.executable, "-m", f"benchmarks.{name}", "small=true", f"only={only}", f"out={out}"],
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_sampling_is_measured_beside_stable_baselines3(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    found = smoke(tmp_path, "cartpole8")
    assert len(found["rates"]) == 2
    assert [(ratio["group"], ratio["asked"]) for ratio in found["ratios"]] == [("cartpole8", 1.5)]


@pytest.mark.slow
def test_what_a_worker_costs_is_told_beside_rates(tmp_path: Path) -> None:
    found = smoke(tmp_path, "alternating,worker")
    assert [ratio["asked"] for ratio in found["ratios"]] == [1.3]
    assert [fact["asked"] for fact in found["facts"] if fact["asked"]] == [1.0, 60.0, 1.0, 60.0]


@pytest.mark.slow
def test_the_costs_of_the_queue_are_measured(tmp_path: Path) -> None:
    found = smoke(tmp_path, "queue", "study")
    assert set(found["queue"]) == {"cpu_s_per_run", "gap_s_max", "gap_s_median"}


def test_an_equal_clock_compares_the_last_returns_of_all_seeds_on_all_environments(tmp_path: Path) -> None:
    returns = {"HalfCheetah-v5": 10_574.0, "Hopper-v5": 18.791, "Walker2d-v5": 1974.3955}  # 1, 0 and 1/2 of TD3's
    rows = [("sb3_sac", env, seed, 600, 10_000, 60.0, 0.0) for env in returns for seed in (0, 1)]
    rows += [("sb3_sac", env, seed, 600, 20_000, 120.0, score) for env, score in returns.items() for seed in (0, 1)]
    for contender in ("rlframe_ppo", "rlframe_sac"):
        rows += [(contender, "Hopper-v5", 0, 1800, 20_000, 120.0, 1000.0)]
        rows += [(contender, "Hopper-v5", 0, 1800, 90_000, 720.0, 2000.0)]
    out = tmp_path / "curves.csv"
    assert rows_in(out, equal_clock.COLUMNS) == []
    add_rows(out, equal_clock.COLUMNS, [dict(zip(equal_clock.COLUMNS, (*row, "a CPU"), strict=True)) for row in rows])
    kept = rows_in(out, equal_clock.COLUMNS)
    assert equal_clock.table(equal_clock.within(kept, 600)).splitlines()[2:] == [
        "| rlframe SAC | - | 1,000 (n=1) | - | - |",
        "| Stable-Baselines3 SAC | 10,574 (n=2) | 19 (n=2) | 1,974 (n=2) | 0.50 |",
    ]
    assert equal_clock.table(equal_clock.within(kept, 1800)).splitlines()[2:] == [
        "| rlframe PPO | - | 2,000 (n=1) | - | - |",
        "| rlframe SAC | - | 2,000 (n=1) | - | - |",
    ]
    with pytest.raises(SystemExit, match="has times of a CPU, this is"):
        equal_clock.main({"contender": "sb3_sac", "out": str(out)})


@pytest.mark.slow
def test_the_cost_of_snapshots_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    found = smoke(tmp_path, "cheetah,atari,lz4", "snapshot")["groups"]
    assert {group: len(each) for group, each in found.items()} == {"cheetah": 3, "atari": 3, "lz4": 3}
    assert all(one["seconds"] > 0 and one["bytes"] > 0 for each in found.values() for one in each)


@pytest.mark.slow
def test_the_cost_of_recording_is_measured(tmp_path: Path) -> None:
    found = smoke(tmp_path, "cartpole", "recording")
    assert [rate["name"] for rate in found["rates"]] == ["not recording", "recording"]
    assert [ratio["asked"] for ratio in found["ratios"]] == [0.95]


@pytest.mark.slow
def test_runners_are_measured_on_the_same_work(tmp_path: Path) -> None:
    found = smoke(tmp_path, "balanced,impala", "runners")
    assert len(found["rates"]) == 7
    assert [ratio["asked"] for ratio in found["ratios"]] == [1.6, 0.0, 0.0, 0.0, 0.8]


@pytest.mark.slow
def test_updates_are_measured_beside_stable_baselines3(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    found = smoke(tmp_path, "sac,td3,dqn_cartpole,dqn_atari", "updates")
    assert len(found["rates"]) == 8
    assert [ratio["asked"] for ratio in found["ratios"]] == [1.3] * 4


@pytest.mark.slow
def test_updates_are_measured_on_a_device(tmp_path: Path) -> None:
    out, sides = tmp_path / "gpu.json", ["plain", "device"]
    words = ["device=cpu", "small=true", "only=td3,dqn_cartpole", "sides=plain,device", f"out={out}"]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT, check=True, timeout=100)
    rates = json.loads(out.read_text())["rates"]
    assert {case: [*found] for case, found in rates.items()} == {"td3": sides, "dqn_cartpole": sides}
    assert all(each > 0 for found in rates.values() for side in found.values() for each in side)


@pytest.mark.slow
def test_variants_of_sac_are_measured_beside_it(tmp_path: Path) -> None:
    found = smoke(tmp_path, "crossq,xqc", "updates")
    assert [ratio["asked"] for ratio in found["ratios"]] == [0.7, 0.35]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("group", "package", "n_contenders", "asked"),
    [
        ("synthetic", "torch", 5, [0.9, 0.9]),
        ("cheetah", "mujoco", 5, [0.0, 0.0, 0.85]),
        ("pong", "ale_py", 9, [0.0] * 5 + [0.9]),
        ("subprocess", "stable_baselines3", 6, [5.0] * 8),
    ],
)
def test_samplers_with_workers_are_measured(
    tmp_path: Path, group: str, package: str, n_contenders: int, asked: list[float]
) -> None:
    pytest.importorskip(package)
    found = smoke(tmp_path, group)
    assert len(found["rates"]) == n_contenders
    assert [ratio["asked"] for ratio in found["ratios"]] == asked


@pytest.mark.slow
def test_workers_of_evolution_are_measured_beside_a_bare_loop(tmp_path: Path) -> None:
    found = smoke(tmp_path, "pendulum", "evolution")
    assert len(found["rates"]) == 5
    assert [ratio["asked"] for ratio in found["ratios"]] == [1.8, 0.0, 0.0]
