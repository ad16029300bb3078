"""The evaluate command scores and films a trained agent."""

import json
import math
import os
import re
import shutil

import gymnasium
import numpy as np
import pytest

from rlframe import launch
from rlframe.core.errors import ConfigError
from rlframe.deploy.load import load_trained
from rlframe.envs import EnvConfig
from rlframe.evaluate import main
from rlframe.evaluation.film import FilmConfig, film, frames
from rlframe.evaluation.report import logged_return

SMALL = ["sampler=serial", "sampler.batch_T=16", "sampler.batch_B=4", "algo.minibatches=2", "algo.epochs=2"]
SMALL += ["runner.n_steps=256", "runner.log_interval_steps=128", "eval.n_episodes=2", "eval.n_envs=2"]
LINE = re.compile(r"Episode #\d+: return: -?\d+\.\d length: \d+ (terminated|truncated)")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = [f"log_dir={folder}", *SMALL, "env=CartPole-v1", "model.memory=gru", "model.normalize_observation=true"]
    assert launch.main(words) == 0
    return folder / "run_0"


@pytest.mark.quick
def test_every_episode_has_its_line_and_the_summary_its_numbers(run, tmp_path, capsys):
    out = tmp_path / "deep" / "summary.json"
    assert main([str(run), "n_episodes=5", "n_envs=2", f"out={out}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Episode #")]
    assert len(lines) == 5
    assert all(LINE.fullmatch(line) for line in lines)
    summary = json.loads(out.read_text())
    returns = [episode["return"] for episode in summary["episodes"]]
    assert summary["eval/return_mean"] == pytest.approx(sum(returns) / 5)


def test_an_evaluation_is_repeatable_and_depends_on_its_seed(run, tmp_path):
    def returns(seed: int, name: str) -> list[float]:
        out = tmp_path / name
        assert main([str(run), "n_episodes=6", f"seed={seed}", f"out={out}", "explore=true"]) == 0
        return [episode["return"] for episode in json.loads(out.read_text())["episodes"]]

    assert returns(0, "a") == returns(0, "b")
    assert returns(0, "a") != returns(1, "c")


def test_every_episode_is_a_video_file(run, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    assert main([str(run), "n_episodes=2", f"video={tmp_path}"]) == 0
    films = sorted(tmp_path.glob("*.mp4"))
    assert [film.name for film in films] == ["episode_0.mp4", "episode_1.mp4"]
    assert all(film.stat().st_size > 1000 for film in films)


@pytest.mark.parametrize(
    ("words", "explore"),
    [
        (["env=CartPole-v1"], "true"),
        (["env=Pendulum-v1", "env.max_episode_steps=20"], "false"),
        pytest.param(["env=CartPole-v1"], "false", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_evaluation_at_a_snapshot_is_replayed_exactly(words, explore, tmp_path, capsys):
    settings = ["seed=3", f"eval.explore={explore}", "snapshot_mode=all", "model.memory=lstm", "eval.n_workers=0"]
    assert launch.main([f"log_dir={tmp_path}", *SMALL, *words, *settings]) == 0
    for snapshot in ("snapshot/last", "snapshot/step_000000000000"):
        assert main([str(tmp_path / "run_0" / snapshot), "replay=true", f"out={tmp_path / 'out.json'}"]) == 0
        told = capsys.readouterr().out.splitlines()[-1]
        assert re.fullmatch(r"replay: return_mean (\S+), the same as \1 in progress.csv at \d+ env_steps", told)
    assert json.loads((tmp_path / "out.json").read_text())["n_episodes"] == 2


def test_the_logged_return_of_a_run_from_data_is_that_of_its_updates(tmp_path):
    log = tmp_path / "progress.csv"
    log.write_text("env_steps,updates,eval/return_mean\n0,,5.0\n0,1000,300.0\n0,1500,\n0,2000,50.0\n")
    assert [logged_return(log, step) for step in (0, 1000, 2000)] == [5.0, 300.0, 50.0]
    with pytest.raises(ConfigError, match=r"did not evaluate at step 1500 of its snapshot; it did at 0, 1000, 2000"):
        logged_return(log, 1500)


def test_what_cannot_be_replayed_is_refused(run, tmp_path, capsys):
    assert main([str(run), "replay=true", "n_episodes=3"]) == 2
    assert "replay=true plays the run's own evaluation again, so n_episodes cannot be chosen" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "run_0", symlinks=True)
    rows = (tmp_path / "run_0/progress.csv").read_text().splitlines()
    (tmp_path / "run_0/progress.csv").write_text("\n".join(rows[:-1]) + "\n")
    assert main([str(tmp_path / "run_0"), "replay=true"]) == 2
    assert "the run did not evaluate at step" in capsys.readouterr().err


def test_a_film_of_an_episode_that_never_ends_is_cut(run, tmp_path, caplog):
    pytest.importorskip("imageio_ffmpeg")
    config = FilmConfig(n_episodes=3, max_length=6)
    films = list(film(tmp_path, EnvConfig("tests.test_evaluate:endless"), load_trained(run).agent, config))
    assert [(path.name, each.length, each.terminated) for path, each in films] == [("episode_0.mp4", 7, False)]
    assert "cut after 7 steps without an end" in caplog.text


def test_frames_show_the_return_and_the_step_and_the_last_one_its_episode(run):
    pytest.importorskip("PIL")
    config = FilmConfig(n_episodes=2, max_length=3)
    shown = list(frames(EnvConfig("tests.test_evaluate:endless"), load_trained(run).agent, config))
    assert [len(frame.ended) for frame in shown] == [0, 0, 0, 0, 1], "the first episode is cut, and is the last"
    assert shown[-1].ended[0].length == 4
    assert all(frame.image.shape == (320, 480, 3) and frame.image.dtype == np.uint8 for frame in shown)
    corner = [frame.image[:40] for frame in shown]
    assert all(np.any(picture > 200) for picture in corner), "white text on a black picture"
    assert not np.array_equal(corner[0], corner[1])
    assert not shown[0].image[40:].any()


def endless(render_mode: str = "") -> gymnasium.Env:
    """CartPole whose pole never falls."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=-1, disable_env_checker=True).unwrapped
    env.render_mode = render_mode
    env.render = lambda: np.zeros((40, 60, 3), np.uint8)  # type: ignore[method-assign]
    step = env.step
    env.step = lambda action: (step(action)[0] * 0, 1.0, False, False, {})  # type: ignore[method-assign]
    return env


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["n_episode=3"], "did you mean n_episodes"),
        (["record=mine-v0"], "record is of training, and has no effect here"),
        (
            ["eval.opponents=[random]"],
            "eval.opponents is of training, and has no effect here (name the players after the run",
        ),
        (["compile=true"], "compile is of training, and has no effect here"),
        (["n_episodes=x"], "whole number"),
        (["n_episodes=0"], "at least 1"),
        (["explore=perhaps"], "true or false"),
        (["n_episodes=0", "video=films"], "at least 1"),
        (["n_episodes=1", "video=/proc/films"], "cannot hold films: No such file or directory; name another folder"),
        (["n_episodes=1", "video=/proc"], "cannot hold films"),
        (["out=/proc/x/y.json", "n_episodes=1"], "cannot be written"),
        (["out=/proc/x.csv", "n_episodes=1"], "out=/proc/x.csv cannot be written"),
        (
            ["dataset=/proc/rows", "n_episodes=1"],
            "/proc/rows cannot be written: No such file or directory; name another",
        ),
        (["out=/proc", "n_episodes=1"], "out=/proc cannot be written: it is a directory"),
    ],
)
def test_bad_words_are_refused_in_one_message(run, capsys, words, message):
    assert main([str(run), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert "Episode #" not in captured.out, "it is refused before any episode is played"


def scores_of_its_own() -> gymnasium.Env:
    """CartPole with numbers that have the names of others, or are none."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=5)
    step = env.step
    env.step = lambda action: (*step(action)[:4], {"return": -7.0, "x": math.nan})  # type: ignore[method-assign]
    return env


def test_numbers_of_the_environment_do_not_take_the_place_of_the_return(run, tmp_path):
    out = tmp_path / "result.json"
    assert (
        main([str(run), "n_episodes=1", "env=tests.test_evaluate:scores_of_its_own", f"out={out}", "trust=true"]) == 0
    )
    (episode,) = json.loads(out.read_text(), parse_constant=pytest.fail)["episodes"]
    assert (episode["return"], episode["env/return"], episode["env/x"]) == (episode["length"], -7.0, None)


def test_two_runs_are_loaded_with_the_keys_of_the_command_line_as_one_is(run, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    params = (other / "params.json").read_text()
    (other / "params.json").write_text(params.replace('"CartPole-v1"', '"Nowhere-v7"'))
    assert main([str(other), str(run), "n_episodes=1", "env=CartPole-v1"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["result.json", "result.csv"])
def test_a_link_in_the_place_of_the_result_is_not_written_through(run, tmp_path, capsys, name):
    outside, out = tmp_path / "outside", tmp_path / name
    outside.write_text("precious")
    out.symlink_to(outside)
    assert main([str(run), "n_episodes=1", f"out={out}"]) == 2
    assert f"is a link to {outside}; name another file" in capsys.readouterr().err
    out.unlink()
    out.hardlink_to(outside)
    assert main([str(run), "n_episodes=1", f"out={out}"]) == 0
    assert outside.read_text() == "precious"
    assert out.stat().st_size > 100


def test_a_result_may_go_to_a_pipe(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main([str(run), "n_episodes=1", f"out={pipe}"]) == 0
        assert json.loads(os.read(reader, 1 << 16))["n_episodes"] == 1
    finally:
        os.close(reader)


def test_a_film_is_not_written_through_a_link(run, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / "episode_0.mp4").symlink_to(outside)
    assert main([str(run), "n_episodes=1", f"video={tmp_path}"]) == 0
    assert outside.read_text() == "precious"
    assert not (tmp_path / "episode_0.mp4").is_symlink()
