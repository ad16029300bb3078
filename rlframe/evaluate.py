"""python -m rlframe.evaluate RUN_DIR_OR_SNAPSHOT [key=value ...]: evaluate a trained agent, and film it."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

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
from rlframe.core.files import iter_csv
from rlframe.core.seeding import Role, env_seeds, generator
from rlframe.core.types import Trajectory
from rlframe.deploy.load import Trained, load_trained, params_of
from rlframe.envs import EnvConfig, make_envs
from rlframe.kernels.device import choose_precision, learning_in
from rlframe.rollout.collector import local_collector
from rlframe.samplers import EvalConfig, Evaluator
from rlframe.samplers.evaluator import summarize

_CHOSEN = ("n_episodes", "n_envs", "explore", "seed", "video")  # not with replay, which has those of the run
_KEYS = (*_CHOSEN, "replay", "n_workers", "out", "device", "trust", "traceback")
_FRAMES_PER_SECOND = 30
_LOG, _SCORE = "progress.csv", "eval/return_mean"
_USAGE = """\
usage: python -m rlframe.evaluate RUN_DIR_OR_SNAPSHOT [key=value ...]

  n_episodes=10    episodes, dealt evenly to the environments beforehand
  n_envs=8         environments that are stepped together
  n_workers=0      worker processes that step them; 0: this process
  explore=false    act with the exploration noise of training
  seed=0           seed of the evaluation; training never uses the same environment seeds
  replay=true      play the evaluation that the run made at this snapshot again, and compare the mean return
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
    replay = words.flag("replay")
    if replay and (chosen := [key for key in _CHOSEN if key in words.remaining]):
        raise ConfigError(f"replay=true plays the run's own evaluation again, so {chosen[0]} cannot be chosen")
    n_episodes, n_envs = words.count("n_episodes", 10), words.count("n_envs", 8)
    n_workers = words.count("n_workers", 0)
    explore, seed = words.flag("explore"), words.count("seed", 0)
    video, out, device = words.text("video"), words.text("out"), words.text("device", "auto")
    trust = words.flag("trust")
    words.check_unknown(_KEYS)
    if n_episodes < 1 or n_envs < 1:
        raise ConfigError(f"n_episodes={n_episodes} and n_envs={n_envs} must be at least 1")

    trained, number = load_trained(path, device, trust), 0
    config = chz.replace(trained.experiment.eval, n_workers=n_workers)
    if replay:
        logged, seed, number = _logged(trained), trained.experiment.seed, trained.env_steps
    else:
        config = chz.replace(config, n_episodes=n_episodes, n_envs=n_envs, explore=explore)
    print(printable(f"{trained.experiment.title()}: {trained.snapshot}, trained for {trained.env_steps:,} env_steps"))
    if video:
        episodes = film(trained.env, trained.agent, config, seed, Path(video))
    else:
        episodes = _play(trained, config, seed, number)
    summary = summarize(list(episodes), "eval")
    _print(episodes, summary)
    if replay:
        same = "the same as" if summary[_SCORE] == logged else "but"
        print(f"replay: return_mean {summary[_SCORE]!r}, {same} {logged!r} in {_LOG} at env_steps {number}")
    if out:
        facts = {"snapshot": str(trained.snapshot), "env_steps": trained.env_steps, "n_episodes": len(episodes)}
        _write(Path(out), {**facts, **summary}, episodes)
    return 0


def _play(trained: Trained, config: EvalConfig, seed: int, number: int) -> Sequence[Trajectory]:
    """Evaluation `number` of this seed, in the precision of the run's own evaluations."""
    precision = choose_precision(trained.experiment.precision, next(trained.agent.parameters()).device)
    with closing(Evaluator(trained.env, trained.agent, config, seed)) as evaluator, learning_in(precision):
        return evaluator.evaluate(number)


def _logged(trained: Trained) -> float:
    """The score of the evaluation that the run made when it wrote the snapshot.

    Raises:
        ConfigError: it made none then.
    """
    log = params_of(trained.snapshot).with_name(_LOG)
    rows = iter_csv(log)
    columns = next(rows, [])
    at = [columns.index(name) for name in ("env_steps", _SCORE) if name in columns]
    scores = {row[at[0]]: row[at[1]] for row in rows if len(at) == 2 and row[at[1]]}
    if found := scores.get(str(trained.env_steps)):
        return float(found)
    others = f"it did at env_steps {', '.join(list(scores)[-5:])}" if scores else "it never did"
    raise ConfigError(f"{log}: the run did not evaluate at env_steps {trained.env_steps} of its snapshot; {others}")


def film(env: EnvConfig, agent: Agent, config: EvalConfig, seed: int, folder: Path) -> Sequence[Trajectory]:
    """Play config.n_episodes on one environment and write each as folder/episode_<n>.mp4.

    One that is longer than config.max_length is the last, and counts as it is then.

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
    collector = local_collector(envs, agent, 1, [generator(seed, Role.EVAL_NOISE, 0)], config.explore)
    episodes: list[Trajectory] = []
    tracker = collector.tracker
    try:
        while len(episodes) < config.n_episodes and tracker.length[0] <= config.max_length:
            path = folder / f"episode_{len(episodes)}.mp4"
            writer: Any = get_writer(path, fps=_FRAMES_PER_SECOND, macro_block_size=1)
            with closing(writer):
                finished: list[Trajectory] = []
                while not finished and tracker.length[0] <= config.max_length:
                    writer.append_data(_even(envs.frame(0)))
                    collector.collect()
                    finished = tracker.pop()
                writer.append_data(_even(envs.frame(0)))
            if not finished:
                print(f"warning: cut after {tracker.length[0]:,} steps without an end (eval.max_length)")
                finished = [Trajectory(float(tracker.return_[0]), int(tracker.length[0]), False, 0)]
            else:
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
