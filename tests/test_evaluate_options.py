"""The evaluate command: keys of the run, snapshots, several runs, files, epsilon and steps."""

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import pytest

from rlframe import evaluate, launch
from rlframe.core.command_line import KeyValues
from rlframe.deploy.load import choose_snapshot, load_trained
from rlframe.evaluate import main
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.record.snapshot import link_target, list_snapshots, read_meta
from tests.test_evaluate import SMALL

FEW = ["n_episodes=2", "n_envs=2"]
DQN = ["algo=dqn", "algo.learning_starts=100", "algo.replay.size=1000", "algo.batch_size=16", "model.hidden=[8]"]
DQN += ["sampler=serial", "sampler.batch_T=8", "sampler.batch_B=2", "runner.n_steps=256", "eval.n_episodes=2"]
DQN += ["runner.log_interval_steps=128"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps its best snapshot."""
    folder = tmp_path_factory.mktemp("runs")
    assert launch.main([f"log_dir={folder}", *SMALL, "env=CartPole-v1", "snapshot_mode=all"]) == 0
    return folder / "run_0"


@pytest.fixture(scope="module")
def dqn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert launch.main([f"log_dir={folder}", *DQN, "env=CartPole-v1"]) == 0
    return folder / "run_0"


def changed(run: Path, folder: Path, **config: object) -> Path:
    """A copy of the run whose config has other values; __ stands for a dot."""
    copy = Path(shutil.copytree(run, folder / "run_0", symlinks=True))
    params = json.loads((copy / "params.json").read_text())
    params["config"] |= {key.replace("__", "."): value for key, value in config.items()}
    (copy / "params.json").write_text(json.dumps(params))
    return copy


def printed(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    status = main([str(run), *words])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def error(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    """The one line of an error."""
    assert main([str(run), *words]) != 0
    captured = capsys.readouterr()
    assert "Episode #" not in captured.out, "nothing has been played"
    assert "Traceback" not in captured.err
    return captured.err


def lengths(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"length: (\d+)", text)]


def test_another_environment_gets_no_arguments_of_the_one_that_was_trained_on(tmp_path, capsys, caplog):
    words = [f"log_dir={tmp_path}", *SMALL, "env=MountainCar-v0", "env_kwargs.goal_velocity=0.05"]
    words += ["eval.env_kwargs.goal_velocity=0.01", "env.max_episode_steps=20"]
    assert launch.main(words) == 0
    run, other = tmp_path / "run_0", "env=tests.test_evaluate_options:hill"
    said = "env_kwargs.goal_velocity of MountainCar-v0 left out, as the environment is tests.test_evaluate_options:hill"
    assert main([str(run), *FEW, other, "env_kwargs.height=2", "trust=true"]) == 0
    assert said in caplog.text
    assert f"eval.{said}" in caplog.text
    assert main([str(run), *FEW, other.replace("env", "eval.env"), "trust=true"]) == 0
    assert main([str(run), *FEW, other, "env_kwargs.goal_velocity=0", "trust=true"]) != 0
    assert "has no argument env_kwargs.goal_velocity" in capsys.readouterr().err
    caplog.clear()
    assert main([str(run), *FEW, "env=MountainCar-v0"]) == 0
    assert "left out" not in caplog.text


def hill(height: float = 1.0) -> gymnasium.Env:
    return gymnasium.make("MountainCar-v0", max_episode_steps=int(5 * height))


def test_keys_of_the_run_have_other_values_in_an_evaluation(run, capsys):
    assert set(lengths(printed(capsys, run, *FEW, "env_kwargs.max_episode_steps=5"))) == {5}
    assert set(lengths(printed(capsys, run, *FEW, "eval.env_kwargs.max_episode_steps=6"))) == {6}
    assert "ppo_CartPole-v0" in printed(capsys, run, *FEW, "env=CartPole-v0", "env_backend=python", "threads=1")
    assert len(lengths(printed(capsys, run, "eval.n_episodes=3", "precision=fp32"))) == 3


def test_a_run_of_more_learners_than_episodes_is_evaluated(run: Path, tmp_path: Path) -> None:
    copy = str(changed(run, tmp_path, learners=16))
    assert main([copy, "n_episodes=3"]) == 0
    assert main([copy, "n_episodes=20", "n_envs=2"]) == 0


def test_env_wins_over_the_environment_that_the_run_evaluates_on(run, tmp_path):
    copy = changed(run, tmp_path, eval__env="CartPole-v0")
    assert load_trained(copy).env.id == "CartPole-v0"
    options = evaluate.read_options(KeyValues(["env=CartPole-v1"]))
    assert load_trained(copy, changes=options.changes).env.id == "CartPole-v1"


def test_an_evaluation_by_a_function_cannot_be_replayed(run, tmp_path, capsys):
    copy = changed(run, tmp_path, eval__function="tests.test_evaluate_options:constant")
    told = error(capsys, copy, "replay=true", "trust=true")
    assert "the run evaluated by eval.function=tests.test_evaluate_options:constant" in told
    assert len(lengths(printed(capsys, copy, *FEW, "trust=true"))) == 2


def constant(policy: object, make_env: object) -> dict[str, float]:
    return {"return_mean": 1.0}


def test_env_kwargs_win_over_those_that_the_run_evaluates_with(run, tmp_path, capsys):
    copy = changed(run, tmp_path, eval__env_kwargs={"max_episode_steps": 7})
    assert set(lengths(printed(capsys, copy, *FEW))) == {7}
    assert set(lengths(printed(capsys, copy, *FEW, "env_kwargs.max_episode_steps=4"))) == {4}
    assert set(lengths(printed(capsys, copy, *FEW, "env_kwargs={max_episode_steps: 3}"))) == {3}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env=Acrobot-v1"], r"another network: .*env=Acrobot-v1 has observations Box\(.*must stay as it was trained"),
        (["env=Pendulum-v1"], "another network"),
        (["model.hidden=[8]"], "another network"),
        (["model.hidden=[100000,100000]"], "another network"),
        (["algo=dqn"], "another network"),
        (["algo=sac", "env=Pendulum-v1"], "another network"),
        (["env=CartPole-v7"], r"not registered .* did you mean CartPole-v[01]"),
        (["env_kwargs.lenght=3"], "no argument env_kwargs.lenght"),
        (["agents.policies.prey.init=x"], "agents.policies.prey.init is of training, and has no effect here"),
        (["runner.n_steps=5"], "runner.n_steps is of training, and has no effect here"),
        (["algo.explore=boltzmann"], "algo.explore is of training, and has no effect here"),
        (["algo.explore.epsilon=0.5"], "algo.explore.epsilon is of training, and has no effect here"),
        (["reward.bonus=none"], "reward.bonus is of training, and has no effect here"),
        (["snapshot_mode=best"], "snapshot_mode is of training"),
        (["model.hiden=[8]"], r"unknown key model.hiden; did you mean model.hidden"),
        (["eval.n_envz=3"], r"did you mean eval.n_envs"),
        (["stepz=3"], r"unknown key 'stepz'; did you mean steps"),
        (["steps=100", "n_episodes=3"], "steps and n_episodes both say how long to play"),
        (["steps=0"], "at least 1"),
        (["steps=100", "video=films"], "with render and video give n_episodes"),
        (["n_envs=3", "eval.n_envs=3"], "n_envs is short for eval.n_envs"),
        (["epsilon=0.1"], "epsilon=0.1 is for agents that act at random at that rate .* PolicyAgent does not"),
        (["epsilon=0.1", "explore=false"], "needs eval.explore=true"),
        (["epsilon=1.5"], "from 0 to 1"),
        (["epsilon=much"], "epsilon=much"),
        (["render=rgb"], "must be human"),
        (["render=human", "video=films"], "choose one of them"),
        (["snapshot=step_7"], r"has no snapshot 'step_7'; it has best, last, step_0+, .*did you mean step_"),
        (["replay=true", "env=CartPole-v0"], "env cannot be chosen"),
        (["replay=true", "epsilon=0.1"], "epsilon cannot be chosen"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_error_before_anything_is_played(run, capsys, words, message):
    assert re.search(message, error(capsys, run, *words), re.DOTALL)


def test_the_best_snapshot_is_taken_if_the_run_keeps_one_and_the_choice_is_printed(run, dqn, capsys):
    best, newest = link_target(run / "snapshot/best"), list_snapshots(run / "snapshot")[-1]
    meta = read_meta(best)
    line = printed(capsys, run, *FEW).splitlines()[0]
    expected = f"the best snapshot (snapshot=last takes the newest): {best}, trained for {meta['env_steps']} env_steps"
    assert line == f"ppo_CartPole-v1: {expected}, score {meta['score']:.1f}"
    assert f"snapshot=last: {newest}, " in printed(capsys, run, *FEW, "snapshot=last")
    assert f"snapshot={newest.name}: {newest}, " in printed(capsys, run, *FEW, f"snapshot={newest.name}")
    assert f"the snapshot that was named: {newest}, " in printed(capsys, newest, *FEW)
    assert "the newest snapshot (the run keeps no best one)" in printed(capsys, dqn, *FEW)


def test_a_snapshot_that_cannot_be_chosen_is_an_error_that_lists_the_others(run, dqn, capsys):
    told = error(capsys, dqn, "snapshot=best")
    assert "no snapshot 'best'; it has last, step_" in told
    assert "snapshot_mode=best keeps the best one" in told
    assert "needs a run directory" in error(capsys, choose_snapshot(run), "snapshot=last")


def test_the_newest_snapshot_replaces_a_damaged_best_one_with_a_warning(run, tmp_path, caplog, capsys):
    copy = tmp_path / "run_0"
    shutil.copytree(run, copy, symlinks=True)
    best = link_target(copy / "snapshot/best")
    os.truncate(best / "arrays.safetensors", 100)
    assert "the newest snapshot (the best one is damaged)" in printed(capsys, copy, *FEW)
    assert "the best snapshot cannot be used" in caplog.text
    dataset = f"dataset={tmp_path}/few-v0"
    printed(capsys, run, dataset, "explore=true", *FEW)
    caplog.clear()
    assert "wis" in printed(capsys, copy, "estimate=wis", dataset)
    assert "the best snapshot cannot be used" in caplog.text, "estimates and matches take the newest too"
    assert "damaged" in error(capsys, copy, "snapshot=best") or "bytes" in error(capsys, copy, "snapshot=best")


def test_an_evaluation_of_a_chosen_snapshot_is_replayed(run, capsys):
    for snapshot in ("best", "last"):
        text = printed(capsys, run, "replay=true", f"snapshot={snapshot}")
        assert re.search(r"replay: return_mean (\S+), the same as \1 in progress.csv", text)


def test_several_runs_end_with_a_table(run, dqn, tmp_path, capsys):
    out = tmp_path / "all.json"
    text = printed(capsys, run, str(dqn), *FEW, f"out={out}")
    header, *rows = text.splitlines()[-3:]
    assert header.split() == ["run", "trained", "for", "episodes", "return", "min", "max", "length"]
    assert [row.split()[0] for row in rows] == [str(run), str(dqn)]
    assert all(re.search(r" \d+ env_steps +2 +\d+\.\d \+- \d+\.\d +\d+\.\d +\d+\.\d +\d+\.\d$", row) for row in rows)
    assert [each["run"] for each in json.loads(out.read_text())] == [str(run), str(dqn)]
    assert all({"env_steps", "updates"} <= each.keys() for each in json.loads(out.read_text()))


def test_a_missing_run_is_an_error_before_the_others_are_played(run, tmp_path, capsys):
    assert "does not exist" in error(capsys, run, str(tmp_path / "nothing"), *FEW)
    assert "epsilon" in error(capsys, run, *FEW, "epsilon=0.5")


def test_a_csv_has_one_row_for_each_episode(run, dqn, tmp_path, capsys):
    out = tmp_path / "deep/episodes.csv"
    text = printed(capsys, run, str(dqn), "n_episodes=3", "n_envs=2", f"out={out}", "seed=4")
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [str(run)] * 3 + [str(dqn)] * 3
    assert [(row["episode"], row["env"]) for row in rows[:3]] == [("0", "0"), ("1", "0"), ("2", "1")]
    assert [int(row["length"]) for row in rows] == lengths(text)
    assert rows[0]["seed"] == rows[1]["seed"] == rows[3]["seed"] != rows[2]["seed"]
    assert rows[0]["snapshot"].startswith("step_")
    assert {row["end"] for row in rows} <= {"terminated", "truncated"}


def test_a_csv_has_what_the_environment_reports(tmp_path, capsys):
    words = ["env=tests.envs.custom:scripted", "env_kwargs.script=infos", "eval.n_workers=0"]
    assert launch.main([f"log_dir={tmp_path}", *SMALL, *words]) == 0
    printed(capsys, tmp_path / "run_0", *FEW, f"out={tmp_path / 'out.csv'}", "trust=true")
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["env/always"]) > 0 for row in rows] == [True, True]


def test_steps_are_played_in_whole_episodes_of_every_environment(run, tmp_path, capsys):
    out = tmp_path / "out.csv"
    text = printed(capsys, run, "steps=1000", "n_envs=4", f"out={out}")
    with out.open() as file:
        rows = list(csv.DictReader(file))
    for env in "0123":
        played = [int(row["length"]) for row in rows if row["env"] == env]
        assert sum(played) >= 250 > sum(played[:-1]), "the last episode started before the share was played"
    total = sum(int(row["length"]) for row in rows)
    assert "each of 4 environments started another episode until it had played 250" in text
    assert f"counts: {total:,} env_steps" in text


def test_epsilon_is_the_rate_of_random_actions_of_an_evaluation_alone(dqn):
    trained = load_trained(dqn)
    trained.agent.exploration.set_level(0.25, 0.25, 2)

    def random_share(epsilon: float) -> float:
        config = EvalConfig(n_envs=4, n_episodes=40, explore=True, epsilon=epsilon)
        evaluator, found = Evaluator(trained.env, trained.agent, config), []
        evaluator.on_batch = lambda x: found.extend((x.action != x.info.q.argmax(-1))[x.valid].tolist())
        evaluator.play()
        return sum(found) / len(found)

    assert random_share(0.0) == 0.0
    for epsilon in (0.4, 1.0):  # one random action of two is the best one
        assert random_share(epsilon) == pytest.approx(epsilon / 2, abs=0.06)
    assert trained.agent.exploration.level.tolist() == [0.25, 0.25, 1.0]


def test_epsilon_alone_explores(dqn, capsys):
    greedy = printed(capsys, dqn, "n_episodes=8")
    assert printed(capsys, dqn, "n_episodes=8", "epsilon=0") == greedy
    assert printed(capsys, dqn, "n_episodes=8", "epsilon=0.5") != greedy


def test_episodes_are_played_in_the_window_of_the_environment(run, monkeypatch, capsys):
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    text = printed(capsys, run, "n_episodes=2", "render=human", "env_kwargs.max_episode_steps=4")
    assert lengths(text) == [4, 4]


def test_a_window_without_a_display_is_an_error(run, monkeypatch, capsys):
    for name in evaluate.DISPLAYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert "render=human needs a display, and DISPLAY is not set" in error(capsys, run, "render=human")


def test_an_environment_without_a_window_is_an_error(run, monkeypatch, capsys):
    monkeypatch.setenv("SDL_VIDEODRIVER", "none")
    assert "render=human: the environment cannot open a window" in error(capsys, run, "render=human")


def test_a_terminal_shows_how_many_episodes_are_played(run, monkeypatch, capsys):
    added: list[int] = []

    @contextmanager
    def bar(title: str, total: int) -> Iterator[object]:
        added.append(-total)
        yield added.append

    monkeypatch.setattr("rlframe.evaluate.progress_bar", bar)
    printed(capsys, run, "n_episodes=3")
    assert added == [-3, 1, 1, 1]


def test_help_names_every_key(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for key in (*evaluate._OWN, *evaluate._OF_EVAL):
        assert f"\n  {key}=" in text
