"""Runs of evolution strategies: stopped within a generation, spread over workers, and used as any other run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlframe
from rlframe import evaluate, launch
from rlframe.evaluation.players import EpisodePlayer
from tests.runners.own_callbacks import Counter
from tests.runners.resumed import TRUST, assert_runs_equal, log, words

RUN = (
    "algo=es runner=evolution env=CartPole-v1 sampler=serial model.hidden=[4] model.normalize_observation=true "
    "algo.directions=4 runner.n_steps=500 runner.log_interval_steps=150 eval.n_episodes=2 eval.n_workers=0"
)


def test_a_run_stopped_within_a_generation_is_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play, step, ended, left = EpisodePlayer._play, EpisodePlayer._steps_of_chunk, [], iter(range(12))

    def count_and_play(self: EpisodePlayer, *arguments: Any) -> Any:
        played = play(self, *arguments)
        ended.append(bool(played))
        return played

    def step_and_stop(self: EpisodePlayer, n: int) -> tuple[int, bool]:
        if next(left, None) == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, n)

    monkeypatch.setattr(EpisodePlayer, "_play", count_and_play)
    assert launch.main(words(RUN, tmp_path / "whole")) == 0
    n_whole = ended.count(True)
    with monkeypatch.context() as patch:
        patch.setattr(EpisodePlayer, "_steps_of_chunk", step_and_stop)
        assert launch.main(words(RUN, tmp_path / "parts")) == 128 + signal.SIGTERM
    assert (ended.count(True) - n_whole) % 8, "it was within a generation"
    assert launch.main([f"resume={tmp_path / 'parts/run_0'}", TRUST]) == 0
    assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "parts/run_0")
    assert ended.count(True) == 2 * n_whole, "no episode that had ended is played again"


def test_a_generation_that_an_error_of_a_callback_lost_is_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"{RUN} callbacks=tests.runners.own_callbacks:Counter"
    with monkeypatch.context() as patch:
        patch.setattr(Counter, "on_batch", lambda *_: 1 // 0)
        assert launch.main([*words(case, tmp_path), TRUST]) == 1
    assert launch.main([f"resume={tmp_path / 'run_0'}", TRUST]) == 0
    told = (tmp_path / "run_0/debug.log").read_text()
    assert "the batch or update that an error interrupted is lost" in told
    assert "continues exactly" not in told


@pytest.mark.slow
def test_workers_train_what_one_process_trains(tmp_path: Path) -> None:
    assert launch.main(words(RUN, tmp_path / "one")) == 0
    in_workers = f"{RUN.replace('sampler=serial', 'sampler=cpu')} sampler.n_workers=2"
    assert launch.main(words(in_workers, tmp_path / "two")) == 0
    rows = log(tmp_path / "two/run_0")
    assert {row.pop("sampler/restarts") for row in rows} == {"0"}
    assert rows == log(tmp_path / "one/run_0")
    episodes = [(tmp_path / name / "run_0/episodes.csv").read_text() for name in ("one", "two")]
    assert episodes[0] == episodes[1]


def test_an_evolved_policy_is_used_as_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = dict(word.split("=", 1) for word in RUN.split())
    with rlframe.build(**settings, log_dir=str(tmp_path)) as run:  # type: ignore[arg-type]
        rows = run.train()
        assert rows["updates"] > 1
        assert {"algo/fitness_mean", "algo/fitness_max", "episode/return_mean", "eval/return_mean"} <= rows.keys()
        action = run.policy.act(np.full(4, 0.1, np.float32))
    directory = tmp_path / "run_0"
    assert rlframe.load_policy(directory).act(np.full(4, 0.1, np.float32)) == action
    assert evaluate.main([str(directory), "n_episodes=1"]) == 0
    assert "Episode #0: return:" in capsys.readouterr().out


def test_one_rank_is_all_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words(f"{RUN} world_size=2", tmp_path)) == 2
    assert (
        "world_size=2: raise sampler.n_workers instead; runner=evolution trains in one process"
        in capsys.readouterr().err
    )
