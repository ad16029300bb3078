"""A study knows from result.json whether a run is complete, however it ended."""

import json
from pathlib import Path

import pytest

from rlframe import launch

SHORT = "env=CartPole-v1 sampler=serial sampler.batch_T=16 sampler.batch_B=4 model.hidden=[8] runner.n_steps=100000 "
SHORT += "runner.log_interval_steps=100 eval.n_episodes=2 eval.n_envs=2 affinity=1cpr sweep.seed=0"


@pytest.mark.parametrize(
    ("word", "state"),
    [
        pytest.param("stop=env_steps>150", "done", marks=pytest.mark.slow),
        ("runner.target_return=1", "done"),
        pytest.param("runner.max_time_s=0.3", "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ended_early_is_done_unless_its_time_was_over(word: str, state: str, tmp_path: Path) -> None:
    status = launch.main([*SHORT.split(), word, f"log_dir={tmp_path}"])
    assert status == (0 if state == "done" else 1)
    (entry,) = json.loads((tmp_path / "experiment.json").read_text())["runs"]
    assert entry["state"] == state
    assert (tmp_path / "summary.csv").is_file() == (state == "done")
