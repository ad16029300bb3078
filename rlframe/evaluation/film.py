"""Watching an agent: its episodes, one after another on one environment, as frames, films or in a window."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.core.files import check_folder, writing
from rlframe.core.seeding import Role, env_seeds, generator
from rlframe.core.types import Trajectory
from rlframe.envs import EnvConfig, EnvError, Envs, make_envs
from rlframe.record.directory import film_path
from rlframe.record.snapshot import check_inside, remove_leftovers
from rlframe.rollout.collector import Collector, local_collector
from rlframe.system.env_vars import variables_set

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")  # variables, one of which is set where windows open

_LEAST_HEIGHT = 336  # pixels; lower frames are enlarged
_MARGIN = 4  # pixels around the text
_GIF_FPS, _GIF_SIZE = 10, (256, 256)  # at most
_GIF_PICTURES = 200  # of a longer film: evenly spread ones, so it plays faster

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class FilmConfig:
    """Which episodes are watched."""

    n_episodes: int = 1
    seed: int = 0  # of the environment and of the noise; training never uses the same ones
    explore: bool = False  # act with the noise of training
    max_length: int = 200_000  # env steps; a longer episode is cut, and is the last


# The time before a step of an episode, or its end: return and env steps so far, and the episode, if this is its end.
Moment = tuple[float, int, tuple[Trajectory, ...]]


class Frame(NamedTuple):
    """A picture of an episode, with its return and step so far written on it."""

    image: np.ndarray  # [H, W, 3] uint8, H and W even, as video encoders require
    fps: float
    ended: tuple[Trajectory, ...]  # the episode, if this is its last picture


class Films:
    """Films an episode after every n-th evaluation. A film that fails is a warning.

    All films have the same seeds, so that the episode starts in the same way and the agents can be compared.
    """

    def __init__(self, every: int, env: EnvConfig, agent: Agent, config: FilmConfig) -> None:
        """`every`: n; 0: never.

        Raises:
            ConfigError: imageio or Pillow is not installed, or the environment cannot render images.
        """
        self.folder = ""  # where the films go; empty: nothing is filmed
        self.heartbeat: np.ndarray = np.zeros(1, np.int64)  # incremented with every picture
        self._every, self._env, self._agent, self._config = every, env, agent, config
        self._n = 0  # evaluations so far
        if not every:
            return
        try:
            _imageio_writer()
            with closing(frames(env, agent, config)) as shown:
                next(shown)
        except (ConfigError, EnvError) as error:
            raise ConfigError(f"eval.video_every={every} cannot film: {error}") from None

    def evaluated(self, number: int, stop: Callable[[], bool]) -> None:
        """Film an episode if it is due after evaluation `number`, until `stop()` returns True."""
        due = self._every and self.folder and self._n % self._every == 0
        self._n += 1
        if not due:
            return
        try:
            folder = Path(self.folder)
            check_inside(folder)
            folder.mkdir(exist_ok=True)
            remove_leftovers(folder)
            self._film(film_path(folder, number), stop)
        except Exception as error:  # of the environment, the disk or ffmpeg
            _logger.warning(f"the evaluation of env_steps {number:,} was not filmed: {type(error).__name__}: {error}")

    def _film(self, path: Path, stop: Callable[[], bool]) -> None:
        """Film one episode as the mp4 file `path`, with a small GIF beside it; stopped before, it leaves nothing."""
        with (
            TemporaryDirectory(prefix=".writing-", dir=path.parent) as folder,
            closing(frames(self._env, self._agent, self._config)) as shown,
        ):
            mp4, gif, first = Path(folder, "film.mp4"), Path(folder, "film.gif"), next(shown)
            animation = Animation(first.fps)
            with closing(_written(mp4, first, shown)) as written:
                for frame in written:
                    animation.add(frame.image)
                    self.heartbeat[0] += 1
                    if stop():
                        return
            animation.save(gif)
            mp4.replace(path)
            gif.replace(path.with_suffix(".gif"))


def film(folder: Path, env: EnvConfig, agent: Agent, config: FilmConfig) -> Iterator[tuple[Path, Trajectory]]:
    """Write each episode as folder/episode_<n>.mp4 when the next item is asked for.

    Raises:
        ConfigError: imageio or Pillow is not installed, or nothing can be written into the folder.
        EnvError: the environment cannot render images.
    """
    prepare_film(folder)
    with closing(frames(env, agent, config)) as shown:
        for number, frame in enumerate(shown):
            path = folder / f"episode_{number}.mp4"
            with writing(path) as new:
                for last in _written(new, frame, shown):
                    ended = last.ended
            yield path, ended[0]


def prepare_film(folder: Path) -> None:
    """Make the folder of films. Raises ConfigError as `film`."""
    _imageio_writer()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder)
    except OSError as error:
        raise ConfigError(f"video={folder} cannot hold films: {error.strerror}; name another folder") from None


def _imageio_writer() -> Any:
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]  # noqa: F401  # for mp4 files
        from imageio.v2 import get_writer
        from PIL import ImageDraw  # noqa: F401  # for `_picture`
    except ImportError:
        raise ConfigError('video needs imageio and Pillow: pip install "rlframe[video]"') from None
    return get_writer


def _written(path: Path, frame: Frame, shown: Iterator[Frame]) -> Generator[Frame]:
    """An episode's frames from its first on, each after it was written into the mp4 file `path`."""
    with closing(_imageio_writer()(path, fps=frame.fps, macro_block_size=1)) as writer:
        writer.append_data(frame.image)
        yield frame
        while not frame.ended:
            frame = next(shown)
            writer.append_data(frame.image)
            yield frame


def frames(env: EnvConfig, agent: Agent, config: FilmConfig) -> Generator[Frame]:
    """The pictures of the episodes, in order; needs Pillow. Raises EnvError if the environment cannot render images."""
    is_atari = isinstance(env.id, str) and env.id.startswith("ALE/")  # its frames are those that the agent sees
    if not is_atari:
        env = replace(env, kwargs={**env.kwargs, "render_mode": "rgb_array"}, backend="python")
    with _without_display(), _play(env, agent, config) as (envs, moments):
        for return_, length, ended in moments:
            yield Frame(_picture(envs, f"return {return_:.1f}  step {length:,}"), envs.render_fps, ended)


def _without_display() -> AbstractContextManager[None]:
    """Where there is no display, pygame looks for none in the block: libwayland would print an error."""
    has_display = any(os.environ.get(name) for name in DISPLAYS)
    return variables_set({} if has_display else {"SDL_VIDEODRIVER": "dummy"})


def show(env: EnvConfig, agent: Agent, config: FilmConfig) -> Iterator[Trajectory]:
    """Play the episodes in the environment's own window, in real time, when the next item is asked for.

    Raises:
        ConfigError: the environment cannot open a window.
    """
    windowed = replace(env, kwargs={**env.kwargs, "render_mode": "human"}, backend="python")
    with ExitStack() as opened:
        try:
            envs, moments = opened.enter_context(_play(windowed, agent, config))
        except EnvError as error:
            reason = f"{type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else str(error)
            raise ConfigError(
                f"render=human: the environment cannot open a window: {reason}; it may need a display and "
                f'pip install "rlframe[video]"; video=DIR films without a window'
            ) from None
        due_s = time.monotonic()
        for _, _, ended in moments:
            time.sleep(max(0.0, due_s - time.monotonic()))  # many environments wait for this themselves
            due_s = max(due_s, time.monotonic()) + 1 / envs.render_fps
            yield from ended


@contextmanager
def _play(env: EnvConfig, agent: Agent, config: FilmConfig) -> Iterator[tuple[Envs, Iterator[Moment]]]:
    """One environment, and the moments of its episodes, which are played while the moments are asked for."""
    with closing(make_envs(env, 1, env_seeds(config.seed, Role.EVAL_ENV, 1))) as envs:
        noise = generator(config.seed, Role.EVAL_NOISE, 0)
        yield envs, _moments(local_collector(envs, agent, 1, [noise], config.explore), config)


def _moments(collector: Collector, config: FilmConfig) -> Iterator[Moment]:
    tracker, n = collector.tracker, 0  # n: episodes that have ended
    while n < config.n_episodes:
        yield float(tracker.return_[0]), int(tracker.length[0]), ()
        collector.collect()
        ended = tracker.pop()
        if not ended and tracker.length[0] > config.max_length:
            _logger.warning(f"the episode is cut after {tracker.length[0]:,} steps without an end (eval.max_length)")
            ended = [Trajectory(float(tracker.return_[0]), int(tracker.length[0]), False, 0)]
            n = config.n_episodes
        if ended:
            n += 1
            yield ended[0].return_, ended[0].length, tuple(ended)
            if n < config.n_episodes:
                collector.collect()  # the reset, so that each episode begins with its first observation


def _picture(envs: Envs, text: str) -> np.ndarray:
    """The environment now, enlarged if small, with a text in its upper left corner."""
    from PIL import Image, ImageDraw

    frame = envs.frame(0)
    factor = max(1, _LEAST_HEIGHT // frame.shape[0])
    large = frame.repeat(factor, 0).repeat(factor, 1)
    image = Image.fromarray(np.ascontiguousarray(large[: large.shape[0] // 2 * 2, : large.shape[1] // 2 * 2]))
    font = _font(max(12, image.height // 24))
    ImageDraw.Draw(image).text((_MARGIN, _MARGIN), text, "white", font, stroke_width=2, stroke_fill="black")
    return np.asarray(image)


@functools.cache
def _font(height: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(height)


class Animation:
    """A film as a GIF that stays small: every k-th picture, and the last; k doubles when there are too many."""

    def __init__(self, fps: float) -> None:
        """`fps`: pictures per second of the film."""
        self._every, self._n = math.ceil(fps / _GIF_FPS), 0
        self._duration_ms = round(1000 * self._every / fps)
        self._kept: list[Any] = []  # PIL images
        self._last = np.zeros(0, np.uint8)

    def add(self, picture: np.ndarray) -> None:
        """Add the next picture of the film, [H, W, 3] uint8."""
        if self._n % self._every == 0:
            self._kept.append(_small(picture))
        self._n, self._last = self._n + 1, picture
        if len(self._kept) > _GIF_PICTURES:
            self._kept, self._every = self._kept[::2], 2 * self._every

    def save(self, path: Path) -> None:
        """Write the GIF; there is at least one picture."""
        first, *rest = [*self._kept, _small(self._last)]
        first.save(path, save_all=True, append_images=rest, duration=self._duration_ms, loop=0)


def _small(picture: np.ndarray) -> Any:
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail(_GIF_SIZE)
    return image
