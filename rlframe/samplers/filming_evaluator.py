"""FilmingEvaluator: films an episode after every n-th evaluation, `eval.video_every=n`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, EnvError
from rlframe.record.films import film_path
from rlframe.record.snapshot import check_inside, remove_leftovers
from rlframe.rollout.film import FilmConfig, check_film, film_episode
from rlframe.samplers.evaluator import BaseEvaluator, EvalConfig, Stop, never

_logger = logging.getLogger("rlframe")


class FilmingEvaluator(BaseEvaluator):
    """Scores as the evaluator that it wraps. A film that fails is a warning.

    All films have the same seeds, so that the episode starts in the same way and the agents can be compared.
    """

    config: EvalConfig
    env: EnvConfig

    def __init__(
        self, make: Callable[[], BaseEvaluator], env: EnvConfig, agent: Agent, config: EvalConfig, seed: int
    ) -> None:
        """`make`: makes the evaluator that scores.

        Raises:
            ConfigError: imageio or Pillow is not installed, or the environment cannot render images.
        """
        self.interval_steps = config.interval_steps
        self.env, self._agent, self.config = env, agent, config
        self._film_config = FilmConfig(1, seed, config.explore, config.max_length)
        self._folder, self._n = "", 0  # n: evaluations so far
        self._heartbeat = np.zeros(1, np.int64)
        try:
            with agent.exploring_at(config.epsilon):
                check_film(env, agent, self._film_config)
        except (ConfigError, EnvError) as error:
            raise ConfigError(f"eval.video_every={config.video_every} cannot film: {error}") from None
        self._scorer = make()

    def score(self, number: int, stop: Stop = never) -> dict[str, float]:
        metrics = self._scorer.score(number, stop)
        if self._folder and self._n % self.config.video_every == 0:
            self._film(number, stop)
        self._n += 1
        return metrics

    def _film(self, number: int, stop: Stop) -> None:
        folder = Path(self._folder)
        try:
            check_inside(folder)
            folder.mkdir(exist_ok=True)
            remove_leftovers(folder)
            pictures = film_episode(film_path(folder, number), self.env, self._agent, self._film_config)
            with self._agent.exploring_at(self.config.epsilon), closing(pictures):
                for _ in pictures:
                    self._heartbeat[0] += 1
                    if stop():
                        return
        except Exception as error:  # of the environment, the disk or ffmpeg
            _logger.warning(f"the evaluation of env_steps {number:,} was not filmed: {type(error).__name__}: {error}")

    def film_in(self, folder: str) -> None:
        self._folder = folder

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._heartbeat = heartbeat
        self._scorer.set_heartbeat(heartbeat)

    def close(self) -> None:
        self._scorer.close()
