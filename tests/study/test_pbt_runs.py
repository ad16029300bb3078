"""Populations of real runs in the queue: the schedule that they find, and a study that is killed again and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlframe.launch import main
from rlframe.record.snapshot import load_snapshot
from tests.runners.resumed import last_state
from tests.study.switching import BEST

ROOT = Path(__file__).parents[2]
TOY = (
    *("algo=./tests/study/switching.py", "env=CartPole-v1", "sampler=serial", "sampler.batch_T=16", "seed=100"),
    *("sampler.batch_B=1", "model.hidden=[8]", "eval.n_episodes=0", "runner.log_interval_steps=32", "metric=algo/q"),
    *("search.algo.h=uniform(0,1)", "searcher=pbt", "n_runs=4", "pbt.interval_steps=256"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_find_the_schedule_and_a_run_with_it_comes_to_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TOY, "runner.n_steps=2048", f"log_dir={tmp_path}/study"]) == 0
    said = capsys.readouterr().out
    found = float(said.partition("algo/q ")[2].partition(":")[0])
    assert found == pytest.approx(BEST, abs=0.1), "0.39 with constant h"
    again = [f"experiment={tmp_path}/study/best.json", "trust=true", f"log_dir={tmp_path}/again"]
    assert main(again) == 0
    assert load_snapshot(tmp_path / "again/run_0")[0]["runner"]["latest"]["algo/q"] == pytest.approx(found, abs=0.1)
    assert (tmp_path / "study/summary.csv").read_text().startswith("setting,algo.h,metric")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_killed_again_and_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    words = [*TOY, "runner.n_steps=768"]
    start = time.monotonic()
    assert main([*words, f"log_dir={tmp_path}/whole"]) == 0
    whole_s = time.monotonic() - start
    rng, n_killed = np.random.default_rng(0), 0
    while True:
        command = [sys.executable, "-m", "rlframe.launch", *words, f"log_dir={tmp_path}/killed"]
        study = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            assert study.wait(whole_s * (float(rng.uniform(0.3, 0.6)) + 0.05 * n_killed)) == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(study.pid, signal.SIGKILL)
            study.wait()
            n_killed += 1
    assert n_killed
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert (killed / "population.jsonl").read_text() == (whole / "population.jsonl").read_text()
    for k in range(4):
        one, other = (last_state(study / f"member_{k}/run_{100 + k}")["algo"] for study in (whole, killed))
        assert one == other
    rows = [json.loads(line) for line in (killed / "member_0/run_100/progress.jsonl").read_text().splitlines()]
    steps = [row["env_steps"] for row in rows]
    assert steps == sorted(set(steps)), "no row is doubled"
