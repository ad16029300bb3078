"""python -m rlframe.data: what its verbs make, and what they refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlframe import launch
from rlframe.data import Episode, NewDataset, open_dataset
from rlframe.data import __main__ as data
from rlframe.data.episodes import SAMPLED_ACTION
from rlframe.data.tools import write
from tests.data.episodes import CARTPOLE, arrays, episodes, stored


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    stored(tmp_path, episodes([4, 6, 9, 2, 5], *CARTPOLE), *CARTPOLE)
    return tmp_path


def lengths(name: str) -> list[int]:
    return [len(each) for each in open_dataset(name).episodes()]


def test_a_path_with_an_equals_sign_is_a_dataset(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "lr=1").mkdir()
    (root / "test-v0").rename(root / "lr=1" / "test-v0")
    assert data.main(["list", str(root / "lr=1")]) == 0
    assert data.main(["describe", str(root / "lr=1" / "test-v0")]) == 0
    assert "5 episodes" in capsys.readouterr().out


def test_datasets_are_merged_split_filtered_and_converted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = [replace(each, info={}) for each in open_dataset("test-v0").episodes()]
    write(NewDataset("plain-v0", *CARTPOLE), plain)
    assert data.main(["convert", "test-v0", "into=h-v0", "format=hdf5", "compression=zstd"]) == 0
    assert data.main(["merge", "test-v0", "h-v0", "into=both-v0"]) == 0
    assert [[*each.info] for each in open_dataset("plain-v0").episodes()] == [[]] * 5
    assert data.main(["merge", "test-v0", "plain-v0", "into=mixed-v0"]) == 0
    assert [[*each.info] for each in open_dataset("mixed-v0").episodes()] == [["log_prob"]] * 5 + [[]] * 5
    assert lengths("both-v0") == [4, 6, 9, 2, 5] * 2
    assert data.main(["filter", "both-v0", "into=long-v0", "min_length=5", "max_length=6"]) == 0
    assert lengths("long-v0") == [6, 5, 6, 5]
    assert data.main(["split", "test-v0", "into=a-v0,b-v0", "fraction=0.6"]) == 0
    assert sorted(lengths("a-v0") + lengths("b-v0")) == [2, 4, 5, 6, 9]
    assert len(lengths("a-v0")) == 3
    for one, other in zip(open_dataset("test-v0").episodes(), open_dataset("h-v0").episodes(), strict=True):
        assert all(map(np.array_equal, arrays(one), arrays(other)))
    capsys.readouterr()
    assert data.main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [_line("a-v0"), _line("b-v0")]
    assert data.main(["describe", "test-v0", f"out={root}/picture.png"]) == 0
    shown = capsys.readouterr().out
    assert "5 episodes, 26 steps" in shown
    assert "3 terminated, 2 truncated" in shown
    assert (root / "picture.png").stat().st_size > 5_000


def _line(name: str) -> str:
    found = open_dataset(name)
    return f"{name}: {found.n_episodes} episodes, {found.n_steps} steps, {found.format}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mrge", "test-v0"], "did you mean merge?"),
        (["merge", "test-v0", "into=x-v0"], "give 2 or more datasets, not 1"),
        (["convert", "test-v0"], "into=NEW is missing"),
        (["convert", "test-v0", "into=test-v0"], "a dataset is there already"),
        (["convert", "test-v0", "into=x-v0", "format=csv"], "format='csv' is not one of arrow, parquet, hdf5"),
        (["filter", "test-v0", "into=x-v0", "min_return=high"], "min_return=high must be a number"),
        (["filter", "test-v0", "into=x-v0", "max_return=nan"], "max_return=nan must be a number"),
        (["list", "a", "b"], "list takes one folder, or none, and no keys, not a b"),
        (["filter", "test-v0", "into=x-v0", "min_retrun=3"], "did you mean min_return or"),
        (["filter", "test-v0", "into=x-v0", "min_length=10"], "test-v0 has no episode within these limits"),
        (["split", "test-v0", "into=x-v0,y-v0", "fraction=1"], "leaves one part empty"),
        (["split", "test-v0", "into=x-v0,y-v0", "fraction=nan"], "fraction=nan must be a number"),
        (["describe", "test-v0", "out=x.foo"], "out=x.foo has no ending that says what kind of image it is"),
        (["describe", "none-v0"], "there is no dataset"),
        (["import", "rows.json", "into=new-v0", "env=mine:Env"], "an import takes the id of a registered environment"),
    ],
)
def test_a_wrong_command_is_one_line_and_makes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert data.main(words) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in root.iterdir()] == ["test-v0"]


def lines(root: Path, *batches: dict[str, object]) -> str:
    path = root / "rows.json"
    path.write_text("".join(json.dumps({"type": "SampleBatch", **batch}) + "\n" for batch in batches))
    return str(path)


def test_fragments_between_others_are_joined_and_a_step_without_a_next_observation_is_left_out(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    obs = np.arange(24).reshape(6, 4).astype(float).tolist()
    rows = {"obs": obs, "actions": [0, 1] * 3, "rewards": [1, 2, 3, 4, 5, 6], "eps_id": [1, 2, 1, 2, 2, 3]}
    path = lines(root, {**rows, "terminateds": [False, False, False, False, True, False]})
    assert data.main(["import", path, "into=f-v0", "env=CartPole-v1"]) == 0
    ended, cut = open_dataset("f-v0").episodes()
    assert (ended.reward.tolist(), ended.terminated.tolist()) == ([2, 4, 5], [False, False, True])
    assert (cut.reward.tolist(), cut.truncated.tolist()) == ([1], [True])
    assert cut.observation.tolist() == [obs[0], obs[2]]
    one = {"obs": obs[:1], "actions": [0], "rewards": [1]}
    assert data.main(["import", lines(root, one), "into=e-v0", "env=CartPole-v1"]) == 2
    assert "rows.json has no whole step" in capsys.readouterr().err


def test_rows_of_rllib_are_imported_and_pickled_ones_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    obs = np.arange(24).reshape(6, 4).astype(float).tolist()
    first = {"obs": obs[:4], "new_obs": obs[1:5], "actions": [0, 1, 1, 0], "rewards": [1, 2, 3, 4]}
    first |= {"eps_id": [7, 7, 8, 8], "dones": [False, True, False, False], "action_logp": [-1, -2, -3, -4]}
    second = {"obs": obs[4:5], "new_obs": obs[5:], "actions": [1], "rewards": [5], "eps_id": [8], "action_logp": [-5]}
    path = lines(root, first, {**second, "terminateds": [False], "truncateds": [True]})
    assert data.main(["import", path, "into=r-v0", "env=CartPole-v1"]) == 0
    one, other = open_dataset("r-v0").episodes()
    assert one.observation.tolist() == obs[:3]
    assert other.observation.tolist() == obs[2:6]
    assert (one.reward.tolist(), other.reward.tolist()) == ([1, 2], [3, 4, 5])
    assert other.info["log_prob"].tolist() == [-3, -4, -5]
    assert (one.terminated.tolist(), other.truncated.tolist()) == ([False, True], [False, False, True])
    free = {
        "obs": [[0, 0, 0]] * 2,
        "new_obs": [[0, 0, 0]] * 2,
        "actions": [[-1.0], [1.5]],
        "rewards": [0, 0],
        "eps_id": [1, 1],
        "action_logp": [-1.5, 0.5],
    }
    words = ["import", lines(root, free), "into=n-v0", "env=Pendulum-v1", "normalized_actions=true"]
    assert data.main(words) == 0
    normalized = next(iter(open_dataset("n-v0").episodes()))
    assert normalized.action.tolist() == [[-2.0], [2.0]]
    assert normalized.info["log_prob"].tolist() == [-1.5, 0.5]
    assert normalized.info[SAMPLED_ACTION].tolist() == [[-1.0], [1.5]], "what the log-probability is of"
    own = {**free, "actions": [[-2.0], [1.0]], "action_logp": [-1.5 - math.log(2), 0.5 - math.log(2)]}
    assert data.main(["import", lines(root, own), "into=m-v0", "env=Pendulum-v1"]) == 0
    as_they_are = next(iter(open_dataset("m-v0").episodes()))
    assert as_they_are.action.tolist() == [[-2.0], [1.0]]
    np.testing.assert_allclose(as_they_are.info["log_prob"], [-1.5, 0.5], atol=1e-6)
    for change, says in (
        ({"actions": [0, 7, 1, 0]}, "actions goes from 0 to 7"),
        ({"rewards": [1, math.nan, 3, 4]}, "rewards have NaN"),
    ):
        assert data.main(["import", lines(root, {**first, **change}), "into=w-v0", "env=CartPole-v1"]) == 2
        assert says in capsys.readouterr().err
        assert not (root / "w-v0").exists()
    packed = lines(root, {**first, "obs": "BCJNGGhAgASVAQ=="})
    assert data.main(["import", packed, "into=p-v0", "env=CartPole-v1"]) == 2
    assert "rows.json, line 1: obs is pickled, which is never read" in capsys.readouterr().err
    assert not (root / "p-v0").exists()


def test_a_dry_run_from_data_has_no_batch_of_a_sampler(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env=CartPole-v1", "algo=bc", "runner=offline_rl", "algo.replay=dataset", "algo.replay.path=test-v0"]
    assert launch.main([*words, "runner.n_steps=100", "affinity=none", "threads=1", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert "main          learns on cpu, 1 torch thread; rows of the dataset\n" in printed
    assert printed.rstrip().endswith(", without the dataset")


def test_an_error_in_making_episodes_is_the_one_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    def made() -> Iterator[Episode]:
        yield from episodes([3], *CARTPOLE)
        raise ValueError("the next one is damaged")

    monkeypatch.setattr("rlframe.data.arrow.write_arrow", full)
    with pytest.raises(ValueError, match="damaged"):
        write(NewDataset(f"{tmp_path}/new-v0", *CARTPOLE), made())
    assert not list(tmp_path.iterdir())
