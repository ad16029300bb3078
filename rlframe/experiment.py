"""The Experiment config, from the words of a command line or a preset, and build(): from configs to live objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import torch
import yaml

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.config import ConfigError, choice, count, module_part, nearest, option
from rlframe.core.seeding import Role, seed_int
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.runners import Runner
from rlframe.samplers import EvalConfig, Evaluator, Sampler

DEFAULT_PRESET = "classic/ppo_cartpole"  # where the command line names no env, algo or experiment
_FREE_FORM = ("env_kwargs", "eval_env_kwargs")  # keys under these are the environment's, not ours


@chz.chz
class Experiment:
    """One run, whole: everything that decides its result, and where its record goes."""

    algo: Any = chz.field(meta_factory=module_part("rlframe.algos", "ppo"), doc="algorithm, or package.module, ./file.py")
    env: str = option("CartPole-v1", "Gymnasium id, or package.module:callable")
    env_kwargs: Mapping[str, Any] = option({}, "arguments of the environment: env_kwargs.name=value")
    env_backend: str = choice("auto", ("auto", "native", "envpool", "python"), "what steps the environments")
    model: ModelConfig = chz.field(default_factory=ModelConfig, doc="network")
    sampler: Any = chz.field(meta_factory=module_part("rlframe.samplers", "serial"), doc="who steps the environments")
    runner: Any = chz.field(meta_factory=module_part("rlframe.runners", "minibatch_rl_eval"), doc="training loop")
    eval: EvalConfig = chz.field(default_factory=EvalConfig, doc="evaluation")
    eval_env_kwargs: Mapping[str, Any] = option({}, "over env_kwargs, for evaluation only")
    device: str = option("auto", "auto | cpu | cuda:0: where the agent acts and learns")
    threads: int = count(0, "torch threads; 0: what torch chooses")
    seed: int = count(0, "root of every random stream")
    name: str = option("", "of the run; default: algorithm and environment")
    run_ID: int = count(0, "number of the run in its directory")
    log_dir: str = option("", "directory of runs; default: data/local/<date>/<time>/<name>")
    snapshot_mode: str = choice("last", ("none", "last", "all", "gap", "best"), "which snapshots are kept")
    snapshot_gap: int = count(0, "env_steps between kept snapshots, with snapshot_mode=gap")
    init: str = option("", "snapshot or run directory to take trained weights from")

    def env_config(self) -> EnvConfig:
        """The training environment."""
        return EnvConfig(self.env, dict(self.env_kwargs), self.env_backend)

    def eval_env_config(self) -> EnvConfig:
        """The evaluation environment."""
        return EnvConfig(self.env, {**self.env_kwargs, **self.eval_env_kwargs}, self.env_backend)
