"""The trials of a search are read from its journal as Optuna has them, with limits, and drawn; importance is known."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.analysis.search_figure import RED, fill_figure
from rlframe.analysis.trials import (
    DONE,
    PRUNED,
    SEARCH_JOURNAL,
    SearchData,
    SearchedKey,
    Trial,
    importance,
    read_search,
)
from rlframe.core.errors import ConfigError
from rlframe.plot import main

SPACE = {"a.rate": ["loguniform", "1e-5", "1e-1"], "a.clip": ["uniform", "0", "1"], "kind": ["choice", "good", "bad"]}
HEAD = [
    {"op_code": 0, "directions": [2]},
    {"op_code": 2, "user_attr": {"space": SPACE}},
    {"op_code": 2, "user_attr": {"metric": "eval/return_mean"}},
]


def trial_lines(number: int, values: dict[str, float], state: int, score: float | None) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"op_code": 4}]
    lines += [{"op_code": 5, "trial_id": number, "param_name": k, "param_value_internal": x} for k, x in values.items()]
    if state == 2 and score is not None:
        lines += [{"op_code": 7, "trial_id": number, "step": 0, "intermediate_value": score}]
    values_told = [score] if state == 1 else None
    return [*lines, {"op_code": 6, "trial_id": number, "state": state, "values": values_told}]


def write_journal(directory: Path, lines: list[dict[str, Any]]) -> Path:
    (directory / SEARCH_JOURNAL).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory


def example(directory: Path) -> Path:
    """Ten trials and one that is pruned; the best is the third."""
    lines = [*HEAD]
    for n in range(10):
        values = {"a.rate": 10.0 ** -(1 + n % 5), "a.clip": n / 10, "kind": float(n % 2)}
        lines += trial_lines(n, values, 1, 50.0 if n == 2 else float(n))
    lines += trial_lines(10, {"a.rate": 1e-3, "a.clip": 0.5, "kind": 1.0}, 2, 3.5)
    return write_journal(directory, lines)


def test_a_journal_is_read_as_optuna_reads_it(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = str(tmp_path / SEARCH_JOURNAL)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    study = optuna.create_study(storage=storage, direction="minimize", sampler=optuna.samplers.RandomSampler(seed=0))
    study.set_user_attr("space", SPACE)
    study.set_user_attr("metric", "-algo/loss")
    kinds = optuna.distributions
    space = {
        "a.rate": kinds.FloatDistribution(1e-5, 1e-1, log=True),
        "a.clip": kinds.FloatDistribution(0, 1),
        "kind": kinds.CategoricalDistribution(("good", "bad")),
    }
    study.enqueue_trial({"a.clip": 0.25}, user_attrs={"added": 0})
    for n in range(4):
        trial = study.ask(space)
        if n == 2:
            trial.report(7.0, 0)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif n < 3:
            study.tell(trial, 10.0 - n)
    found, expected = read_search(tmp_path), study.get_trials()
    assert (found.metric, found.lower_is_better) == ("algo/loss", True)
    assert [trial.state for trial in found.trials] == ["done", "done", "pruned", "running"]
    assert [trial.score for trial in found.trials[:3]] == [10.0, 9.0, 7.0]
    assert [trial.added for trial in found.trials] == [True, False, False, False]
    assert found.trials[0].values["a.clip"] == 0.25
    choices = ("good", "bad")
    for trial, frozen in zip(found.trials, expected, strict=True):
        read = {**trial.values, "kind": choices[int(trial.values["kind"])]}
        assert read == frozen.params
    best = found.best()
    assert best is not None
    assert best.number == study.best_trial.number


def known_search(n: int = 60) -> SearchData:
    """Scores that `a.rate` decides, on its logarithmic scale; `a.clip` and `kind` do nothing."""
    rng = np.random.default_rng(0)
    keys = SearchedKey("a.rate", 1e-5, 1e-1, log=True), SearchedKey("a.clip"), SearchedKey("kind", choices=("x", "y"))
    trials = []
    for k, (u, clip, kind) in enumerate(rng.random((n, 3))):
        values = {"a.rate": 10.0 ** (4 * u - 5), "a.clip": clip, "kind": float(kind > 0.5)}
        trials.append(Trial(k, DONE, -abs(u - 0.5), values))
    return SearchData("score", False, keys, tuple(trials))


def test_importance_is_that_of_the_key_which_decides_the_score() -> None:
    shares = importance(known_search())
    assert next(iter(shares)) == "a.rate"
    assert shares["a.rate"] > 0.7
    assert math.isclose(sum(shares.values()), 1.0)
    few = known_search(9)
    assert importance(few) == {}


@pytest.mark.slow
def test_importance_ranks_keys_as_optunas_ped_anova() -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds, data = optuna.distributions, known_search(200)
    space = {
        "a.rate": kinds.FloatDistribution(1e-5, 1e-1, log=True),
        "a.clip": kinds.FloatDistribution(0, 1),
        "kind": kinds.CategoricalDistribution((0.0, 1.0)),
    }
    study = optuna.create_study(direction="maximize")
    for each in data.trials:
        study.add_trial(optuna.trial.create_trial(params=each.values, distributions=space, value=each.score))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    theirs, ours = optuna.importance.get_param_importances(study, evaluator=evaluator), importance(data)
    assert next(iter(theirs)) == next(iter(ours)) == "a.rate"
    assert abs(theirs["a.rate"] - ours["a.rate"]) < 0.1


def test_the_figure_has_history_importance_and_a_slice_of_each_key_on_its_scale(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    fill_figure(figure, read_search(example(tmp_path)), "title", math.nan)
    rate, clip, kind, history, shares = figure.axes
    best = next(line for line in history.lines if line.get_label() == "best so far")
    assert list(best.get_ydata()) == [0, 1, *[50] * 9]
    pruned = next(line for line in history.lines if line.get_label().startswith("pruned"))
    assert (list(pruned.get_xdata()), list(pruned.get_ydata())) == ([10], [3.5])
    assert (rate.get_xscale(), clip.get_xscale()) == ("log", "linear")
    assert rate.get_xlim() == (1e-5, 1e-1)
    assert [label.get_text() for label in kind.get_xticklabels()] == ["good", "bad"]
    star = next(line for line in rate.lines if line.get_color() == RED)
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (1e-3, 50.0)
    assert {label.get_text() for label in shares.get_yticklabels()} == {"rate", "clip", "kind"}


def test_the_plot_command_draws_a_search_and_its_trials_are_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    example(tmp_path)
    assert main([str(tmp_path), f"out={tmp_path / 'x.svg'}", "bound=40"]) == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()
    printed = capsys.readouterr().out
    assert "best: trial_2, eval/return_mean 50: a.rate=0.001 a.clip=0.2 kind=good" in printed
    assert main([str(tmp_path), "smooth=3"]) == 2
    assert "smooth= is for curves" in capsys.readouterr().err


def test_a_search_without_a_score_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(tmp_path, [*HEAD, *trial_lines(0, {"a.clip": 0.5}, 2, 1.0)])
    assert main([str(tmp_path), f"out={tmp_path / 'x.png'}"]) == 2
    assert "no trial with a score yet" in capsys.readouterr().err


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    with (example(tmp_path) / SEARCH_JOURNAL).open("a") as file:
        file.write('{"op_code": 4, "da')
    assert len(read_search(tmp_path).trials) == 11


BAD: dict[str, Any] = {
    "no object": [],
    "no operation": {},
    "deep": "[" * 100_000,
    "state": {"op_code": 4, "state": "x"},
    "another trial": {"op_code": 5, "trial_id": 10**9, "param_name": "a.clip", "param_value_internal": 0.5},
    "negative trial": {"op_code": 6, "trial_id": -1, "state": 1, "values": [1.0]},
    "unknown key": {"op_code": 5, "trial_id": 0, "param_name": "os", "param_value_internal": 0.5},
    "choice": {"op_code": 5, "trial_id": 0, "param_name": "kind", "param_value_internal": 99},
    "infinite": {"op_code": 5, "trial_id": 0, "param_name": "a.clip", "param_value_internal": math.inf},
    "bounds": {"op_code": 2, "user_attr": {"space": {"x": ["uniform", "1", "0"]}}},
    "log of zero": {"op_code": 2, "user_attr": {"space": {"x": ["loguniform", "0", "1"]}}},
    "kind": {"op_code": 2, "user_attr": {"space": {"x": ["os.system", "0", "1"]}}},
    "many keys": {"op_code": 2, "user_attr": {"space": {f"k{n}": ["uniform", "0", "1"] for n in range(61)}}},
    "long key": {"op_code": 2, "user_attr": {"space": {"k" * 1000: ["uniform", "0", "1"]}}},
    "metric": {"op_code": 2, "user_attr": {"metric": {}}},
    "huge text": "x" * (1 << 21),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_or_malicious_line_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    write_journal(tmp_path, [*HEAD, {"op_code": 4}, BAD[name]])
    with pytest.raises(ConfigError, match=r"search\.journal is damaged in line 5: .*; plot its runs"):
        read_search(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


def test_a_pickle_or_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / SEARCH_JOURNAL).write_bytes(pickle.dumps(Bomb()) + b"\n")
    with pytest.raises(ConfigError, match="damaged in line 1"):
        read_search(tmp_path)
    (tmp_path / SEARCH_JOURNAL).unlink()
    (tmp_path / SEARCH_JOURNAL).symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_search(tmp_path)


def test_pruned_trials_are_not_among_the_best() -> None:
    data = known_search(20)
    pruned = [Trial(20 + n, PRUNED, 100.0, {"a.rate": 1e-1, "a.clip": 0.5, "kind": 0.0}) for n in range(5)]
    with_pruned = SearchData("score", False, data.keys, (*data.trials, *pruned))
    best = with_pruned.best()
    assert best is not None
    assert best.number < 20
    assert importance(with_pruned)["a.rate"] > 0.5
