"""A study knows from result.json whether a run is complete, however it ended."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlframe import launch
from rlframe.study.process import RunProcess

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


def test_of_a_stack_each_run_has_the_reason_of_its_own_record(tmp_path: Path) -> None:
    ends = {"failed": "an error", "interrupted": "SIGINT: stopped at env_steps 8", "stopped": "by a callback", "": ""}
    process: Any = SimpleNamespace(result=lambda: (1, "of the first"), runs=(*ends,), kill_reason="")
    found = {}
    for ended, reason in ends.items():
        (folder := tmp_path / f"run_{ended}").mkdir()
        if ended:
            (folder / "result.json").write_text(json.dumps({"ended": ended, "reason": reason}))
        found[ended] = RunProcess.result_of(process, cast(Any, SimpleNamespace(directory=folder)))
    done, unknown = (0, ""), (1, "of the first")
    assert found == {"failed": (1, "an error"), "interrupted": (1, ends["interrupted"]), "stopped": done, "": unknown}
