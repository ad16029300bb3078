"""Normalized scores: 0 is a random policy's return and 100 the expert's, by the reference scores of a dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlframe import launch
from rlframe.data import __main__ as command
from rlframe.data import open_dataset
from rlframe.data.reading import SCORE_KEYS, reference_scores
from tests.data.episodes import CARTPOLE, episodes, stored
from tests.tables import read_csv

RUN = ("algo=bc", "env=CartPole-v1", "eval.n_episodes=2", "eval.n_envs=2", "model.hidden=[8]", "affinity=none")
SHORT = (*RUN, "runner.n_steps=20", "runner.log_interval_steps=10", "log_level=WARNING")


def with_scores(root: Path) -> str:
    """A dataset by which a random policy returns 10 and an expert 60."""
    one = stored(root, episodes([4, 6, 9], *CARTPOLE), *CARTPOLE)
    words = ["convert", one, f"into={root}/scored-v0", "ref_min_score=10", "ref_max_score=60"]
    assert command.main(words) == 0
    return f"{root}/scored-v0"


def test_scores_are_those_of_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import minari

    path = with_scores(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    returns = np.array([10.0, 35.0, 60.0, 110.0])
    reference = open_dataset(path).reference
    assert reference is not None
    assert reference.normalized(returns).tolist() == [0, 50, 100, 200]
    theirs = minari.get_normalized_score(minari.load_dataset("scored-v0"), returns)
    np.testing.assert_allclose(reference.normalized(returns), 100 * theirs)


@pytest.mark.parametrize("scores", [(1.0,), (1.0, 1.0), ("1", 2.0), (float("nan"), 1.0), (True, 5.0), (0, 10**400)])
def test_reference_scores_that_cannot_be_are_none(scores: tuple[object, ...]) -> None:
    assert reference_scores(dict(zip(SCORE_KEYS, scores, strict=False))) is None


def test_scores_are_described_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_scores(tmp_path)
    capsys.readouterr()
    assert command.main(["describe", path]) == 0
    mean = np.mean([100 * (episode.return_ - 10) / 50 for episode in open_dataset(path).episodes()])
    assert f"normalized score {mean:.4g} +- " in (shown := capsys.readouterr().out)
    assert "0 is 10, 100 60" in shown
    assert launch.main([*SHORT, "algo.replay=dataset", f"algo.replay.path={path}", f"log_dir={tmp_path}"]) == 0
    rows = read_csv(tmp_path / "run_0/progress.csv")[1]
    assert len(rows) >= 2
    for row in rows:
        expected = 2 * (float(row["eval/return_mean"]) - 10)
        assert float(row["eval/normalized_score"]) == pytest.approx(expected)


def test_a_dataset_without_scores_that_is_to_normalize_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, episodes([4], *CARTPOLE), *CARTPOLE)
    words = ["algo=a2c", "env=CartPole-v1", "sampler=serial", f"eval.dataset={path}", "runner.n_steps=100"]
    assert launch.main([*words, f"log_dir={tmp_path}/runs", "affinity=none"]) == 2
    assert "names no ref_min_score and ref_max_score" in capsys.readouterr().err
    assert command.main(["convert", path, f"into={tmp_path}/x-v0", "ref_min_score=3"]) == 2
    assert "must be two different numbers" in capsys.readouterr().err
