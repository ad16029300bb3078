"""The key=value words of the evaluate command: its own, those of eval. with a shorter name, and keys of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import chz

from rlframe.core.command_line import KeyValues
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.experiment.config import Experiment

_OWN = ("seed", "snapshot", "replay", "render", "video", "out", "device", "trust")
_SHORT = {"steps": "env_steps"}  # key: field of eval., where they differ
_OF_EVAL = ("n_episodes", "steps", "n_envs", "n_workers", "explore", "epsilon")  # with defaults of this command
_WITH_REPLAY = ("replay", "snapshot", "n_workers", "out", "device", "threads", "trust")
_WITHOUT_EFFECT = (  # beginnings of keys of the run
    *("sampler", "runner", "explore.", "algo.explore", "algo.optimizer", "reward.", "snapshot_", "affinity"),
    *("world_size", "learners", "callbacks"),
    *("init", "name", "run_ID", "log_dir", "stop", "loggers", "log_level"),
    *("eval.function", "eval.interval_steps", "eval.asynchronous", "eval.video_every"),
)
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")


@dataclass(frozen=True)
class EvaluationOptions:
    """What to do with every run."""

    seed: int
    snapshot: str
    replay: bool
    render: str
    video: str
    out: str
    device: str
    trust: bool
    changes: Mapping[str, Any]  # keys of the run


def read_options(words: KeyValues) -> EvaluationOptions:
    """The options of the command line. Raises ConfigError for a wrong one, or if there is no display for a window."""
    replay = words.flag("replay")
    if replay and (chosen := [key for key in words.remaining if key not in _WITH_REPLAY]):
        raise ConfigError(f"replay=true plays the run's own evaluation again, so {chosen[0]} cannot be chosen")
    of_eval = {"eval.n_workers": words.count("n_workers", 0)} if replay else _eval_keys(words)
    seed, device, trust = words.count("seed", 0), words.text("device", "auto"), words.flag("trust")
    snapshot, out = words.text("snapshot"), words.text("out")
    render, video = words.text("render"), words.text("video")
    if render not in ("", "human"):
        raise ConfigError(f"render={render!r} must be human")
    if render and video:
        raise ConfigError("render=human opens a window and video=DIR films without one; choose one of them")
    if render and sys.platform == "linux" and not any(os.environ.get(name) for name in _DISPLAYS):
        raise ConfigError("render=human needs a display, and DISPLAY is not set; video=DIR films without one")
    changes = {**of_eval, **_changes(words.remaining)}
    return EvaluationOptions(seed, snapshot, replay, render, video, out, device, trust, changes)


def _eval_keys(words: KeyValues) -> dict[str, Any]:
    """The keys of eval. that have a shorter name and defaults of their own here."""
    given = words.remaining.copy()
    for key in _OF_EVAL:
        if key in given and (long := f"eval.{_SHORT.get(key, key)}") in given:
            raise ConfigError(f"{key} is short for {long}; give one of them")
    if "steps" in given and "n_episodes" in given:
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
        if key.startswith(_WITHOUT_EFFECT):
            raise ConfigError(f"{key} is of training, and has no effect here (--help lists the keys)")
        if "." not in key and key not in known:
            raise ConfigError(f"unknown key {key!r}{nearest(key, known)} (--help lists the keys)")
    # The run's own eval.env and eval.env_kwargs would win over env and env_kwargs.
    own_env = {"eval.env": ""} if "env" in words else {}
    return own_env | {f"eval.{key}" if key.startswith("env_kwargs.") else key: value for key, value in words.items()}
