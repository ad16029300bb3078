"""A trained agent, or its policy, from a run directory: `load_policy(RUN_DIR).act(observation)`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, SnapshotError, one_line
from rlframe.envs import EnvConfig, make_envs
from rlframe.envs.make import NO_ENV, env_name
from rlframe.evaluation.policy import Policy
from rlframe.evaluation.team_policy import TeamPolicy, policy_of
from rlframe.experiment.agents import check_of_policy
from rlframe.experiment.build import make_agent
from rlframe.experiment.config import Experiment
from rlframe.experiment.objects import NOT_OF_POLICY, recorded
from rlframe.experiment.settings import from_flat, long_keys, merge
from rlframe.experiment.trust import check_network, read_config
from rlframe.experiment.weights import load_weights, policies_at
from rlframe.kernels.device import choose_device
from rlframe.record.snapshot import link_target, list_snapshots, load_newest, params_of, resolve_snapshot
from rlframe.system.env_vars import env_vars_set

_logger = logging.getLogger("rlframe")


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
    updates: int
    score: float  # of the snapshot, by which the best is chosen; nan: not recorded

    @property
    def step(self) -> int:
        """Where the snapshot stands: its env_steps, or its updates where no environment was stepped."""
        return self.env_steps or self.updates

    @property
    def trained_for(self) -> str:
        """How long it was trained: 100,000 env_steps."""
        return f"{self.step:,} {'env_steps' if self.env_steps or not self.updates else 'updates'}"


def load_trained(
    path: Path, device: str = "auto", trust: bool = False, changes: Mapping[str, Any] = MappingProxyType({})
) -> Trained:
    """The agent of a run directory or snapshot.

    Args:
        trust: its config may name code that is not part of rlframe.
        changes: keys of its config with other values.
    Raises:
        ConfigError, SnapshotError: there is no snapshot, it is damaged, it needs trust, or with the changes its weights
            do not fit the network.
    """
    params, given = params_of(resolve_snapshot(path)), long_keys(changes)
    config = recorded(read_config(params, trust, given, NOT_OF_POLICY), given, str(params))
    check_of_policy(given, config)
    config = _without_other_kwargs(config, given)
    snapshot, weights, meta = load_newest(path, key="agent")
    if policies := policies_at(path):  # all weights by the names of a Team's
        weights = {f"policies.{name}.{key}": x for name in policies for key, x in weights[name].items()}
    check_network(merge(config, changes)[0], weights, str(snapshot))
    experiment = from_flat(config, changes).without_init()
    env = experiment.eval_env_config()
    with env_vars_set(experiment.env_vars), closing(make_envs(env, 1, [0])) as envs:
        both_spaces = envs.observation_space, envs.action_space
    agent = _agent_with(experiment, weights, *both_spaces, str(snapshot)).to(choose_device(device))
    score = meta["score"] if isinstance(meta.get("score"), int | float) else math.nan
    env_steps, updates = int(meta["env_steps"]), int(meta.get("updates", 0))
    return Trained(agent, experiment, env, *both_spaces, snapshot, env_steps, updates, score)


def _without_other_kwargs(config: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the arguments of its environments, where others are given; env= is for evaluation too."""
    env, of_eval = config.get("env", ""), config.get("eval.env") or config.get("env", "")
    given_env = given.get("env", env)
    given_eval = given.get("eval.env") or (given_env if "env" in given else of_eval)
    found = {**config, "eval.env": ""} if "env" in given else config
    for key, before, now in (("env_kwargs", env, given_env), ("eval.env_kwargs", of_eval, given_eval)):
        if config.get(key) and env_name(now) != env_name(before):
            found = {**found, key: {}}
            if before == NO_ENV:  # whose only argument is its dataset
                continue
            keys = ", ".join(f"{key}.{name}" for name in config[key])
            _logger.warning(f"{keys} of {env_name(before)} left out, as the environment is {env_name(now)}")
    return found


def _agent_with(
    experiment: Experiment, weights: Any, observation_space: Space, action_space: Space, source: str
) -> Agent:
    try:
        agent = make_agent(experiment, observation_space, action_space, torch.device("cpu"))
        own = [*agent.agents().values()]
        load_weights(own[0] if len(own) == 1 else agent, weights, source)  # one alone has its weights by their names
    except (ConfigError, ValueError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:2])  # torch names every parameter
        observations, actions = (one_line(space, 100) for space in (observation_space, action_space))
        raise ConfigError(
            f"{first} (env={experiment.env} has observations {observations} and actions {actions}; with env=, "
            f"env_kwargs=, model= and algo= the network must stay as it was trained)"
        ) from None
    return agent


def choose_snapshot(path: Path, name: str = "") -> Path:
    """What `load_trained` is to load: the snapshot `name` of a run, best, last or step_<env_steps>.

    Without a name, the run's best, or if it keeps none, its newest; or `path`, if that is a snapshot itself.

    Raises:
        SnapshotError: the run has no such snapshot.    ConfigError: `path` is a snapshot, and a name is given.
    """
    name = str(name)
    folder = path / "snapshot" if (path / "snapshot").is_dir() else path
    found = [snapshot.name for snapshot in list_snapshots(folder)]
    if not found:
        if name and path.exists():
            raise ConfigError(f"snapshot={name} needs a run directory with snapshots, and {path} is none")
        return path
    has_best = link_target(folder / "best") is not None
    if name == "last" or (not name and not has_best):
        return path
    links = [*(["best"] if has_best else []), "last"]
    if name and name not in (*links, *found):
        kept = (
            "; snapshot_mode=best keeps the best one, once its metric is seen"
            if name == "best"
            else nearest(name, [*links, *found])
        )
        raise SnapshotError(f"{path} has no snapshot {name!r}; it has {', '.join([*links, *found[-5:]])}{kept}")
    return folder / (name or "best")


def load_chosen(
    path: Path, snapshot: str, device: str, trust: bool, changes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Path, Trained]:
    """`choose_snapshot`, and its `load_trained`; where the best one is damaged, with a warning, the newest."""
    chosen = choose_snapshot(path, snapshot)
    try:
        return chosen, load_trained(chosen, device, trust, changes)
    except SnapshotError as error:
        if snapshot or chosen == path or not error.damaged:
            raise
        _logger.warning(f"the best snapshot cannot be used: {error}. Loading the newest instead")
        return path, load_trained(path, device, trust, changes)


def load_policy(
    path: str | Path,
    device: str = "cpu",
    trust: bool = False,
    changes: Mapping[str, Any] = MappingProxyType({}),
    name: str = "",
    snapshot: str = "",
) -> Policy | TeamPolicy:
    """The policy of a run directory, or of one of its snapshots (see `load_trained`); of several all, or one by name.

    `snapshot`: see `choose_snapshot`.

    Raises:
        ConfigError: it has none of this name.
    """
    _, trained = load_chosen(Path(path).expanduser(), snapshot, device, trust, changes)
    return policy_of(trained.agent, (trained.observation_space, trained.action_space), trained.env, name)
