"""What algorithms refuse before they begin: parts that do not fit, and runs without an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlframe.agents import Agent, QAgent
from rlframe.algos.replay_ratio import ReplayRatio
from rlframe.core.errors import ConfigError
from rlframe.core.objects import is_own
from rlframe.critics import Value
from rlframe.models.network import OF_BATCH
from rlframe.replay import Replay

_MOST_UPDATES = 1_000  # for each env_step; more would hardly ever end


def check_learns(c: Any, ratio: ReplayRatio, n_steps: int) -> None:
    """Raise ConfigError if a run of so many env_steps makes no update, or too many."""
    if (n := c.replay_ratio / ratio.batch_size) > _MOST_UPDATES:
        raise ConfigError(
            f"algo.replay_ratio={c.replay_ratio:g} with algo.batch_size={c.batch_size} makes {n:,.0f} updates for each "
            f"env_step, more than {_MOST_UPDATES:,}; use algo.replay_ratio={_MOST_UPDATES * ratio.batch_size} or less"
        )
    if not ratio.updates_until(n_steps):
        rows = ratio.batch_size
        most = n_steps - (every := math.ceil(min(rows / c.replay_ratio, 1e18)))
        fewer = "raise algo.replay_ratio, or learn from fewer rows in an update"
        remedy = f"use algo.learning_starts={most} or less" if most >= 0 else fewer
        raise ConfigError(
            f"nothing would be learned: with algo.replay_ratio={c.replay_ratio:g}, an update of {rows:,} rows "
            f"(algo.batch_size={c.batch_size}) is due every {every:.7g} env_steps after "
            f"algo.learning_starts={c.learning_starts}, and runner.n_steps={n_steps} are too few; {remedy}, or use a "
            f"preset made for such a task (experiment=, see --list presets)"
        )


def check_replay(replay: Replay, config: Any) -> None:
    """Raise ConfigError if a replay that was handed in is not the one that the config, one of rlframe's, describes."""
    made = {} if is_own(config) or not hasattr(replay, "made_with") else replay.made_with()
    given = {name: getattr(config, name, False) for name in made}
    if "prioritized" in given and not getattr(config, "alpha", 1.0):  # then priorities decide nothing
        given["prioritized"] = False
    _check_same("replay", made, given, "config.make_replay")


def check_network(agent: QAgent, config: Any) -> None:
    """Raise ConfigError if an agent that was handed in has not the network that a config of rlframe's describes."""
    if is_own(config):
        return
    kind: Value = config.kind() if hasattr(config, "kind") else agent.kind
    own = agent.model.made_with()
    given = {name: getattr(config, name) for name in own}
    _check_same("agent", agent.kind.made_with() | own, kind.made_with() | given, "config.make_agent")


def check_norms(agent: Agent, why: str = "counts rows of a batch in which nobody acted") -> None:
    """Raise ConfigError if a network of the agent's config normalises over batches, which in learning does `why`."""
    if model := agent.model_config:
        for key, norm in {"model.norm": model.norm, "model.critic.norm": model.critic.norm}.items():
            if norm in OF_BATCH:
                raise ConfigError(f"{key}={norm} {why}; use layer or none")


def _check_same(part: str, made: Mapping[str, Any], given: Mapping[str, Any], maker: str) -> None:
    for name in {**given, **made}:
        if made.get(name) != given.get(name):
            raise ConfigError(
                f"the {part} was made with {name}={made.get(name)}, and the algorithm with algo.{name}="
                f"{given.get(name)}; give both the same, as {maker} does"
            )
