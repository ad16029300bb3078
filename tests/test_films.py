"""eval.video_every: films of evaluations in a run's directory and in TensorBoard."""

import csv
import io
import sys
from pathlib import Path

import pytest

from rlframe import launch

SMALL = ["env=CartPole-v1", "sampler.batch_T=16", "sampler.batch_B=4", "algo.minibatches=2", "algo.epochs=2"]
SMALL += ["eval.n_envs=2", "env.max_episode_steps=20"]
SMALL += ["eval.n_episodes=2", "runner.log_interval_steps=64", "runner.n_steps=128", "sampler=serial"]
OF_TIME = ("time/", "memory/", "system/")


def trained(folder: Path, *words: str) -> Path:
    assert launch.main([f"log_dir={folder}", *SMALL, *words]) == 0
    return folder / "run_0"


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "progress.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.startswith(OF_TIME)} for row in csv.DictReader(file)]


def filmed(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (run / "videos").glob("step_*.mp4"))


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert launch.main([f"log_dir={folder}", *SMALL, *words]) == 2
    assert not folder.exists() or not any(folder.rglob("params.json")), "nothing has started"
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_films_change_nothing_in_a_run_and_are_shown_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain, run = trained(tmp_path / "plain"), trained(tmp_path / "filmed", "eval.video_every=2")
    assert rows(run) == rows(plain)
    assert not (plain / "videos").exists()
    evaluated = [int(row["env_steps"]) for row in rows(run)]
    assert filmed(run) == evaluated[::2]
    shown = EventAccumulator(str(run))
    shown.Reload()
    images = shown.Images("eval/video")
    assert [image.step for image in images] == evaluated[::2]
    with Image.open(io.BytesIO(images[0].encoded_image_string)) as gif:
        assert gif.format == "GIF"
        assert gif.n_frames > 1
        assert gif.size == (images[0].width, images[0].height) == (256, 171)


@pytest.mark.slow
def test_an_asynchronous_evaluation_films_and_is_shown_late(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained(tmp_path, "eval.video_every=1", "eval.asynchronous=true")
    evaluated = sorted(int(row["env_steps"]) for row in rows(run) if row["eval/return_mean"])
    assert filmed(run) == evaluated
    shown = EventAccumulator(str(run))
    shown.Reload()
    assert sorted(image.step for image in shown.Images("eval/video")) == evaluated


def test_a_missing_package_is_an_error_before_the_training(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert 'pip install "rlframe[video]"' in refused(capsys, tmp_path, "eval.video_every=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval.video_every=-1"], "eval.video_every=-1 must be"),
        (
            ["eval.video_every=1", "eval.function=tests.test_films:constant"],
            "eval.video_every=1 is of episodes that rlframe plays",
        ),
        (["eval.video_every=1", "runner=minibatch_rl"], "this run makes none"),
    ],
    ids=str,
)
def test_what_cannot_be_filmed_is_an_error_before_the_training(tmp_path, capsys, words, message) -> None:
    assert message in refused(capsys, tmp_path, *words)


def constant(policy: object, make_env: object) -> dict[str, float]:
    return {"return_mean": 1.0}


@pytest.mark.parametrize("damage", [b"", b"GIF89", b"no picture"], ids=str)
def test_a_damaged_gif_is_not_shown(tmp_path: Path, damage: bytes) -> None:
    from rlframe.record.directory import FILMS, film_path
    from rlframe.record.loggers import read_gif

    gif = film_path(tmp_path / FILMS, 0).with_suffix(".gif")
    gif.parent.mkdir()
    gif.write_bytes(damage)
    assert read_gif(tmp_path, 0) == (0, 0, b"")
