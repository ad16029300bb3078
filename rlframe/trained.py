"""A trained agent from its files alone: from a run directory or a snapshot to the agent and what it acts in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import chz
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, make_envs
from rlframe.experiment import Experiment, choose_device, from_flat, load_weights, make_agent
from rlframe.record.snapshot import load_newest
from rlframe.trust import read_config


@dataclass(frozen=True)
class Trained:
    """An agent with its weights, and where they come from."""

    agent: Agent
    experiment: Experiment
    env: EnvConfig  # as for evaluation
    observation_space: Space
    action_space: Space
    snapshot: Path
    env_steps: int


def load_trained(path: Path, device: str = "auto", trust: bool = False, seed: int = 0) -> Trained:
    """The agent of a run directory, or of one of its snapshots.

    Args:
        trust: whether the run's config may name code that is no part of rlframe.
    Raises:
        ConfigError, SnapshotError: there is none, it is damaged, or it needs trust.
    """
    snapshot, weights, meta = load_newest(path, of="agent")
    config = read_config(params_of(snapshot), trust)
    experiment = chz.replace(from_flat(config), seed=seed, init="")
    env = experiment.eval_env_config()
    envs = make_envs(env, 1, [0])
    try:
        spaces = envs.observation_space, envs.action_space
    finally:
        envs.close()
    agent = make_agent(experiment, *spaces, torch.device("cpu"))
    load_weights(agent, weights, str(snapshot))
    agent = agent.to(choose_device(device))
    return Trained(agent, experiment, env, *spaces, snapshot, int(meta["env_steps"]))


def params_of(snapshot: Path) -> Path:
    """The params.json of the run that a snapshot belongs to: the nearest above it.

    Raises:
        ConfigError: there is none.
    """
    for folder in list(snapshot.resolve().parents)[:3]:
        if (folder / "params.json").is_file():
            return folder / "params.json"
    raise ConfigError(f"{snapshot} lies in no run directory: there is no params.json above it")
