"""python -m rlframe.evaluate RUN_DIR_OR_SNAPSHOT [key=value ...]: evaluate a trained agent, and film it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import chz
import numpy as np

from rlframe.agents import Agent
from rlframe.core.command_line import KeyValues, exit_with, run_command
from rlframe.core.errors import ConfigError, printable
from rlframe.core.seeding import Role, env_seeds, generator
from rlframe.core.types import Trajectory
from rlframe.deploy.load import load_trained
from rlframe.envs import EnvConfig, make_envs
from rlframe.rollout.collector import local_collector
from rlframe.samplers import Evaluator
from rlframe.samplers.evaluator import summarize

_KEYS = ("n_episodes", "n_envs", "n_workers", "explore", "seed", "video", "out", "device", "trust", "traceback")
_FRAMES_PER_SECOND = 30
_USAGE = """\
usage: python -m rlframe.evaluate RUN_DIR_OR_SNAPSHOT [key=value ...]

  n_episodes=10    episodes, dealt evenly to the environments beforehand
  n_envs=8         environments that are stepped together
  n_workers=0      worker processes that step them; 0: this process
  explore=false    act with the exploration noise of training
  seed=0           seed of the evaluation; training never uses the same environment seeds
  video=DIR        play the episodes one after another, and write each as DIR/episode_<n>.mp4
  out=FILE.json    write the summary and every episode to a file
  device=auto      auto | cpu | cuda:0
  trust=false      allow the run's config to name code that is not part of rlframe (module:Class, ./file.py)
"""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    if not argv or any(word in ("-h", "--help", "help") for word in argv):
        print(_USAGE)
        return 0 if argv else 2
    return run_command(_evaluate, argv)


def _evaluate(argv: list[str]) -> int:
    path = Path(argv[0])
    words = KeyValues(argv[1:])
    n_episodes, n_envs = words.count("n_episodes", 10), words.count("n_envs", 8)
    n_workers = words.count("n_workers", 0)
    explore, seed = words.flag("explore"), words.count("seed", 0)
    video, out, device = words.text("video"), words.text("out"), words.text("device", "auto")
    trust = words.flag("trust")
    words.check_unknown(_KEYS)
    if n_episodes < 1 or n_envs < 1:
        raise ConfigError(f"n_episodes={n_episodes} and n_envs={n_envs} must be at least 1")

    trained = load_trained(path, device, trust, seed)
    experiment, agent, env = trained.experiment, trained.agent, trained.env
    config = chz.replace(experiment.eval, n_episodes=n_episodes, n_envs=n_envs, n_workers=n_workers, explore=explore)
    print(printable(f"{experiment.title()}: {trained.snapshot}, trained for {trained.env_steps:,} env_steps"))
    if video:
        episodes = film(env, agent, n_episodes, explore, seed, Path(video))
    else:
        with closing(Evaluator(env, agent, config, seed)) as evaluator:
            episodes = evaluator.evaluate()
    summary = summarize(list(episodes), "eval")
    _print(episodes, summary)
    if out:
        facts = {"snapshot": str(trained.snapshot), "env_steps": trained.env_steps, "n_episodes": len(episodes)}
        _write(Path(out), {**facts, **summary}, episodes)
    return 0


def film(env: EnvConfig, agent: Agent, n_episodes: int, explore: bool, seed: int, folder: Path) -> Sequence[Trajectory]:
    """Play episodes on one environment and write each as folder/episode_<n>.mp4.

    Raises:
        ConfigError: imageio is not installed, or the folder cannot be made.
        EnvError: the environment cannot render images.
    """
    try:
        from imageio.v2 import get_writer
    except ImportError:
        raise ConfigError('video needs imageio: pip install "rlframe[video]"') from None
    is_atari = isinstance(env.id, str) and env.id.startswith("ALE/")  # its frames are those that the agent sees
    rendered = env if is_atari else EnvConfig(env.id, {**env.kwargs, "render_mode": "rgb_array"}, "python")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"video={folder} cannot be made: {error.strerror}") from None
    envs = make_envs(rendered, 1, env_seeds(seed, Role.EVAL_ENV, 1))
    collector = local_collector(envs, agent, 1, [generator(seed, Role.EVAL_NOISE, 0)], explore)
    episodes: list[Trajectory] = []
    try:
        while len(episodes) < n_episodes:
            path = folder / f"episode_{len(episodes)}.mp4"
            writer: Any = get_writer(path, fps=_FRAMES_PER_SECOND, macro_block_size=1)
            with closing(writer):
                finished: list[Trajectory] = []
                while not finished:
                    writer.append_data(_even(envs.frame(0)))
                    collector.collect()
                    finished = collector.tracker.pop()
                writer.append_data(_even(envs.frame(0)))
            collector.collect()  # the reset, so that the next video starts with the episode's first frame
            episodes += finished
            print(f"video: {path}")
    finally:
        envs.close()
    return episodes


def _even(frame: np.ndarray) -> np.ndarray:
    """Enlarge small frames, and cut them to even sides, which video encoders require."""
    factor = max(1, 336 // frame.shape[0])
    large = frame.repeat(factor, 0).repeat(factor, 1)
    return large[: large.shape[0] // 2 * 2, : large.shape[1] // 2 * 2]


def _print(episodes: Sequence[Trajectory], summary: Mapping[str, float]) -> None:
    for number, episode in enumerate(episodes):
        end = "terminated" if episode.terminated else "truncated"
        print(f"Episode #{number}: return: {episode.return_:.1f} length: {episode.length} {end}")
    print(
        f"{len(episodes)} episodes: return {summary['eval/return_mean']:.1f} +- {summary['eval/return_std']:.1f} "
        f"(min {summary['eval/return_min']:.1f}, max {summary['eval/return_max']:.1f}), "
        f"length {summary['eval/length_mean']:.1f}"
    )


def _write(out: Path, facts: Mapping[str, Any], episodes: Sequence[Trajectory]) -> None:
    rows = [{"return": e.return_, "length": e.length, "terminated": e.terminated, **e.diagnostics} for e in episodes]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**facts, "episodes": rows}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
