"""A trained agent, or its policy, from a run directory: `load_policy(RUN_DIR).act(observation)`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import chz
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, make_envs
from rlframe.experiment.build import choose_device, load_weights, make_agent
from rlframe.experiment.config import Experiment, from_flat
from rlframe.experiment.trust import check_network, read_config
from rlframe.record.snapshot import load_newest
from rlframe.rollout.policy import Policy


@dataclass(frozen=True)
class Trained:
    """A trained agent and where it comes from."""

    agent: Agent
    experiment: Experiment
    env: EnvConfig  # for evaluation
    observation_space: Space
    action_space: Space
    snapshot: Path
    env_steps: int


def load_trained(path: Path, device: str = "auto", trust: bool = False) -> Trained:
    """The agent of a run directory or snapshot; `trust`: its config may name code that is not part of rlframe.

    Raises:
        ConfigError, SnapshotError: there is no snapshot, it is damaged, or it needs trust.
    """
    snapshot, weights, meta = load_newest(path, key="agent")
    config = read_config(params_of(snapshot), trust)
    check_network(config, weights, str(snapshot))
    experiment = chz.replace(from_flat(config), init="")
    env = experiment.eval_env_config()
    with closing(make_envs(env, 1, [0])) as envs:
        both_spaces = envs.observation_space, envs.action_space
    agent = make_agent(experiment, *both_spaces, torch.device("cpu"))
    load_weights(agent, weights, str(snapshot))
    agent = agent.to(choose_device(device))
    return Trained(agent, experiment, env, *both_spaces, snapshot, int(meta["env_steps"]))


def params_of(snapshot: Path) -> Path:
    """The params.json of the run that a snapshot belongs to, at most three folders above it.

    Raises:
        ConfigError: there is none.
    """
    for folder in list(snapshot.resolve().parents)[:3]:
        if (folder / "params.json").is_file():
            return folder / "params.json"
    raise ConfigError(f"{snapshot} is not in a run directory: there is no params.json above it")


def load_policy(path: str | Path, device: str = "cpu", trust: bool = False) -> Policy:
    """The policy of a run directory, or of one of its snapshots (see `load_trained`)."""
    trained = load_trained(Path(path), device, trust)
    return Policy(trained.agent, trained.observation_space, trained.action_space)
