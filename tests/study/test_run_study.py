"""rlframe.run_study trains variants by launch, and returns their scores; wrong settings start nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

import rlframe
from rlframe.core.errors import ConfigError
from rlframe.envs.debug_envs import TimeLimit
from rlframe.experiment.job import check_words, read_job
from rlframe.experiment.settings import to_flat
from rlframe.launch import main
from rlframe.study import variants

SHORT = {
    "env": "CartPole-v1",
    "sampler": "serial",
    "sampler.batch_T": 16,
    "eval.n_episodes": 1,
    "affinity": "none",
    "n_steps": 256,
}


@pytest.mark.parametrize(
    ("variants", "settings", "says"),
    [
        ([{"algo": "ppoo"}], {}, "did you mean ppo"),
        (
            [{"algo": "ppo"}, {"algo": "ppo", "algo.clop": 1}],
            {},
            "clop=1/run_0: unknown key algo.clop; did you mean algo.clip",
        ),
        ([], {}, "at least one variant and one seed, not 0 and 1"),
        ([{}], {"seeds": []}, "at least one variant and one seed, not 1 and 0"),
        ([{"seed": 3}], {}, "a variant sets seed, which is for the whole study"),
        ([{"algo.clip": 0.1}, {"algo.clip": 0.1}], {}, "variants 0 and 1 are the same"),
        ([{}], {"n_runs": 3}, "n_runs=3 is for a search"),
        ([{}], {"search": {"algo.clip": "unifrom(0,1)"}}, "did you mean uniform"),
        (
            [{}],
            {"search": {"algo.clip": "uniform(0.1,0.2)"}, "searcher": "pbt", "seeds": [3, 4]},
            r"seeds=\[3, 4\] is not for searcher=pbt, .* use seeds=\[3\]",
        ),
        ({"algo": "ppo"}, {}, "variants={'algo': 'ppo'} must be a list of dicts"),
        ([{}], {"seeds": 3}, r"seeds=3 must be a list, such as range\(3\)"),
        (
            [{}],
            {"search": {"algo.clip": (0.1, 0.2)}},
            r"search={'algo.clip': \(0.1, 0.2\)} needs text such as 'uniform",
        ),
        ([{}], {"n_steps": 9, "runner.n_steps": 5}, "runner.n_steps is given twice"),
        ([{"algo": "ppo", "algo.clip": {"x": None}}], {}, "algo.clip.x has no value; leave it out for its default"),
        ([{}], {"init": "~/rlframe_none"}, f"init={Path.home()}/rlframe_none: there is no such run"),
        ([{"algo": "ppo"}, {"algo": "a2c"}], {"search": {"algo.discount": "uniform(0,1)"}}, "a search is of one"),
        ([{"env": partial(print, Lock())}], {}, "env=builtins:print.. cannot be copied by pickling"),
        ([{"env": lambda: 3}], {"algo": "ppoo"}, "did you mean ppo"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_wrong_settings_start_nothing(variants: Any, settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        rlframe.run_study(variants=variants, **{**SHORT, "log_dir": tmp_path / "x", **settings})
    assert not (tmp_path / "x").exists()


def test_none_is_not_given_and_true_is_true_as_in_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean ppo"):
        rlframe.run_study(algo="ppoo", log_dir=None, retries=None, compile=True, sampler=None)
    planned = []
    monkeypatch.setattr(variants, "execute", lambda study, *_: planned.append(study))
    monkeypatch.setattr(variants, "read_study", lambda directory: directory)
    directory = rlframe.run_study(
        [{"compile": False}, {"compile": True, "algo.clip": None}], **SHORT, log_dir=None, retries=None
    )
    assert directory.is_relative_to(tmp_path / "data")
    for run, value in zip(planned[0].runs, ("false", "true"), strict=True):
        assert run.arguments["compile"] == value
        assert not {"log_dir", "retries", "algo.clip"} & run.arguments.keys()


def test_a_study_without_env_and_algo_takes_no_preset_as_train_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []
    monkeypatch.setattr(variants, "execute", lambda study, *_: planned.append(study))
    monkeypatch.setattr(variants, "read_study", lambda directory: directory)
    rlframe.run_study([{"algo.clip": 0.1}, {"experiment": "classic/ppo_cartpole"}], log_dir=tmp_path / "a")
    words, of_preset = (check_words(run.arguments) for run in planned[0].runs)
    alone = to_flat(read_job({"algo.clip": "0.1"}).experiment)
    assert {key: x for key, x in to_flat(words).items() if alone[key] != x} == {}
    assert words.sampler.batch_B != of_preset.sampler.batch_B == 8


@pytest.mark.parametrize("settings", [{"sweep.algo": "ppo,a2c"}, {"search": {"algo": "choice(ppo,a2c)"}, "n_runs": 2}])
def test_an_algorithm_that_is_swept_or_searched_needs_no_env(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []
    monkeypatch.setattr(variants, "execute", lambda study, *_: planned.append(study))
    monkeypatch.setattr(variants, "read_study", lambda directory: directory)
    rlframe.run_study([{}], log_dir=tmp_path / "a", **settings)
    assert [run.arguments["algo"] for run in planned[0].runs] in (["ppo", "a2c"], [])


@pytest.mark.slow
def test_variants_are_trained_scored_and_continued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Own(TimeLimit):
        """Defined in a function, which no other program can import."""

    variants = [{"algo": "ppo", "env": Own()}, {"algo": "a2c", "algo.learning_rate": 1e-3}]
    study = rlframe.run_study(variants, seeds=range(2), log_dir=tmp_path, **SHORT)
    assert [(row["algo"], row["seed"], row["state"]) for row in study.runs] == [
        ("ppo", 0, "done"),
        ("ppo", 1, "done"),
        ("a2c", 0, "done"),
        ("a2c", 1, "done"),
    ]
    assert all(row["score"] > 0 for row in study.runs if row["algo"] == "a2c")
    assert set(study.curves()["run"]) == {row["run"] for row in study.runs}
    assert f"study {tmp_path}; .runs and .curves() have its numbers\n4 of 4 runs done" in repr(study)
    again = rlframe.run_study(variants, seeds=range(3), log_dir=tmp_path, **SHORT)
    assert [row["score"] for row in again.runs if row["seed"] < 2] == [row["score"] for row in study.runs]
    assert "4 already done" in capfd.readouterr().out
    assert main([f"resume={tmp_path}", "dry_run=true"]) == 2, "its directory holds pickled code"
    assert main([f"resume={tmp_path}", "dry_run=true", "trust=true"]) == 0, "and launch continues it"


@pytest.mark.slow
def test_a_search_from_python(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = {"algo.clip": "uniform(0.1,0.3)"}
    study = rlframe.run_study(search=search, seeds=[0, 1], n_runs=2, algo="ppo", log_dir=tmp_path, **SHORT)
    assert [(row["setting"], row["seed"]) for row in study.runs] == [
        ("trial_0", 0),
        ("trial_0", 1),
        ("trial_1", 0),
        ("trial_1", 1),
    ]
    assert all(0.1 <= row["algo.clip"] <= 0.3 for row in study.runs)
    assert study.search is not None
    assert len(study.search.trials) == 2
