"""The examples run as a reader would run them, and leave the run directories of the contract."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rlframe import evaluate, launch
from rlframe.analysis.curves import find_experiments
from tests.fork_server import run_python
from tests.tables import read_csv

ROOT = Path(__file__).parents[1]


def run_example(name: str, tmp_path: Path, **arguments: object) -> Path:
    """Run an example in a process of its own, in another directory; returns the directory of its run."""
    words = [f"{key}={value}" for key, value in {"log_dir": tmp_path / "runs", "run_ID": 3, **arguments}.items()]
    done = run_python(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), *words],
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "runs/run_3"
    assert done.stdout.splitlines()[-1] == f"run: {directory}"
    return directory


def column(directory: Path, name: str) -> list[float]:
    """The numbers of one column of progress.csv, empty cells left out."""
    return [float(row[name]) for row in read_csv(directory / "progress.csv")[1] if row[name]]


def assert_is_run_directory(directory: Path) -> None:
    names = {path.name.split(".tfevents")[0] for path in directory.iterdir()}
    assert names == {
        *("debug.log", "episodes.csv", "events.out", "params.json", "progress.csv", "progress.jsonl"),
        *("result.json", "snapshot"),
    }


@pytest.mark.quick
def test_example_1_trains_and_leaves_a_run_that_the_commands_understand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_example("example_1.py", tmp_path, n_steps=1_000, seed=5)
    assert_is_run_directory(directory)
    assert column(directory, "env_steps")[0] == 0
    assert column(directory, "env_steps")[-1] >= 1_000
    config = json.loads((directory / "params.json").read_text())["config"]
    assert (config["seed"], config["algo.discount"]) == (5, 0.98)
    assert evaluate.main([str(directory), "n_episodes=2"]) == 0
    assert "Episode #1: return:" in capsys.readouterr().out
    assert launch.main([f"resume={directory}", "runner.n_steps=1_500"]) == 0
    assert column(directory, "env_steps")[-1] >= 1_500


@pytest.mark.slow
def test_example_2_evaluates_before_training_and_after(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    directory = run_example("example_2.py", tmp_path, n_steps=64, batch_T=4, n_eval_episodes=2, max_frames=200)
    assert_is_run_directory(directory)
    assert column(directory, "eval/n_episodes") == [2, 2]
    assert column(directory, "env_steps")[0] == 0


@pytest.mark.slow
def test_example_3_learns_to_catch(tmp_path: Path) -> None:
    directory = run_example("example_3.py", tmp_path, n_steps=20_000)
    assert_is_run_directory(directory)
    returns = column(directory, "episode/return_mean")
    assert returns[0] < 0.0  # -0.6 by chance
    assert returns[-1] > 0.7


def test_example_3_is_one_file_of_under_120_lines() -> None:
    assert len((ROOT / "examples/example_3.py").read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.slow
def test_example_4_samples_and_evaluates_in_workers_and_leaves_a_run_that_the_commands_understand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_example("example_4.py", tmp_path, n_steps=4_000, n_workers=2)
    assert_is_run_directory(directory)
    assert column(directory, "env_steps")[-1] >= 4_000
    assert column(directory, "eval/n_episodes") == [16, 16, 16]
    assert column(directory, "sampler/restarts") == column(directory, "eval/restarts") == [0, 0, 0]
    config = json.loads((directory / "params.json").read_text())["config"]
    assert (config["sampler"], config["sampler.n_workers"], config["eval.n_workers"]) == ("cpu", 2, 2)
    assert evaluate.main([str(directory), "n_episodes=2"]) == 0
    assert "Episode #1: return:" in capsys.readouterr().out
    assert launch.main([f"resume={directory}", "runner.n_steps=6_000", "eval.n_episodes=2"]) == 0
    assert column(directory, "env_steps")[-1] >= 6_000


@pytest.mark.slow
def test_example_5_alternates_with_memory(tmp_path: Path) -> None:
    directory = run_example("example_5.py", tmp_path, n_steps=2_000)
    assert_is_run_directory(directory)
    assert column(directory, "env_steps")[0] == 0
    assert column(directory, "sampler/restarts")[-1] == 0
    config = json.loads((directory / "params.json").read_text())["config"]
    assert (config["sampler"], config["sampler.n_groups"], config["model.memory"]) == ("gpu", 2, "lstm")


@pytest.mark.slow
def test_example_6_scores_the_snapshot_after_training(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    small = {"n_steps": 200, "learning_starts": 100, "replay_size": 1_000, "n_eval_episodes": 2, "max_frames": 200}
    directory = run_example("example_6.py", tmp_path, **small)
    assert_is_run_directory(directory)
    assert column(directory, "replay/rows")[-1] >= 200
    assert column(directory, "updates")[-1] > 20


@pytest.mark.slow
def test_example_7_trains_and_leaves_a_run_that_the_commands_understand(tmp_path: Path) -> None:
    directory = run_example("example_7.py", tmp_path, env="Pendulum-v1", n_steps=400, learning_starts=300)
    assert_is_run_directory(directory)
    assert column(directory, "updates")[-1] == 100
    assert launch.main([f"resume={directory}", "runner.n_steps=440", "eval.n_episodes=1"]) == 0
    assert column(directory, "updates")[-1] == 140


@pytest.mark.slow
def test_example_8_queues_its_own_runs_and_goes_on_with_one_that_was_cut_short(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    words = [sys.executable, "-W", "error", str(ROOT / "examples/example_8.py"), "n_steps=600", "n_seeds=1"]

    def queue() -> str:
        done = run_python([*words, f"log_dir={folder}"], cwd=tmp_path, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "4 of 4 runs done" in queue()
    experiments = find_experiments([folder], ())
    assert [(each.label, len(each.runs)) for each in experiments] == [
        (f"clip={clip},hidden={hidden}", 1) for clip in (0.1, 0.2) for hidden in ("16x16", "64x64")
    ]
    for run in folder.glob("*/run_0"):
        assert_is_run_directory(run)
    (cut,) = folder.glob("clip=0.1,hidden=16x16/run_0")
    record = json.loads((folder / "experiment.json").read_text())
    record["runs"][0]["state"] = "interrupted"
    (folder / "experiment.json").write_text(json.dumps(record))
    assert "4 runs, 3 already done" in queue()
    assert "resume=true" in cut.with_name("run_0.log").read_text()
    assert len(json.loads((cut / "params.json").read_text())["resumed"]) == 1


@pytest.mark.slow
def test_example_10_samples_apart_and_leaves_a_run_that_the_commands_understand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_example("example_10.py", tmp_path, n_steps=4_000)
    assert_is_run_directory(directory)
    assert column(directory, "env_steps")[-1] >= 4_000
    assert max(column(directory, "async/staleness_max")) <= 2
    config = json.loads((directory / "params.json").read_text())["config"]
    assert (config["algo"], config["runner"], config["sampler"]) == ("impala", "async_rl", "serial")
    assert evaluate.main([str(directory), "n_episodes=2"]) == 0
    assert "Episode #1: return:" in capsys.readouterr().out
    assert launch.main([f"resume={directory}", "runner.n_steps=6_000", "eval.n_episodes=2"]) == 0
    assert column(directory, "env_steps")[-1] >= 6_000


@pytest.mark.slow
def test_example_9_trains_in_two_ranks_and_leaves_a_run_that_the_commands_understand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_example("example_9.py", tmp_path, n_steps=400)
    assert_is_run_directory(directory)
    assert column(directory, "env_steps")[-1] >= 400
    assert column(directory, "eval/n_episodes") == [20] * len(column(directory, "env_steps"))
    config = json.loads((directory / "params.json").read_text())["config"]
    assert (config["runner"], config["world_size"], config["sampler.batch_B"]) == ("sync_rl", 2, 4)
    assert evaluate.main([str(directory), "n_episodes=2"]) == 0
    assert "Episode #1: return:" in capsys.readouterr().out


@pytest.mark.slow
def test_example_11_learns_with_actors_and_leaves_the_parameters(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = [sys.executable, str(ROOT / "examples/example_11.py"), "n_steps=800", "path=last.safetensors"]
    done = run_python(words, cwd=tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("env_steps 0: mean return -")
    assert lines[-1].startswith("last.safetensors: the parameters of env_steps 8")
    assert load_file(tmp_path / "last.safetensors")["model.mlp.linears.0.weight"].shape == (64, 3)


@pytest.mark.parametrize("name", [f"example_{number}.py" for number in range(1, 12)])
def test_an_example_opens_by_saying_what_it_shows_and_its_imports_exist(name: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert f"python examples/{name}" in text.split('"""')[1]
    runpy.run_path(str(ROOT / "examples" / name))
