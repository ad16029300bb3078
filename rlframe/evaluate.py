"""python -m rlframe.evaluate RUN_DIR_OR_SNAPSHOT... [key=value ...]: evaluate trained agents, film or watch them."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import torch

from rlframe.core.command_line import KeyValues, exit_with, paths_and_settings, run_command
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, decimals, printable
from rlframe.core.files import prepare_output
from rlframe.core.multi_agent import JointSpace
from rlframe.core.seeding import Role, distinct_seeds, round_seed
from rlframe.core.types import Trajectory
from rlframe.data.writing import NewDataset, check_can_write, check_free
from rlframe.deploy.estimating import estimate_runs
from rlframe.deploy.load import Trained, choose_snapshot, load_chosen
from rlframe.deploy.matching import are_matches, play_runs
from rlframe.envs import none
from rlframe.evaluation import Evaluator, report
from rlframe.evaluation.film import DISPLAYS, FilmConfig, film, prepare_film, show
from rlframe.evaluation.recording import EvaluationRecorder
from rlframe.experiment.agents import without_policy
from rlframe.experiment.config import Experiment, kind_of
from rlframe.experiment.settings import to_flat
from rlframe.kernels.device import choose_precision, learning_in
from rlframe.record.console import progress_bar
from rlframe.record.snapshot import params_of
from rlframe.runners.recording import env_spec_json, facts_of
from rlframe.system.env_vars import env_vars_set

_USAGE = """\
usage: python -m rlframe.evaluate RUN_DIR_OR_SNAPSHOT... [key=value ...]

  n_episodes=10    episodes, dealt evenly to the environments beforehand
  steps=N          env steps instead of n_episodes: each environment starts another episode until it has played
                   N / n_envs, and every episode that it starts is played to its end and counts
  n_envs=8         environments that are stepped together
  n_workers=0      worker processes that step them; 0: this process
  explore=false    act with the exploration noise of training
  epsilon=0.05     explore with this rate of random actions (DQN and R2D1)
  seed=0           seed of the evaluation; training never uses the same environment seeds
  snapshot=best    best | last | step_<env_steps>; default: best if the run keeps one (snapshot_mode=best, all, gap)
  replay=true      play the evaluation that the run made at this snapshot again, and compare the mean return
  render=human     play the episodes one after another in the environment's own window
  video=DIR        play the episodes one after another, and write each as DIR/episode_<n>.mp4
  out=FILE         write every episode: FILE.csv one row each, other names JSON with the summary; estimates and
                   matches are JSON
  dataset=NAME     record the episodes to a new dataset, an id such as cartpole-v0 or a path (python -m rlframe.data)
  device=auto      auto | cpu | cuda:0
  trust=false      allow the run's config to name code that is not part of rlframe (module:Class, ./file.py)
  traceback=false  show the traceback of an error
  estimate=wis,fqe dataset=PATH discount=0.99
                   play nothing: estimate the worth of the policy with its noise from episodes of others, by is, wis,
                   pdis, wpdis, dr, wdr and fqe; explore=false, its greedy actions, by fqe alone
                   (docs/guides/estimates.md)

and any other key of the run that matters here, with another value than in training: env=, env_kwargs.NAME=,
env_backend=, eval.NAME=, precision=, threads=, and model.NAME= and algo.NAME= as long as the weights fit the network.
Several runs are evaluated one after another, with a table at the end. Those of an environment of several agents play
each other, n_episodes=100 games for each pair, with the noise of training unless explore=false; further players are
random and module:function of (observation, action_space, rng), such as
rlframe.envs.debug_players:connect_four_one_ply (docs/guides/self_play.md). Ctrl-C ends the evaluation without a result:
of episodes that run side by side, the short ones end first.
"""

_LOG = "progress.csv"
_OWN = ("seed", "snapshot", "replay", "render", "video", "out", "dataset", "device", "trust")
_SHORT = {"steps": "env_steps"}  # key: field of eval., where they differ
_OF_EVAL = ("n_episodes", "steps", "n_envs", "n_workers", "explore", "epsilon")  # with defaults of this command
_WITH_REPLAY = ("replay", "snapshot", "n_workers", "out", "device", "threads", "trust")
_WITHOUT_EFFECT = (  # beginnings of keys of the run
    *("sampler", "runner", "explore.", "algo.explore", "algo.optimizer", "reward.", "snapshot_", "affinity"),
    *("world_size", "learners", "callbacks"),
    *("init", "name", "run_ID", "log_dir", "stop", "loggers", "log_level", "sync"),
    *("eval.function", "eval.interval_steps", "eval.asynchronous", "eval.video_every"),
    *("eval.opponents", "eval.estimate", "eval.dataset", "record", "compile", "ray."),
)


@dataclass(frozen=True)
class EvaluationOptions:
    """What to do with every run."""

    seed: int
    snapshot: str
    replay: bool
    render: str
    video: str
    out: str
    dataset: str
    device: str
    trust: bool
    changes: Mapping[str, Any]  # keys of the run


@dataclass(frozen=True)
class EvaluatedRun:
    """A run that is to be evaluated."""

    name: str  # as on the command line
    trained: Trained
    logged: float  # with replay, the mean return to compare with; else nan


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    return run_command(_evaluate, argv, _USAGE)


def _evaluate(argv: list[str]) -> int:
    names, given = paths_and_settings(argv)
    words = KeyValues(given)
    if not names:
        raise ConfigError(f"{given[0]:.60} is no run that exists; the first word is a run directory or snapshot")
    if "estimate" in words.remaining:
        return estimate_runs(names, words)
    if are_matches(names, KeyValues(given)):
        return play_runs(names, words)
    options = read_options(words)
    runs = [_load(name, options) for name in names]
    if options.out:
        prepare_output(Path(options.out))
    if options.dataset:
        _check_dataset(options.dataset, len(runs))
    if options.video:
        prepare_film(Path(options.video))
    found = []
    for number, run in enumerate(runs):
        folder = Path(options.video, f"{number}_{run.trained.experiment.title()}" if len(runs) > 1 else "")
        found.append(_play(run, options, folder))
    if len(found) > 1:
        print(report.table(found))
    if options.out:
        report.write(Path(options.out), found)
    return 0


def _check_dataset(name: str, n_runs: int) -> None:
    """Raise ConfigError unless the episodes of one run can be recorded to a dataset of this name."""
    if n_runs > 1:
        raise ConfigError(f"dataset={name:.100} is for one run, not {n_runs}; evaluate them one by one")
    check_can_write()
    check_free(name)


def read_options(words: KeyValues) -> EvaluationOptions:
    """The options of the command line. Raises ConfigError for a wrong one, or if there is no display for a window."""
    replay = words.flag("replay")
    if replay and (chosen := [key for key in words.remaining if key not in _WITH_REPLAY]):
        raise ConfigError(f"replay=true plays the run's own evaluation again, so {chosen[0]} cannot be chosen")
    of_eval = {"eval.n_workers": words.count("n_workers", 0)} if replay else _eval_keys(words)
    seed, device, trust = words.count("seed", 0), words.text("device", "auto"), words.flag("trust")
    snapshot, out, dataset = words.text("snapshot"), words.text("out"), words.text("dataset")
    render, video = words.text("render"), words.text("video")
    if render not in ("", "human"):
        raise ConfigError(f"render={render!r} must be human")
    if render and video:
        raise ConfigError("render=human opens a window and video=DIR films without one; choose one of them")
    if render and sys.platform == "linux" and not any(os.environ.get(name) for name in DISPLAYS):
        raise ConfigError("render=human needs a display, and DISPLAY is not set; video=DIR films without one")
    if dataset and (render or video):
        raise ConfigError("dataset= records episodes that are played side by side; leave out render and video")
    here = {"world_size": 1, "learners": 1, "eval.video_every": 0}  # one process plays, however many trained
    changes = {**here, **of_eval, **_changes(words.remaining)}
    return EvaluationOptions(seed, snapshot, replay, render, video, out, dataset, device, trust, changes)


def _eval_keys(words: KeyValues) -> dict[str, Any]:
    """The keys of eval. that have a shorter name and defaults of their own here."""
    given = words.remaining.copy()
    for key in _OF_EVAL:
        if key in given and (long := f"eval.{_SHORT.get(key, key)}") in given:
            raise ConfigError(f"{key} is short for {long}; give one of them")
    if {"steps", "eval.env_steps"} & given.keys() and {"n_episodes", "eval.n_episodes"} & given.keys():
        raise ConfigError("steps and n_episodes both say how long to play; give one of them")
    n_episodes, n_envs = words.count("n_episodes", 10), words.count("n_envs", 8)
    steps = words.count("steps", 0)
    if n_episodes < 1 or n_envs < 1 or ("steps" in given and steps < 1):
        raise ConfigError(f"n_episodes={n_episodes}, n_envs={n_envs} and steps must be at least 1")
    return {
        "eval.n_episodes": n_episodes,
        "eval.env_steps": steps,
        "eval.n_envs": n_envs,
        "eval.n_workers": words.count("n_workers", 0),
        "eval.explore": words.flag("explore", "epsilon" in given),
        "eval.epsilon": words.text("epsilon", "nan"),
    }


def _changes(words: Mapping[str, str]) -> dict[str, str]:
    """The keys of the run that get other values. Raises ConfigError for one that does not exist or has no effect."""
    known = [*_OWN, *_OF_EVAL, *(key for key in chz.chz_fields(Experiment) if not key.startswith(_WITHOUT_EFFECT))]
    for key in words:
        if without_policy(key).startswith(_WITHOUT_EFFECT):
            remedy = (
                "name the players after the run: RUN random" if key == "eval.opponents" else "--help lists the keys"
            )
            raise ConfigError(f"{key} is of training, and has no effect here ({remedy})")
        if "." not in key and key not in known:
            raise ConfigError(f"unknown key {key!r}{nearest(key, known)} (--help lists the keys)")
    # The run's own eval.env_kwargs would win over env_kwargs.
    return {f"eval.{key}" if key.partition(".")[0] == "env_kwargs" else key: value for key, value in words.items()}


def _load(name: str, options: EvaluationOptions) -> EvaluatedRun:
    """Load a run and say which snapshot was taken; raises what would prevent its evaluation."""
    path, o = Path(name), options
    chosen, trained = load_chosen(path, o.snapshot, o.device, o.trust, o.changes)
    config = trained.experiment.eval
    if trained.env.id == none.NAME:
        raise ConfigError(none.NOT_PLAYABLE)
    if config.env_steps and (o.render or o.video):
        raise ConfigError("steps is for episodes side by side; with render and video give n_episodes")
    if o.dataset and isinstance(trained.observation_space, JointSpace):
        raise ConfigError(
            f"dataset={o.dataset:.100} is for environments of a single agent so far, and env={trained.env.id} has "
            f"several; play it with rlframe.load_policy({name!r}), and write what you need"
        )
    with trained.agent.exploring_at(config.epsilon):  # an agent without epsilon is an error now
        pass
    if "threads" in o.changes and trained.experiment.threads > 0:
        torch.set_num_threads(trained.experiment.threads)
    score = "" if math.isnan(trained.score) else f", score {decimals(trained.score)}"
    print(
        printable(
            f"{trained.experiment.title()}: {_reason(path, chosen, o.snapshot)}: {trained.snapshot}, "
            f"trained for {trained.trained_for}{score}"
        )
    )
    return EvaluatedRun(name, trained, _logged_return(trained) if o.replay else math.nan)


def _logged_return(trained: Trained) -> float:
    """The mean return that the run logged when it wrote the snapshot. Raises ConfigError if it has none."""
    if other := trained.experiment.eval.replacement:
        raise ConfigError(f"replay=true plays episodes again, and the run evaluated by {other}")
    return report.logged_return(params_of(trained.snapshot).with_name(_LOG), trained.step)


def _reason(path: Path, chosen: Path, name: str) -> str:
    """Which snapshot was taken, and why."""
    if name:
        return f"snapshot={name}"
    if chosen != path:
        return "the best snapshot (snapshot=last takes the newest)"
    if not (path / "params.json").is_file() and path.name != "snapshot":
        return "the snapshot that was named"
    if choose_snapshot(path) != path:
        return "the newest snapshot (the best one is damaged)"
    return "the newest snapshot (the run keeps no best one)"


def _play(run: EvaluatedRun, options: EvaluationOptions, folder: Path) -> report.Evaluation:
    """Play a run's episodes and print them."""
    trained, replay = run.trained, options.replay
    seed, number = (trained.experiment.seed, trained.step) if replay else (options.seed, 0)
    config = trained.experiment.eval
    precision = choose_precision(trained.experiment.precision, next(trained.agent.parameters()).device)
    with (
        env_vars_set(trained.experiment.env_vars),
        learning_in(precision),
        progress_bar(trained.experiment.title(), config.env_steps or config.n_episodes) as advance,
    ):

        def on_episode(episode: Trajectory) -> None:
            advance(episode.length if config.env_steps else 1)

        if options.render or options.video:
            episodes = []
            for episode in _watched(trained, options, folder):
                on_episode(episode)
                episodes.append(episode)
        else:
            with closing(Evaluator(trained.env, trained.agent, config, seed)) as evaluator:
                episodes = _play_recorded(evaluator, trained, options.dataset, number, on_episode)
    seeds = [round_seed(own, number) for own in distinct_seeds(seed, Role.EVAL_ENV, config.n_envs)]
    trained_for = trained.trained_for, trained.env_steps, trained.updates
    found = report.Evaluation(run.name, trained.snapshot, *trained_for, seeds, episodes)
    if config.env_steps:
        share, played = math.ceil(config.env_steps / config.n_envs), sum(episode.length for episode in episodes)
        print(
            f"steps={config.env_steps:,}: each of {config.n_envs} environments started another episode until it had "
            f"played {share:,}, and each episode that it began counts: {played:,} env_steps"
        )
    print(found.lines())
    if replay:
        mean = found.summary()[report.RETURN_MEAN]
        same = "the same as" if mean == run.logged else "but"
        print(f"replay: return_mean {mean!r}, {same} {run.logged!r} in {_LOG} at {trained.trained_for}")
    return found


def _play_recorded(
    evaluator: Evaluator, trained: Trained, dataset: str, number: int, on_episode: Callable[[Trajectory], None]
) -> list[Trajectory]:
    """Play the episodes of an evaluation, and write them to a dataset, unless its name is empty."""
    if not dataset:
        return evaluator.play(number, on_episode=on_episode)
    experiment, explore = trained.experiment, evaluator.config.explore
    how = "with exploration" if explore else "greedy"
    facts = facts_of(to_flat(experiment), kind_of("algo", experiment.algo), experiment.seed)
    facts["description"] += f", {how}, at {trained.trained_for}"
    spaces = trained.observation_space, trained.action_space
    new = NewDataset(dataset, *spaces, env_spec_json(trained.env), facts)
    with closing(EvaluationRecorder(new, explore, lambda rows: evaluator.agent.behaviour()(rows))) as recorder:
        evaluator.on_batch = recorder.on_batch

        def counted(episode: Trajectory) -> None:
            recorder.on_episode(episode)
            on_episode(episode)

        episodes = evaluator.play(number, on_episode=counted)
    print(
        f"dataset: {recorder.writer.n_episodes:,} episodes, {recorder.writer.n_steps:,} steps in {recorder.writer.path}"
    )
    return episodes


def _watched(trained: Trained, options: EvaluationOptions, folder: Path) -> Iterator[Trajectory]:
    """Play episodes in a window, or film them."""
    config = trained.experiment.eval
    which = FilmConfig(config.n_episodes, options.seed, config.explore, config.max_length)
    with trained.agent.exploring_at(config.epsilon):
        if options.render:
            yield from show(trained.env, trained.agent, which)
            return
        for path, episode in film(folder, trained.env, trained.agent, which):
            print(f"video: {path}")
            yield episode


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
