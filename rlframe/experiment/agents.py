"""`agents.*`: which policy acts for which agent of an environment of several, and each policy's algorithm and model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import chz

from rlframe.core.config import names, option
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import PolicyMap
from rlframe.core.parts import ROOTS, part
from rlframe.models import ModelConfig
from rlframe.runners.league import LeagueConfig

OF_POLICY = re.compile(r"agents\.policies\.([^.]+)\.(.+)")
_INHERITED = re.compile(r"(algo|model)(\..*)?")
_NAME = re.compile(r"\w+")


@chz.chz
class PolicyConfig:
    """One of several policies. What is not given is as the run's own `algo` and `model`."""

    algo: Any = part(ROOTS["algo"], "ppo", "algorithm; default: the run's")
    model: ModelConfig
    init: str = option("", "snapshot or run directory to take its weights from")


@chz.chz
class AgentsConfig:
    """The policies of an environment of several agents. By default one acts for all."""

    map: Mapping[str, Any] = chz.field(
        default_factory=dict, doc="policies of agents: agents.map.prey_*=prey; or module:function of (agent, episode)"
    )
    map_function: str = option("", "agents.map=module:function is written so in params.json")
    policies: Mapping[str, PolicyConfig] = chz.field(
        default_factory=dict, doc="settings of one of several: agents.policies.red.algo.learning_rate=1e-3"
    )
    train: tuple[str, ...] = names((), "[red]: the policies that learn, the others stay as they are; default: all")
    global_state: str = option(
        "", "true: critics see the environment's state() too; or module:function of the observations"
    )
    agent_id: bool = option(False, "agents observe which one they are, so that a shared policy can tell them apart")
    league: LeagueConfig = chz.field(default_factory=LeagueConfig)

    @chz.validate
    def _check(self) -> None:
        if self.map and self.map_function:
            raise ConfigError("agents.map has names of agents and a function; give one of them")
        if (n := self.league.opponents) and (key := self.given()) in ("agents.map", "agents.policies", "agents.train"):
            raise ConfigError(
                f"agents.league.opponents={n} is for one policy that learns from playing its own past; remove {key}"
            )
        for name in self.policies:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"agents.policies.{name:.60}: a policy's name has letters, digits and _ only")
            if name == "env":
                raise ConfigError("agents.policies.env: eval/env/ are metrics of environments; use another name")
        for name in self.train:
            if name not in self.policies:
                known = ", ".join(self.policies) or "none that is named"
                raise ConfigError(
                    f"agents.train=[{','.join(self.train)}]: {name} is no policy; there are {known}; name it by "
                    f"agents.map.AGENT={name}, or with a function as agents.map by agents.policies.{name}.algo=ppo"
                )

    def policy_map(self, league: bool = True) -> PolicyMap:
        """For the environments; without `league`, the policy that learns plays all seats."""
        state = {"true": "true", "false": ""}.get(self.global_state.lower(), self.global_state)
        patterns = {str(pattern): str(policy) for pattern, policy in self.map.items()}
        opponents, self_play = (self.league.opponents, self.league.self_play) if league else (0, 0.0)
        return PolicyMap(patterns, self.map_function, tuple(self.policies), state, self.agent_id, opponents, self_play)

    def given(self) -> str:
        """A key that is not as by default; empty if there is none."""
        own = {
            "map": self.map or self.map_function,
            "policies": self.policies,
            "train": self.train,
            "global_state": self.global_state.lower() not in ("", "false"),
            "agent_id": self.agent_id,
            "league.opponents": self.league.opponents,
        }
        return next((f"agents.{key}" for key, value in own.items() if value), "")

    def learns(self, policy: str) -> bool:
        return not self.train or policy in self.train


def named_policies(config: Mapping[str, Any]) -> list[str]:
    """The names of the policies that have keys of their own in a flat config."""
    return sorted({match[1] for key in config if (match := OF_POLICY.fullmatch(str(key)))})


def check_of_policy(given: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key is given that policies with names have each for themselves, in the config of a run."""
    names = named_policies(config)
    if names and (key := next((key for key in given if _INHERITED.fullmatch(key)), "")):
        raise ConfigError(
            f"{key}: this run has the policies {', '.join(names)}; write agents.policies.{names[0]}.{key}"
        )


def without_policy(key: str) -> str:
    """A key without the name of one of several policies: agents.policies.red.algo.clip as algo.clip."""
    match = OF_POLICY.fullmatch(key)
    return match[2] if match else key


def with_policies(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which each policy that is named, also by agents.map, has the run's own algo and model below its own.

    A policy with another algorithm has none of the run's settings of that.
    """
    found = dict(settings)
    mapped = [value for key, value in settings.items() if key.startswith("agents.map.")]
    if isinstance(given := settings.get("agents.map"), Mapping):
        mapped += given.values()
    if wrong := [name for name in map(str, mapped) if not _NAME.fullmatch(name)]:
        raise ConfigError(f"agents.map: {wrong[0]!r:.60} is no policy's name, which has letters, digits and _ only")
    named = [match[1] for key in settings if (match := OF_POLICY.fullmatch(key))]
    root = {key: value for key, value in settings.items() if _INHERITED.fullmatch(key)}
    root = {"algo": "ppo", **root}
    for name in dict.fromkeys([*named, *map(str, mapped)]):
        own = f"agents.policies.{name}"
        other = _kind(found.get(f"{own}.algo", root["algo"])) != _kind(root["algo"])
        for key, value in root.items():
            if not (other and key.startswith("algo")):
                found.setdefault(f"{own}.{key}", value)
    return found


def _kind(algo: Any) -> Any:
    """A value of algo=, whose names of rlframe's may be written in capitals."""
    return algo.lower() if isinstance(algo, str) and algo.isidentifier() else algo
