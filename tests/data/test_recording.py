"""record=NAME: a run writes its episodes beside learning, exactly, also if it is killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlframe import evaluate, launch
from rlframe.data import open_dataset
from tests.data.episodes import arrays
from tests.tables import read_csv

RUN = (
    *("algo=ppo", "env=CartPole-v1", "sampler=serial", "sampler.batch_T=32", "sampler.batch_B=4", "eval.n_episodes=0"),
    *("runner.log_interval_steps=512", "model.hidden=[8]", "log_level=WARNING", "affinity=none"),
)


def returns(path: Path) -> list[float]:
    return [episode.return_ for episode in open_dataset(path).episodes()]


def test_a_run_records_the_episodes_of_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RUN, "runner.n_steps=1024", f"log_dir={tmp_path}", f"record={tmp_path}/ppo-{{seed}}-v0", "seed=3"]
    assert launch.main(words) == 0
    dataset = open_dataset(tmp_path / "ppo-3-v0")
    logged = read_csv(tmp_path / "run_0/episodes.csv")[1]
    assert dataset.n_episodes == len(logged) > 10
    assert sorted(returns(dataset.path)) == sorted(float(each["return"]) for each in logged)
    assert dataset.env_id == "CartPole-v1"
    assert dataset.metadata["algorithm_name"] == "ppo"
    assert all(np.isfinite(episode.info["log_prob"]).all() for episode in dataset.episodes())
    assert launch.main(words) == 2
    assert "ppo-3-v0: a dataset is there already" in capsys.readouterr().err
    assert evaluate.main([str(tmp_path / "run_0"), "n_episodes=3", "n_envs=2", f"dataset={tmp_path}/ev-v0"]) == 0
    shown = capsys.readouterr().out
    played = [float(line.split()[3]) for line in shown.splitlines() if line.startswith("Episode #")]
    assert returns(tmp_path / "ev-v0") == played
    assert all(not episode.info for episode in open_dataset(tmp_path / "ev-v0").episodes()), "greedy: no log_prob"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("algo=es",), "record=x-v0 writes the batches of a sampler"),
        (("algo=ppo", "env.normalize_reward=true"), "writes the rewards learned from"),
        (("algo=ppo", "record=x"), "record: 'x' is no dataset"),
        (("algo=ppo", "record=x-{env}-v0"), "may have {seed} and {run_ID} in braces"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str], says: str
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    given = {"env": "CartPole-v1", "record": "x-v0", **dict(word.split("=", 1) for word in words)}
    assert launch.main([f"{key}={value}" for key, value in given.items()] + [f"log_dir={tmp_path}/runs"]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_leaves_whole_episodes_and_records_on(tmp_path: Path) -> None:
    whole = [*RUN, "runner.n_steps=60_000", f"log_dir={tmp_path}/whole", f"record={tmp_path}/whole-v0"]
    assert launch.main(whole) == 0
    command = [sys.executable, "-m", "rlframe.launch"]
    words = [*RUN, "runner.n_steps=60_000", f"log_dir={tmp_path}/parts", f"record={tmp_path}/parts-v0"]
    rng, kills, path = np.random.default_rng(0), 0, tmp_path / "parts-v0"
    while True:
        resume = any((tmp_path / "parts/run_0/snapshot").glob("step_*"))
        process = subprocess.Popen([*command, *([f"resume={tmp_path}/parts/run_0"] if resume else words)])
        try:
            if process.wait(rng.uniform(4, 9) if kills < 6 else None) == 0:
                break
            pytest.fail("the run failed")
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.2)
        if (path / "data/metadata.json").exists():
            found = list(open_dataset(path).episodes())  # every one of them is whole
            assert len(found) == open_dataset(path).n_episodes
        if not any((tmp_path / "parts/run_0/snapshot").glob("step_*")):
            for folder in (path, tmp_path / "parts"):
                subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert kills >= 2
    expected, recorded = open_dataset(tmp_path / "whole-v0"), open_dataset(path)
    assert (expected.n_episodes, expected.n_steps) == (recorded.n_episodes, recorded.n_steps)
    for one, other in zip(expected.episodes(), recorded.episodes(), strict=True):
        assert all(map(np.array_equal, arrays(one), arrays(other)))
