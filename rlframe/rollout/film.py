"""Watching an agent: its episodes, one after another on one environment, as frames, mp4 files or in a window."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.core.files import check_folder, clear_output
from rlframe.core.seeding import Role, env_seeds, generator
from rlframe.core.types import Trajectory
from rlframe.envs import EnvConfig, EnvError, Envs, make_envs
from rlframe.rollout.animation import Animation
from rlframe.rollout.collector import Collector, local_collector

_LEAST_HEIGHT = 336  # pixels; lower frames are enlarged
_MARGIN = 4  # pixels around the text

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class FilmConfig:
    """Which episodes are watched."""

    n_episodes: int = 1
    seed: int = 0  # of the environment and of the noise; training never uses the same ones
    explore: bool = False  # act with the noise of training
    max_length: int = 200_000  # env steps; a longer episode is cut, and is the last


class Moment(NamedTuple):
    """The time before a step of an episode, or its end."""

    return_: float  # so far
    length: int  # env steps so far
    ended: tuple[Trajectory, ...]  # the episode, if this is its end


class Frame(NamedTuple):
    """A picture of an episode, with its return and step so far written on it."""

    image: np.ndarray  # [H, W, 3] uint8, H and W even, as video encoders require
    ended: tuple[Trajectory, ...]  # the episode, if this is its last picture


def film(folder: Path, env: EnvConfig, agent: Agent, config: FilmConfig) -> Iterator[tuple[Path, Trajectory]]:
    """Write each episode as folder/episode_<n>.mp4 when the next item is asked for.

    Raises:
        ConfigError: imageio or Pillow is not installed, or nothing can be written into the folder.
        EnvError: the environment cannot render images.
    """
    get_writer = prepare_film(folder)
    with _play(_with_images(env), agent, config) as (envs, episodes):
        for number, moments in enumerate(episodes):
            path = folder / f"episode_{number}.mp4"
            ended: tuple[Trajectory, ...] = ()
            clear_output(path)
            with closing(get_writer(path, fps=envs.render_fps, macro_block_size=1)) as writer:
                for moment in moments:
                    writer.append_data(_picture(envs, moment))
                    ended = moment.ended
            yield path, ended[0]


def prepare_film(folder: Path) -> Any:
    """Make the folder of films; returns imageio's `get_writer`. Raises ConfigError as `film`."""
    get_writer = _imageio_writer()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder)
    except OSError as error:
        raise ConfigError(f"video={folder} cannot hold films: {error.strerror}; name another folder") from None
    return get_writer


def _imageio_writer() -> Any:
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]  # noqa: F401  # for mp4 files
        from imageio.v2 import get_writer
        from PIL import ImageDraw  # noqa: F401  # for `_picture`
    except ImportError:
        raise ConfigError('video needs imageio and Pillow: pip install "rlframe[video]"') from None
    return get_writer


def check_film(env: EnvConfig, agent: Agent, config: FilmConfig) -> None:
    """Render one picture. Raises ConfigError or EnvError as `film`."""
    _imageio_writer()
    with closing(frames(env, agent, config)) as shown:
        next(shown)


def film_episode(path: Path, env: EnvConfig, agent: Agent, config: FilmConfig) -> Generator[None]:
    """Film one episode as the mp4 file `path`, with a small GIF beside it; yields after every picture.

    Both replace existing files when the film is complete. Closed before, it leaves nothing. Raises as `film`.
    """
    get_writer = _imageio_writer()
    with (
        TemporaryDirectory(prefix=".writing-", dir=path.parent) as folder,
        _play(_with_images(env), agent, config) as (envs, episodes),
    ):
        mp4, gif = Path(folder, "film.mp4"), Path(folder, "film.gif")
        animation = Animation(envs.render_fps)
        with closing(get_writer(mp4, fps=envs.render_fps, macro_block_size=1)) as writer:
            for moment in next(episodes):
                picture = _picture(envs, moment)
                writer.append_data(picture)
                animation.add(picture)
                yield
        animation.save(gif)
        mp4.replace(path)
        gif.replace(path.with_suffix(".gif"))


def frames(env: EnvConfig, agent: Agent, config: FilmConfig) -> Generator[Frame]:
    """The pictures of the episodes, in order; needs Pillow. Raises EnvError if the environment cannot render images."""
    with _play(_with_images(env), agent, config) as (envs, episodes):
        for moments in episodes:
            for moment in moments:
                yield Frame(_picture(envs, moment), moment.ended)


def show(env: EnvConfig, agent: Agent, config: FilmConfig) -> Iterator[Trajectory]:
    """Play the episodes in the environment's own window, in real time, when the next item is asked for.

    Raises:
        ConfigError: the environment cannot open a window.
    """
    windowed = replace(env, kwargs={**env.kwargs, "render_mode": "human"}, backend="python")
    with ExitStack() as opened:
        try:
            envs, episodes = opened.enter_context(_play(windowed, agent, config))
        except EnvError as error:
            reason = f"{type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else str(error)
            raise ConfigError(
                f"render=human: the environment cannot open a window: {reason}; it may need a display and "
                f'pip install "rlframe[video]"; video=DIR films without a window'
            ) from None
        due_s = time.monotonic()
        for moments in episodes:
            for moment in moments:
                time.sleep(max(0.0, due_s - time.monotonic()))  # many environments wait for this themselves
                due_s = max(due_s, time.monotonic()) + 1 / envs.render_fps
                yield from moment.ended


def _with_images(env: EnvConfig) -> EnvConfig:
    is_atari = isinstance(env.id, str) and env.id.startswith("ALE/")  # its frames are those that the agent sees
    return env if is_atari else replace(env, kwargs={**env.kwargs, "render_mode": "rgb_array"}, backend="python")


@contextmanager
def _play(env: EnvConfig, agent: Agent, config: FilmConfig) -> Iterator[tuple[Envs, Iterator[Iterator[Moment]]]]:
    """One environment, and its episodes, which are played while their moments are asked for."""
    with closing(make_envs(env, 1, env_seeds(config.seed, Role.EVAL_ENV, 1))) as envs:
        noise = generator(config.seed, Role.EVAL_NOISE, 0)
        yield envs, _episodes(local_collector(envs, agent, 1, [noise], config.explore), config)


def _episodes(collector: Collector, config: FilmConfig) -> Iterator[Iterator[Moment]]:
    for number in range(config.n_episodes):
        if collector.tracker.length[0] > config.max_length:  # the last one was cut
            return
        if number:
            collector.collect()  # the reset, so that each episode begins with its first observation
        yield _moments(collector, config.max_length)


def _moments(collector: Collector, max_length: int) -> Iterator[Moment]:
    tracker, ended = collector.tracker, list[Trajectory]()
    while not ended and tracker.length[0] <= max_length:
        yield Moment(float(tracker.return_[0]), int(tracker.length[0]), ())
        collector.collect()
        ended = tracker.pop()
    if not ended:
        _logger.warning(f"the episode is cut after {tracker.length[0]:,} steps without an end (eval.max_length)")
        ended = [Trajectory(float(tracker.return_[0]), int(tracker.length[0]), False, 0)]
    yield Moment(ended[0].return_, ended[0].length, tuple(ended))


def _picture(envs: Envs, moment: Moment) -> np.ndarray:
    """The environment now, enlarged if small, with the return and the step in its upper left corner."""
    from PIL import Image, ImageDraw

    frame = envs.frame(0)
    factor = max(1, _LEAST_HEIGHT // frame.shape[0])
    large = frame.repeat(factor, 0).repeat(factor, 1)
    image = Image.fromarray(np.ascontiguousarray(large[: large.shape[0] // 2 * 2, : large.shape[1] // 2 * 2]))
    font, text = _font(max(12, image.height // 24)), f"return {moment.return_:.1f}  step {moment.length:,}"
    ImageDraw.Draw(image).text((_MARGIN, _MARGIN), text, "white", font, stroke_width=2, stroke_fill="black")
    return np.asarray(image)


@functools.cache
def _font(height: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(height)
