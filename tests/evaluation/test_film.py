"""Films of evaluations: metrics as without them, one after every n-th, no failure for a film; and small GIFs."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import chz
import gymnasium
import numpy as np
import pytest

from rlframe import launch
from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.evaluation.film import Animation
from rlframe.evaluation.process import EvaluatorProcess
from rlframe.record.directory import film_path
from tests.evaluation.killing import stop_while_evaluating
from tests.runners.resumed import words
from tests.samplers.made import agent_for

pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("pygame")
Image = pytest.importorskip("PIL.Image")

CARTPOLE = EnvConfig("CartPole-v1", {"max_episode_steps": 12})
CONFIG = EvalConfig(n_envs=2, n_episodes=3, explore=True, video_every=2)


def cartpole_agent() -> Agent:
    with closing(make_envs(CARTPOLE, 1, [0])) as envs:
        return agent_for(envs.observation_space, envs.action_space)


def filming(env: EnvConfig, agent: Agent) -> BaseEvaluator:
    return Evaluator(env, agent, CONFIG, 5)


@contextmanager
def into(folder: Path, env: EnvConfig = CARTPOLE) -> Iterator[BaseEvaluator]:
    with closing(filming(env, cartpole_agent())) as evaluator:
        evaluator.film_in(str(folder))
        yield evaluator


def films(folder: Path) -> list[str]:
    """All files, hidden ones included."""
    return sorted(path.name for path in folder.iterdir())


def test_metrics_are_those_without_films_and_the_first_and_every_second_after_it_is_filmed(tmp_path: Path) -> None:
    agent, folder = cartpole_agent(), tmp_path / "videos"
    with (
        closing(Evaluator(CARTPOLE, agent, chz.replace(CONFIG, video_every=0), 5)) as plain,
        closing(filming(CARTPOLE, agent)) as filmed,
    ):
        filmed.film_in(str(folder))
        for number in (0, 1000, 2_000_000):
            assert filmed.evaluate(number) == plain.evaluate(number)
    assert films(folder) == [f"step_{step:012d}.{kind}" for step in (0, 2_000_000) for kind in ("gif", "mp4")]


def test_a_film_is_a_whole_episode_with_a_picture_for_each_step(tmp_path: Path) -> None:
    from imageio_ffmpeg import count_frames_and_secs

    with into(tmp_path, EnvConfig("CartPole-v1", {"max_episode_steps": 6})) as evaluator:
        evaluator.evaluate(0)
    n_pictures, seconds = count_frames_and_secs(film_path(tmp_path, 0))
    assert n_pictures == 7
    assert seconds == pytest.approx(7 / 50, abs=0.02), "CartPole has 50 steps a second"


def test_an_evaluation_that_is_made_again_replaces_its_film(tmp_path: Path) -> None:
    film_path(tmp_path, 0).write_bytes(b"old")
    (tmp_path / ".writing-1").mkdir()  # by a process that was killed
    with into(tmp_path) as evaluator:
        evaluator.evaluate(0)
    assert film_path(tmp_path, 0).stat().st_size > 1000
    assert films(tmp_path) == ["step_000000000000.gif", "step_000000000000.mp4"]


def test_nothing_is_filmed_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(filming(CARTPOLE, cartpole_agent())) as evaluator:
        evaluator.film_in("")
        evaluator.evaluate(0)
    assert films(tmp_path) == []


def test_a_stop_ends_the_film_and_keeps_the_metrics(tmp_path: Path) -> None:
    env = EnvConfig("CartPole-v1", {"max_episode_steps": 5})
    with into(tmp_path, env) as evaluator:
        assert evaluator.evaluate(0, stop=lambda: bool(list(tmp_path.glob(".writing-*"))))["eval/n_episodes"] == 3
    assert films(tmp_path) == []


def test_a_heartbeat_counts_while_it_films(tmp_path: Path) -> None:
    beats = []
    with into(tmp_path) as evaluator:
        for _ in range(2):  # the first one is filmed
            heartbeat = np.zeros(1, np.int64)
            evaluator.set_heartbeat(heartbeat)
            evaluator.evaluate(0)
            beats.append(int(heartbeat[0]))
    assert beats[0] >= beats[1] + 9, "an episode has at least 8 steps, and so 9 pictures"


@pytest.mark.parametrize("place", ["a file", "a link", "a missing run"])
def test_a_folder_that_cannot_be_used_is_a_warning(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "videos"
    elsewhere.mkdir()
    if place == "a file":
        folder.write_text("")
    elif place == "a link":
        folder.symlink_to(elsewhere)
    with into(tmp_path / "gone" / "videos" if place == "a missing run" else folder) as evaluator:
        assert "eval/return_mean" in evaluator.evaluate(7000)
    assert "the evaluation of env_steps 7,000 was not filmed" in caplog.text
    assert films(elsewhere) == []


class FailsLater(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that cannot be rendered after its first step."""

    def __init__(self, render_mode: str = "") -> None:
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode or None))
        self._stepped = False

    def step(self, action: Any) -> Any:
        self._stepped = True
        return super().step(action)

    def render(self) -> Any:
        if self._stepped:
            raise ArithmeticError("the lights went out")
        return super().render()


def test_a_film_that_fails_is_a_warning_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with into(tmp_path, EnvConfig(FailsLater, {}, "python")) as evaluator:
        assert "eval/return_mean" in evaluator.evaluate(0)
    assert "was not filmed: EnvError" in caplog.text
    assert "the lights went out" in caplog.text
    assert films(tmp_path) == []


def blind(render_mode: str = "") -> gymnasium.Env:
    """CartPole that cannot be rendered at all."""
    env = FailsLater(render_mode)
    env._stepped = True
    return env


def without_render_mode() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(("env", "why"), [(blind, "the lights went out"), (without_render_mode, "render_mode")])
def test_an_environment_that_cannot_render_is_an_error_at_construction(env: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as found:
        filming(EnvConfig(env, {}, "python"), cartpole_agent())
    assert "eval.video_every=2 cannot film: env" in str(found.value)


def test_the_evaluations_own_process_films_the_parameters_that_it_evaluates(tmp_path: Path) -> None:
    agent = cartpole_agent()
    with into(tmp_path / "here") as evaluator:
        evaluator.evaluate(0)
    with closing(EvaluatorProcess(partial(filming, CARTPOLE), agent, 0.0)) as evaluator:
        evaluator.film_in(str(tmp_path / "there"))
        evaluator.evaluate(0)
        for parameter in agent.parameters():  # learning goes on meanwhile
            parameter.data.zero_()
        assert len(evaluator.finished(wait=True)) == 1
    here, there = (film_path(tmp_path / name, 0).with_suffix(".gif").read_bytes() for name in ("here", "there"))
    assert here == there


@pytest.mark.slow
def test_a_process_that_replaces_a_killed_one_films_too(tmp_path: Path) -> None:
    with closing(EvaluatorProcess(partial(filming, CARTPOLE), cartpole_agent(), 0.0)) as evaluator:
        evaluator.film_in(str(tmp_path / "videos"))
        os.kill(evaluator._service.child.pid, signal.SIGKILL)
        evaluator._service.child._process.join()
        evaluator.evaluate(0)  # to a dead process
        assert [number for number, _ in evaluator.finished(wait=True)] == [0], "by the process that replaces it"
    assert film_path(tmp_path / "videos", 0).exists()


def test_an_evaluation_that_a_resumed_run_makes_again_is_filmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = "algo=a2c env=CartPole-v1 env.max_episode_steps=12 model.hidden=[8] sampler=serial runner.n_steps=40 "
    case += "eval.n_episodes=1 eval.n_workers=0 eval.interval_steps=inf eval.asynchronous=true eval.video_every=1"
    with monkeypatch.context() as patch:
        stop_while_evaluating(patch)
        assert launch.main(words(case, tmp_path)) == 128 + signal.SIGTERM
    shutil.rmtree(tmp_path / "run_0/videos", ignore_errors=True)
    assert launch.main([f"resume={tmp_path / 'run_0'}"]) == 0
    assert len([*(tmp_path / "run_0").glob("videos/*.mp4")]) == 1


def saved(path: Path, n: int, fps: float, shape: tuple[int, int] = (40, 60)) -> list[tuple[float, int]]:
    """Grey value and duration of each picture, of a film that gets brighter."""
    animation = Animation(fps)
    for number in range(n):
        animation.add(np.full((*shape, 3), round(255 * number / (n - 1)), np.uint8))
    animation.save(path)
    with Image.open(path) as gif:
        assert gif.n_frames > 1
        found = []
        for frame in range(gif.n_frames):
            gif.seek(frame)
            found.append((float(np.asarray(gif.convert("L")).mean()), gif.info["duration"]))
        return found


def test_a_film_without_a_display_opens_none_and_prints_nothing() -> None:
    film = """
import os
from rlframe.evaluation.film import FilmConfig, frames
from tests.evaluation.test_film import CARTPOLE, cartpole_agent
shown = list(frames(CARTPOLE, cartpole_agent(), FilmConfig(max_length=3)))
assert len(shown) > 2 and "SDL_VIDEODRIVER" not in os.environ
"""
    without = {key: value for key, value in os.environ.items() if not key.startswith(("SDL_", "XDG_"))}
    without = {key: value for key, value in without.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    done = subprocess.run([sys.executable, "-c", film], env=without, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "XDG_RUNTIME_DIR" in done.stderr) == (0, False), done.stderr


def test_a_gif_has_at_most_ten_pictures_a_second(tmp_path: Path) -> None:
    found = saved(tmp_path / "a.gif", 51, fps=50)
    assert [duration for _, duration in found[:-1]] == [100] * 10, "of 1 s"
    assert found[-1][0] == 255


def test_the_gif_of_a_slow_film_keeps_its_pace(tmp_path: Path) -> None:
    assert [duration for _, duration in saved(tmp_path / "a.gif", 5, fps=4)][:4] == [250] * 4


def test_the_gif_of_a_long_film_is_shown_faster_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    found = saved(tmp_path / "a.gif", 5000, fps=10)
    assert 100 <= len(found) <= 202
    assert found[0][0] == 0
    assert found[-1][0] == 255
    assert abs(found[len(found) // 2][0] - 128) < 5


def test_pictures_of_a_gif_have_at_most_256_pixels_a_side(tmp_path: Path) -> None:
    saved(tmp_path / "a.gif", 3, 10, shape=(400, 600))
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.size == (256, 171)
