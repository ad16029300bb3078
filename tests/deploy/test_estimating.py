"""The evaluate command estimates what a run's policy is worth from episodes of others."""

import json
from pathlib import Path

import numpy as np
import pytest
from gymnasium import Space

from rlframe import launch
from rlframe.data.episodes import Episode
from rlframe.deploy import estimating
from rlframe.evaluate import main

SMALL = ["sampler=serial", "sampler.batch_T=16", "sampler.batch_B=4", "algo.minibatches=2", "algo.discount=0.9"]
SMALL += ["runner.n_steps=64", "runner.log_interval_steps=64", "eval.n_episodes=1", "eval.n_envs=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert launch.main([f"log_dir={folder}", *SMALL, "env=CartPole-v1", "model.memory=gru"]) == 0
    return folder / "run_0"


def random_episodes(_: str, *spaces: Space) -> list[Episode]:
    rng, found = np.random.default_rng(0), []
    for T in (3, 5, 4):
        last, info = np.arange(T) == T - 1, {"log_prob": np.full(T, np.log(0.5))}
        observation = rng.standard_normal((T + 1, 4)).astype(np.float32)
        found.append(Episode(observation, rng.integers(2, size=T), np.ones(T, np.float32), last, last & False, info))
    return found


def test_the_command_prints_a_table_and_writes_the_numbers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimating, "load_episodes", random_episodes)
    out = tmp_path / "found.json"
    assert main([str(run), "estimate=wis,pdis", "dataset=x", f"out={out}"]) == 0
    shown, facts = capsys.readouterr().out, json.loads(out.read_text())
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == ["method", "wis", "pdis", "dataset"]
    assert "warning: fewer than 30 effective episodes" in shown
    assert facts["discount"] == 0.9, "that of the run"
    assert facts["behaviour"] == "recorded"
    assert [*facts["estimates"]] == ["wis", "pdis"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["estimate=wis"], "estimate= needs dataset=PATH"),
        (["estimate=wsi", "dataset=x"], "did you mean wis"),
        (["estimate=wis", "dataset=x", "n_episodes=3"], "n_episodes has no meaning with estimate="),
        (["estimate=wis", "dataset=x", "explore=false"], "use explore=true, or estimate=fqe"),
        (["estimate=wis", "dataset=x", "discount=2"], "discount=2 must be a number from 0 to 1"),
        (["estimate=wis", "dataset=x", "epsilon=0.1"], "epsilon=0.1 is for agents that act at random"),
        (["estimate=wis", "dataset=x", "out=/proc/x.json"], "out=/proc/x.json cannot be written"),
        (["estimate=wis", "dataset=x", "out=x.csv"], "out=x.csv would have JSON in it; use out=x.json"),
        (["dataset=x"], "'x' is no dataset"),
    ],
)
def test_wrong_keys_are_an_error_before_a_dataset_is_read(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
