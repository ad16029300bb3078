"""The plot command: grouping of runs, bands and errors."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.analysis.curves import LearningCurve, find_experiments, find_runs, make_curve
from rlframe.core.errors import ConfigError
from rlframe.plot import main, parse, plot_runs


def write_run(
    directory: Path,
    values: list[float],
    steps: list[int] | None = None,
    y: str = "eval/return_mean",
    **config: Any,
) -> Path:
    directory.mkdir(parents=True)
    steps = steps or [1_000 * (i + 1) for i in range(len(values))]
    rows = [f"{step},{step / 100},{value}\n" for step, value in zip(steps, values, strict=True)]
    (directory / "progress.csv").write_text(f"env_steps,time/elapsed_s,{y}\n" + "".join(rows))
    (directory / "params.json").write_text(json.dumps({"config": {"env": "CartPole-v1"} | config}))
    return directory


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for name, offset in (("a2c", 0.0), ("ppo", 100.0)):
        for seed in range(3):
            write_run(tmp_path / f"study/{name}/run_{seed}", [offset + seed, offset + 10 * seed], algo=name, seed=seed)
    return tmp_path / "study"


def test_a_study_is_drawn_with_one_curve_per_experiment(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep/curves.png"
    assert main([str(study), f"out={out}", "bound=105"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a2c: eval/return_mean 10.0 [0.0, 20.0] at env_steps 2,000, 3 seeds")
    assert lines[1].startswith("ppo: eval/return_mean 110.0 [100.0, 120.0]")
    assert lines[-1] == str(out)


def test_a_script_draws_directories_columns_and_seeds_also_one_that_is_not_in_a_list(
    study: Path, tmp_path: Path
) -> None:
    columns = {"env_steps": [1.0, 2.0], "time/elapsed_s": [1.0, 2.0], "eval/return_mean": [3.0, 4.0]}
    for n, runs in enumerate(
        (study, str(study / "ppo"), columns, [study, columns], [[columns, columns]], {"a": columns})
    ):
        assert plot_runs(runs, out=tmp_path / f"{n}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="one label for each of its runs, or none, not 2 for 1"):
        plot_runs([columns], ["a", "b"])
    with pytest.raises(ConfigError, match="plot_runs needs a run"):
        plot_runs([])
    with pytest.raises(ConfigError, match="run 0: env_steps has 2 rows, and eval/return_mean 1"):
        plot_runs({**columns, "eval/return_mean": [3.0]})


def test_names_and_titles_are_drawn_as_they_are(tmp_path: Path) -> None:
    for name in ("_mine", "$\\foo$"):
        write_run(tmp_path / name / "run_0", [1.0, 2.0])
    words = [str(tmp_path / "_mine"), str(tmp_path / "$\\foo$"), r"title=$\bar$ _ $", f"out={tmp_path / 'c.svg'}"]
    assert main(words) == 0
    drawn = re.findall("<!-- \u200b?(.*) -->", (tmp_path / "c.svg").read_text(encoding="utf-8"))
    assert {"_mine", "$\\foo$", r"$\bar$ _ $"} < {*drawn}


def test_runs_that_learned_from_data_alone_are_drawn_over_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "bc", [10.0, 500.0], [0, 0])
    table = (run / "progress.csv").read_text().splitlines()
    rows = [f"{line},{name}" for line, name in zip(table, ("updates", "0", "2000"), strict=True)]
    (run / "progress.csv").write_text("\n".join(rows) + "\n")
    assert main([str(run), f"out={tmp_path / 'curves.png'}"]) == 0
    assert "eval/return_mean 500.0 at updates 2,000" in capsys.readouterr().out

    played = write_run(tmp_path / "ppo", [10.0, 500.0])
    assert main([str(run), str(played), f"out={tmp_path / 'both.png'}"]) == 2
    assert f"{run} learned from data, without env_steps; plot it apart, or with x=updates" in capsys.readouterr().err


def test_runs_given_one_by_one_are_seeds_of_one_experiment(study: Path) -> None:
    (experiment,) = find_experiments(sorted((study / "ppo").iterdir()), ())
    assert (experiment.label, len(experiment.runs)) == ("ppo", 3)


def test_a_run_named_twice_counts_once(study: Path) -> None:
    (experiment,) = find_experiments([study / "ppo", study / "ppo/run_0"], ())
    assert len(experiment.runs) == 3


def test_runs_that_a_folder_links_to_are_found_in_it(study: Path, tmp_path: Path) -> None:
    runs = [path.parent.resolve() for path in sorted(study.rglob("progress.csv"))]
    links = tmp_path / "links"
    links.mkdir()
    for k, run in enumerate(runs):
        (links / f"link_{k}").symlink_to(run)
    (links / "loop").symlink_to(links)
    assert [path.resolve() for path in find_runs(links)] == runs


def test_runs_are_ordered_by_the_numbers_in_their_names(tmp_path: Path) -> None:
    names = ["lr_1e-4", "lr_0.05/run_2", "lr_0.05/run_10", "lr_0.5", "lr_1e+1"]
    for name in reversed(names):
        write_run(tmp_path / name, [1.0])
    assert [str(run.relative_to(tmp_path)) for run in find_runs(tmp_path)] == names


def test_runs_of_different_configs_in_one_directory_are_never_averaged(tmp_path: Path) -> None:
    for run_id, rate in enumerate((0.1, 0.1, 0.01)):
        newer = {"algo.replay.selector": ""} if run_id == 1 else {}  # a key that older code did not have, not used
        write_run(tmp_path / f"exp/run_{run_id}", [1.0], **{"algo.learning_rate": rate}, **newer, seed=run_id)
    labels = {experiment.label: len(experiment.runs) for experiment in find_experiments([tmp_path / "exp"], ())}
    assert labels == {"algo.learning_rate=0.1": 2, "algo.learning_rate=0.01": 1}


def test_labels_name_the_curves_in_order(study: Path) -> None:
    labels = [each.label for each in find_experiments([study / "ppo", study / "a2c"], ("new", "old"))]
    assert labels == ["new", "old"]
    runs = [study / "ppo/run_0", study / "ppo/run_1"]
    assert [each.label for each in find_experiments(runs, ("one", "two"))] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"3 labels for 2 curves \(a2c, ppo\)"):
        find_experiments([study], ("a", "b", "c"))


def test_runs_with_different_samplers_are_seeds_of_one_experiment(tmp_path: Path) -> None:
    common = {"sampler.batch_T": 32}
    write_run(tmp_path / "exp/run_0", [1.0], seed=0, sampler="serial", **common)
    write_run(
        tmp_path / "exp/run_1", [1.0], seed=1, sampler="cpu", **{"sampler.n_workers": 2, "eval.n_workers": 2}, **common
    )
    (experiment,) = find_experiments([tmp_path / "exp"], ())
    assert len(experiment.runs) == 2
    write_run(tmp_path / "exp/run_2", [1.0], seed=2, sampler="serial", **{"sampler.batch_T": 64})
    assert {each.label for each in find_experiments([tmp_path / "exp"], ())} == {
        "sampler.batch_T=32",
        "sampler.batch_T=64",
    }


def test_failed_and_just_started_runs_are_left_out_with_a_warning(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [{"name": f"ppo/run_{seed}", "state": "failed" if seed == 2 else "done"} for seed in range(3)]
    (study / "experiment.json").write_text(json.dumps({"runs": entries}))
    (study / "a2c/run_0/progress.csv").write_text("env_steps,time/elapsed_s,eval/return_mean\n0,1,2\n")
    write_run(study / "a2c/.run_1.1", [5.0, 5.0])  # what the queue has set aside
    assert {each.label: len(each.runs) for each in find_experiments([study], ())} == {"a2c": 2, "ppo": 2}
    said = capsys.readouterr().err
    assert f"{study}/ppo/run_2 failed: left out" in said
    assert f"{study}/a2c/run_0 has fewer than two rows: left out" in said
    entries = [{"name": f"ppo/run_{seed}", "state": "failed"} for seed in range(3)]
    (study / "experiment.json").write_text(json.dumps({"runs": entries}))
    assert len(find_experiments([study / "ppo"], ())[0].runs) == 3
    assert f"{study}/ppo/run_1 failed: shown nevertheless, as no other is left" in capsys.readouterr().err
    entries = [{"name": f"{name}/run_9", "state": "waiting"} for name in ("ppo", "dqn")]
    (study / "experiment.json").write_text(json.dumps({"runs": [*entries, {"name": "run_1", "state": "pruned"}]}))
    for part, said in ((study, "2 runs"), (study / "ppo", "1 run")):
        find_experiments([part], ())
        assert f"{part}: {said} of the study without a log" in capsys.readouterr().err


def curve(directory: Path, center: str = "mean", smooth: int = 1, x: str = "env_steps") -> LearningCurve:
    (experiment,) = find_experiments([directory], ())
    return make_curve(experiment, x, "eval/return_mean", smooth, center)


@pytest.mark.parametrize("content", ["", "[]", '{"config": {"a"'])
def test_a_run_whose_settings_are_lost_differs_in_that_alone(content: str, tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"run_{seed}", [1.0], seed=seed, **{"algo.clip": 0.2})
    (tmp_path / "run_1/params.json").write_text(content)
    found = {each.label: len(each.runs) for each in find_experiments([tmp_path], ())}
    assert found == {"params.json=whole": 2, "params.json=unreadable": 1}


def test_runs_with_one_row_each_are_told_how_to_have_more(tmp_path: Path) -> None:
    for seed in range(2):
        text = f"env_steps,time/elapsed_s,eval/return_mean\n0,1,\n{10 + seed},2,3\n"
        write_run(tmp_path / f"run_{seed}", [1.0], seed=seed)
        (tmp_path / f"run_{seed}/progress.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"run_0 has one row of eval/return_mean: lower runner.log_interval_steps"):
        curve(tmp_path)


def test_seeds_are_interpolated_over_the_range_they_share(tmp_path: Path) -> None:
    write_run(tmp_path / "exp/run_0", [0.0, 10.0, 20.0], [0, 1_000, 2_000])
    write_run(tmp_path / "exp/run_1", [20.0, 20.0], [500, 1_800])
    drawn = curve(tmp_path / "exp")
    assert (drawn.x[0], drawn.x[-1]) == (500, 1_800)
    np.testing.assert_allclose(drawn.center, (drawn.x / 100 + 20.0) / 2, atol=1e-9)


def test_the_band_is_the_bootstrap_of_the_mean_and_the_same_every_time(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=20)
    for seed, value in enumerate(values):
        write_run(tmp_path / f"exp/run_{seed}", [value])
    drawn, again = curve(tmp_path / "exp"), curve(tmp_path / "exp")
    half_width = 1.96 * values.std() / np.sqrt(len(values))  # the normal approximation
    assert drawn.center[0] == pytest.approx(values.mean())
    assert drawn.high[0] - drawn.center[0] == pytest.approx(half_width, rel=0.15)
    assert drawn.center[0] - drawn.low[0] == pytest.approx(half_width, rel=0.15)
    np.testing.assert_array_equal(drawn.low, again.low)


def test_iqm_leaves_out_the_outer_quarters(tmp_path: Path) -> None:
    for seed, value in enumerate((-1_000.0, 1.0, 3.0, 1_000.0)):
        write_run(tmp_path / f"exp/run_{seed}", [value])
    assert curve(tmp_path / "exp", center="iqm").center[0] == 2.0
    assert curve(tmp_path / "exp").center[0] == 1.0


def test_one_seed_has_no_band_and_can_be_smoothed(tmp_path: Path) -> None:
    write_run(tmp_path / "run_0", [0.0, 3.0, 0.0, 3.0])
    drawn = curve(tmp_path / "run_0")
    np.testing.assert_array_equal(drawn.center, [0.0, 3.0, 0.0, 3.0])
    np.testing.assert_array_equal(drawn.low, drawn.high)
    np.testing.assert_allclose(curve(tmp_path / "run_0", smooth=3).center, [1.5, 1.0, 2.0, 1.5])


def test_a_window_longer_than_the_run_gives_its_mean_in_the_middle(tmp_path: Path) -> None:
    write_run(tmp_path / "run_0", [0.0, 3.0, 6.0])
    assert curve(tmp_path / "run_0", smooth=100).center[1] == pytest.approx(3.0)


def test_empty_cells_and_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run_0", [1.0])
    with (run / "progress.csv").open("a") as file:
        file.write("2000,2.0,\n3000,3.0,5.0\n4000,4")
    drawn = curve(run)
    assert drawn.x.tolist() == [1_000, 3_000]
    assert drawn.center.tolist() == [1.0, 5.0]


def test_wall_time_is_an_x_axis(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(study), "x=elapsed", f"out={tmp_path / 'c.png'}"]) == 0
    assert "at time/elapsed_s 20" in capsys.readouterr().out


def test_without_evaluation_training_returns_are_plotted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run_0", [1.0, 2.0], y="episode/return_mean")
    assert main([str(run), f"out={tmp_path / 'c.png'}"]) == 0
    captured = capsys.readouterr()
    assert "has no eval/return_mean: plotting episode/return_mean instead" in captured.err
    assert "episode/return_mean 2.0" in captured.out


def test_the_columns_of_every_seed_count_for_y(tmp_path: Path) -> None:
    evaluated = {"env_steps": [0, 100], "eval/return_mean": [1.0, 2.0], "episode/return_mean": [1.0, 2.0]}
    trained = {"env_steps": [0, 100], "episode/return_mean": [3.0, 4.0]}
    plot_runs([[trained, evaluated]], out=tmp_path / "c.png")
    with pytest.raises(ConfigError, match="run 0 has no 'eval/length_mean'"):
        plot_runs([[trained, {**evaluated, "eval/length_mean": [1.0, 2.0]}]], y="eval/length_mean")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("smoth=3", "'smoth' is not an option .* did you mean smooth"),
        ("x=env_step", "did you mean env_steps"),
        ("smooth=0", "smooth='0' is not a whole number >= 1"),
        ("bound=high", "bound='high' is not a number"),
        ("y=eval/retrn_mean", "did you mean eval/return_mean"),
        ("out=curves.foo", r"use curves\.png, \.pdf or \.svg"),
        ("out=curves", r"use curves\.png, \.pdf or \.svg"),
        ("out=/proc/x.png", r"out=/proc/x\.png cannot be written"),
        ("nowhere", "nowhere is not a directory"),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_2(
    study: Path, argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study), argument]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_no_directory_or_no_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory is given"):
        parse([])
    with pytest.raises(ConfigError, match="contains no run"):
        find_experiments([tmp_path], ())


def test_a_run_without_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run_0", [])
    (run / "progress.csv").write_text("")
    assert main([str(run)]) == 2
    assert f"{run} has no rows yet" in capsys.readouterr().err


def test_a_directory_whose_name_has_an_equals_sign_is_a_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "lr=0.1/run_0", [1.0])
    assert parse([str(run), "smooth=2"]).dirs == (run,)


def test_missing_matplotlib_prints_the_install_command(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(study)]) == 2
    assert capsys.readouterr().err == 'error: plotting needs matplotlib: pip install "rlframe[plot]"\n'


def test_help_explains_and_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys\nfrom rlframe.plot import main\nstatus = main(['--help'])\n"
        "print(status, [name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "out=curves.png" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 []"
